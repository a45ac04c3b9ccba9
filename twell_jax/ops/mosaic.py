"""The layer by Mosaic GPU kernels, for Hopper GPUs, in bfloat16.

    x, gate ─► gate_pack: matmul, ReLU and TwELL in one kernel
                 │
                 ├► counts: which tokens overflowed a tile, or the ELL row
                 ▼
               ELL rows ─► work list, longest first ─► gathered up/down ─► y
                                                            │
    hot neurons: dense products for all tokens ─── y0 ──────┘

The kernels are in pallas_kernels; here is what joins them: sizes, padding, and
the tokens that do not fit. A token with more active neurons in a tile than the
tile has slots, or more in all than an ELL row has, is computed by dense
products instead, a fixed number of such tokens at a time: any number of them,
in bounded memory, decided on device. The result depends on none of this.

The backward pass is the dense layer's: z and u are computed again, so nothing
but the inputs is kept.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import gathered, rows, target, tuning, work_list
from twell_jax.formats import EllMatrix, TwellMatrix
from twell_jax.formats.bits import is_active
from twell_jax.ops import dense_part, reference
from twell_jax.ops.gate import (
  check_dtype,
  pack_by_kernel,
  pad_to_multiples,
)
from twell_jax.ops.outputs import Activity, FFNOutput, Forward, Gradients

# Tokens that overflowed and are computed at once: few enough that one of them
# costs little, enough that all of them use the tensor cores.
_DENSE_TOKENS = 512


def ell_width(d_ff: int) -> int:
  """Active neurons of a token up to which it goes through the gathered kernel.

  1/32 of the neurons, at least 128. Gathering breaks even with dense products
  at less than 1/100 (`hot_cold.H200.break_even`), so a token beyond this width
  is better computed densely; it is as wide as it is because dense tokens come
  in blocks.
  """
  return min(d_ff, max(128, -(-d_ff // 32 // 128) * 128))


def forward(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  hot_neurons: int,
) -> FFNOutput:
  """The layer and its activity; see ffn.py."""
  check_dtype(x)
  if x.shape[1] > rows.MAX_WIDTH:
    raise NotImplementedError(
      f"the Mosaic kernels hold rows of up to {rows.MAX_WIDTH} numbers and"
      f" d_model is {x.shape[1]}: use implementation='xla'"
    )
  tokens, d_ff = x.shape[0], gate.shape[0]
  if tokens * ell_width(d_ff) >= 2**31:
    raise ValueError(
      f"{tokens} tokens × {ell_width(d_ff)} slots must be below 2^31, the range"
      " of the work list: call the layer on fewer tokens at once"
    )
  device = target.device_of(x)
  if hot_neurons == d_ff:
    return reference.forward(x, gate, up, down, hot_neurons=hot_neurons)

  hot = _hot_part(x, gate, up, down, hot_neurons) if hot_neurons else None
  # A copy of the rows, which the kernel reads once. Those of up and down are
  # read where they lie.
  cold_gate = gate[hot_neurons:] if hot_neurons else gate
  packed = _packed(x, cold_gate, device)
  ell = EllMatrix.from_twell(packed, width=ell_width(packed.d_ff))
  cold = _gathered(x, up, down, ell, hot, hot_neurons, device)
  cold = _with_overflowed(
    cold, ell.overflow, x, cold_gate, up, down, hot, hot_neurons
  )
  active, fired, l1 = cold.active, cold.fired, cold.l1
  if hot is not None:
    active = hot.active + active
    fired = jnp.concatenate([hot.fired, fired])
    l1 = hot.l1 + l1
  activity = Activity(
    l1=l1 / tokens,
    active=active,
    fired=fired,
    overflowed=jnp.sum(ell.overflow, dtype=jnp.int32),
  )
  return FFNOutput(cold.y, activity)


def forward_with_residuals(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  hot_neurons: int,
) -> Forward:
  """`forward`, which keeps nothing."""
  return Forward(forward(x, gate, up, down, hot_neurons=hot_neurons), ())


def backward(
  kept: tuple[()],
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  dl1: Float[Array, ""],
  *,
  hot_neurons: int,
) -> Gradients:
  """The dense layer's gradients, from z and u computed again."""
  del kept
  z = reference.per_neuron(x, gate)
  again = (z,) if up is None else (z, reference.per_neuron(x, up))
  return reference.backward(
    again, x, gate, up, down, dy, dl1, hot_neurons=hot_neurons
  )


class _Hot(NamedTuple):
  """What the hot neurons give: y not rounded, the sum of |h|, who fired.

  y has the even elements of a padded row first, then the odd ones, as the
  gathered kernels read a float32 y0: no copy of it is made.
  """

  halves: Float[Array, "tokens 2 half"]
  l1: Float[Array, ""]
  active: Int32[Array, "tokens"]
  fired: Int32[Array, "hot"]


class _Cold(NamedTuple):
  """What the other neurons give; y is that of all neurons."""

  y: Float[Array, "tokens d_model"]
  l1: Float[Array, ""]
  active: Int32[Array, "tokens"]
  fired: Int32[Array, "cold"]


