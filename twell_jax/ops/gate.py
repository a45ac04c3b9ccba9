"""The gate product and its packing: x gateᵀ, ReLU and TwELL in one step.

On a Hopper GPU the matmul writes TwELL itself, from its accumulators
(pallas_kernels/gate_pack.py), and the dense activation never reaches memory.
Elsewhere the product is packed after it is made.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import gate_pack as kernel
from pallas_kernels import target, tuning
from pallas_kernels.gate_pack_config import GatePackConfig
from twell_jax.formats import TwellMatrix
from twell_jax.ops import reference

IMPLEMENTATIONS = ("xla", "mosaic")


def gate_pack(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  *,
  tile_width: int = 256,
  slots: int = 32,
  implementation: str | None = None,
) -> TwellMatrix:
  """relu(x gateᵀ) in TwELL.

  Not differentiable; `sparse_ffn` is.

  Args:
    x: Tokens.
    gate: Gate matrix, one row per neuron.
    tile_width: Neurons of a tile.
    slots: Entries kept per (token, tile). Where there are more, the count is
      still true and the matrix says so (`TwellMatrix.overflow`).
    implementation: "xla", any dtype and device; "mosaic", bfloat16 on Hopper
      GPUs; or None for the best one measured on this platform, today "xla".

  Raises:
    ValueError: Shapes or dtypes that do not fit, sizes that the kernel cannot
      have, or an unknown implementation.
    NotImplementedError: The implementation cannot serve this dtype or device.
  """
  x, gate = jnp.asarray(x), jnp.asarray(gate)
  if x.ndim != 2 or gate.ndim != 2 or x.shape[1] != gate.shape[1]:
    raise ValueError(
      f"x {x.shape} and gate {gate.shape} must be [tokens, d_model] and [d_ff,"
      " d_model]"
    )
  if x.dtype != gate.dtype:
    raise ValueError(
      f"x is {x.dtype} and gate is {gate.dtype}: cast them to one dtype"
    )
  name = "xla" if implementation is None else implementation
  if name not in IMPLEMENTATIONS:
    raise ValueError(
      f"{implementation=} is unknown: use one of {sorted(IMPLEMENTATIONS)} or"
      " None for the platform's"
    )
  if name == "xla" or x.size == 0:
    z = reference.per_neuron(x, gate)
    return TwellMatrix.pack(z, tile_width=tile_width, slots=slots)
  check_dtype(x)
  device = target.device_of(x)
  config = tuning.for_gate_pack(
    device,
    x.shape[0],
    gate.shape[0],
    x.shape[1],
    tile_width=tile_width,
    slots=slots,
  )
  return pack_by_kernel(x, gate, config=config, device=device)


def check_dtype(x: Array) -> None:
  """Raises the NotImplementedError of the kernels about their dtype."""
  if x.dtype != jnp.bfloat16:
    raise NotImplementedError(
      f"the Mosaic kernels compute in bfloat16 and x is {x.dtype}: cast x and"
      " the parameters, or use implementation='xla'"
    )


def pack_by_kernel(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  *,
  config: GatePackConfig,
  device: target.Device,
) -> TwellMatrix:
  """By the Mosaic kernel, padded with zeros to the multiples that it needs.

  Padding costs a copy of what is padded in each call, so parameters are best
  made in such sizes: d_ff a multiple of 256, d_model of 64.
  """
  tokens, d_ff = x.shape[0], gate.shape[0]
  packed = kernel.gate_pack(
    pad_to_multiples(x, (config.padded_rows(tokens), config.tile_k)),
    pad_to_multiples(gate, (config.tile_n, config.tile_k)),
    config=config,
    sm_count=device.sm_count,
    interpret=target.interpret_params(),
  )
  tile_width, slots = config.tile_width, config.slots
  tiles = -(-d_ff // tile_width)
  words = packed.words.reshape(packed.words.shape[0], -1, slots)
  words, counts = words[:tokens, :tiles], packed.counts[:tiles, :tokens].T
  columns = words & jnp.int32(0xFFFF)
  bits = lax.shift_right_logical(words, 16)

  padding = tiles * tile_width - d_ff
  if padding:
    # A neuron of zeros is silent, except where x is not finite: there its gate
    # is 0 · ∞ = NaN, so that all neurons of the padding are active at once.
    broken = ~jnp.all(jnp.isfinite(x), axis=1)
    counts = counts.at[:, -1].add(jnp.where(broken, -padding, 0))
    ours = jnp.arange(tiles)[None, :, None] * tile_width + columns < d_ff
    columns, bits = jnp.where(ours, columns, 0), jnp.where(ours, bits, 0)
  return TwellMatrix(
    values=lax.bitcast_convert_type(bits.astype(jnp.uint16), x.dtype),
    columns=columns.astype(jnp.uint16),
    counts=counts,
    d_ff=d_ff,
    tile_width=tile_width,
  )


def pad_to_multiples(
  array: Float[Array, "rows columns"], multiples: tuple[int, int]
) -> Float[Array, "rows columns"]:
  """Zeros below and to the right, up to the next multiples."""
  padding = [
    (0, -size % multiple)
    for size, multiple in zip(array.shape, multiples, strict=True)
  ]
  return array if not any(map(sum, padding)) else jnp.pad(array, padding)