def _hot_part(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  hot_neurons: int,
) -> _Hot:
  hot = slice(hot_neurons)
  z = reference.per_neuron(x, gate[hot])
  padded = _pad_rows(down[hot])
  halves = jnp.concatenate([padded[:, 0::2], padded[:, 1::2]], axis=1)
  part = dense_part.forward(x, z, None if up is None else up[hot], halves)
  active = is_active(z)
  return _Hot(
    halves=part.y.reshape(x.shape[0], 2, -1),
    l1=part.l1,
    active=jnp.sum(active, axis=1, dtype=jnp.int32),
    fired=jnp.sum(active, axis=0, dtype=jnp.int32),
  )


def _packed(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "cold d_model"],
  device: target.Device,
) -> TwellMatrix:
  config = tuning.for_gate_pack(device, x.shape[0], gate.shape[0], x.shape[1])
  return pack_by_kernel(x, gate, config=config, device=device)


def _gathered(
  x: Float[Array, "tokens d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  ell: EllMatrix,
  hot: _Hot | None,
  hot_neurons: int,
  device: target.Device,
) -> _Cold:
  """The gathered kernel, over the tokens that did not overflow."""
  tokens, d_model = x.shape
  width = ell.width
  x, down = _pad_rows(x), _pad_rows(down)
  config = tuning.for_gathered(
    device,
    tokens,
    down.shape[0],
    down.shape[1],
    width,
    matrices=1 if up is None else 2,
  )
  work = work_list.of_ell(ell.stored, width=width, length=config.segment_length)
  operands: dict[str, Any] = {
    # Hot neurons come first, so cold column 0 is row `hot_neurons`.
    "columns": (ell.columns + hot_neurons).reshape(-1),
    "values": ell.values.astype(jnp.float32).reshape(-1),
    "work": work,
    "y0": None if hot is None else _interleaved(hot.halves),
    "config": config,
    "interpret": target.interpret_params(),
  }
  if up is None:
    y = gathered.gathered_down(down, m=tokens, **operands)
    l1 = jnp.sum(operands["values"])
  else:
    y, l1 = gathered.gathered_up_down(x, _pad_rows(up), down, **operands)
    l1 = jnp.sum(l1)
  # A slot that holds no entry counts nowhere.
  used = jnp.arange(width, dtype=jnp.int32)[None] < ell.stored[:, None]
  fired = jnp.zeros((ell.d_ff,), jnp.int32)
  fired = fired.at[jnp.where(used, ell.columns, ell.d_ff)].add(1, mode="drop")
  return _Cold(y[:, :d_model], l1, ell.counts, fired)


def _interleaved(
  halves: Float[Array, "rows 2 half"],
) -> Float[Array, "rows padded"]:
  return jnp.swapaxes(halves, 1, 2).reshape(halves.shape[0], -1)


def _pad_rows(
  matrix: Float[Array, "rows d_model"],
) -> Float[Array, "rows padded"]:
  return pad_to_multiples(matrix, (1, rows.WIDTH_MULTIPLE))


def _with_overflowed(
  cold: _Cold,
  overflow: Bool[Array, "tokens"],
  x: Float[Array, "tokens d_model"],
  cold_gate: Float[Array, "cold d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  hot: _Hot | None,
  hot_neurons: int,
) -> _Cold:
  """The result with the tokens that overflowed computed by dense products.

  No step is taken, and nothing computed, where none did.
  """
  tokens = x.shape[0]
  block = min(_DENSE_TOKENS, tokens)
  capacity = -(-tokens // block) * block
  # Beyond the tokens that overflowed, an index that is in no array: it reads
  # zeros and writes nothing.
  (indices,) = jnp.nonzero(overflow, size=capacity, fill_value=tokens)

  def dense_block(i: Int32[Array, ""], carry: _Cold) -> _Cold:
    chosen = lax.dynamic_slice(indices, (i * block,), (block,))

    def take(array):
      return array.at[chosen].get(mode="fill", fill_value=0)

    x_rows = take(x)
    z = reference.per_neuron(x_rows, cold_gate)
    cold_rows = slice(hot_neurons, None)
    up_rows = None if up is None else up[cold_rows]
    part = dense_part.forward(x_rows, z, up_rows, down[cold_rows])
    y = part.y
    if hot is not None:
      y += _interleaved(take(hot.halves))[:, : x.shape[1]]
    active = is_active(z).astype(jnp.int32)

    def put(array, values):
      return array.at[chosen].set(values.astype(array.dtype), mode="drop")

    return _Cold(
      y=put(carry.y, y),
      l1=carry.l1 + part.l1,
      active=put(carry.active, jnp.sum(active, axis=1)),
      fired=carry.fired + jnp.sum(active, axis=0),
    )

  steps = (jnp.sum(overflow, dtype=jnp.int32) + block - 1) // block
  return lax.fori_loop(0, steps, dense_block, cold)
