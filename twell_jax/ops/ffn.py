"""The public operation: a feed-forward layer that computes active neurons only.

One `jax.custom_vjp` serves every implementation: a module with the functions of
reference.py, `forward`, `forward_with_residuals` and `backward`, of the same
signatures. `hot_neurons` is theirs to use, since only they know which products
the two parts can share; dense_part.py has those of the hot neurons.
"""

import functools
from types import MappingProxyType, ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from twell_jax.ops import mosaic, reference, xla
from twell_jax.ops.outputs import Activity, FFNOutput

IMPLEMENTATIONS = MappingProxyType(
  {"reference": reference, "xla": xla, "mosaic": mosaic}
)

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def sparse_ffn(
  x: Float[Array, "*tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  implementation: str | None = None,
  hot_neurons: int = 0,
) -> FFNOutput:
  """A feed-forward layer with a ReLU gate, computed at active neurons only.

      gated      y = (relu(x gateᵀ) ⊙ x upᵀ) down
      non-gated  y = relu(x gateᵀ) down                       (up is None)

  Values and gradients are those of the dense layer for every input, whatever
  share of the neurons is active; products are accumulated in at least float32.
  A neuron is active at a token if its gate is positive or NaN. A token whose x
  is not finite has a non-finite y wherever the dense layer's is, and no effect
  on other tokens beyond rounding. One thing differs: a dense layer makes
  0 · ∞ = NaN of an infinite u at a silent neuron, which is skipped here.
  Infinities and NaN among the parameters or the cotangents spread at least to
  the active neurons and at most as far as in the dense layer.

  Works under jit, grad, vmap, scan and remat; leading axes of x cost less than
  vmap. Forward-mode differentiation is not defined.

  Args:
    x: Tokens, any leading shape.
    gate: Gate matrix; one row per neuron, as in `up` and `down`.
    up: Up matrix, or None for the non-gated layer.
    down: Down matrix.
    implementation: "reference", the dense layer; "xla", portable and fast on
      CPU; "mosaic", kernels for Hopper GPUs in bfloat16, with d_model up to
      8192; or None for the best one measured on this platform, today "xla".
    hot_neurons: How many neurons, the first ones, are computed for all tokens
      by dense products, which for a neuron that fires often are faster: a
      choice of speed, not of result. `order_by_rate` sorts a layer's neurons
      for it and `choose_hot_neurons` chooses the number; 0 computes all neurons
      at active tokens only.

  Returns:
    y, of the shape and dtype of x, and the activity of the call.

  Raises:
    ValueError: Shapes or dtypes that do not fit, an unknown implementation, or
      hot_neurons that are no int from 0 to d_ff.
    NotImplementedError: "mosaic" where the dtype, d_model or device is none of
      its own.

  References:
    Cetin et al., Sparser, Faster, Lighter Transformer Language Models,
    arXiv 2603.23198.
  """
  x, gate, down = jnp.asarray(x), jnp.asarray(gate), jnp.asarray(down)
  up = None if up is None else jnp.asarray(up)
  check_arguments(x, gate, up, down)
  check_hot_neurons(hot_neurons, d_ff=gate.shape[0])
  name = "xla" if implementation is None else implementation
  if name not in IMPLEMENTATIONS:
    raise ValueError(
      f"{implementation=} is unknown: use one of {sorted(IMPLEMENTATIONS)} or"
      " None for the platform's"
    )
  if x.size == 0:
    return _no_tokens(x, gate)
  rows = x.reshape(-1, x.shape[-1])
  y, activity = _ffn(IMPLEMENTATIONS[name], hot_neurons, rows, gate, up, down)
  active = activity.active.reshape(x.shape[:-1])
  return FFNOutput(y.reshape(x.shape), activity._replace(active=active))


def check_arguments(
  x: Array, gate: Array, up: Array | None, down: Array
) -> None:
  """Raises the ValueErrors of `sparse_ffn` about its arrays."""
  if x.ndim == 0 or x.shape[-1] == 0 or gate.ndim != 2 or gate.shape[0] == 0:
    raise ValueError(
      f"x {x.shape} and gate {gate.shape} must be [..., d_model] and [d_ff,"
      " d_model] with sizes of at least 1"
    )
  expected = (gate.shape[0], x.shape[-1])
  matrices = {"gate": gate, "down": down} | ({} if up is None else {"up": up})
  for name, matrix in matrices.items():
    if matrix.shape != expected:
      raise ValueError(
        f"{name} has shape {matrix.shape} but must be [d_ff, d_model] ="
        f" {expected}: a neuron is one row of each matrix, so transpose kernels"
        " kept as [in, out]"
      )
    if matrix.dtype != x.dtype:
      raise ValueError(
        f"{name} is {matrix.dtype} and x is {x.dtype}: cast them to one dtype"
      )
  if x.dtype.name not in _DTYPES:
    raise ValueError(f"x is {x.dtype} but must be one of {', '.join(_DTYPES)}")


def check_hot_neurons(hot_neurons: int, *, d_ff: int) -> None:
  """Raises the ValueError of `sparse_ffn` about its hot neurons."""
  is_int = isinstance(hot_neurons, int) and not isinstance(hot_neurons, bool)
  if not is_int or not 0 <= hot_neurons <= d_ff:
    raise ValueError(
      f"hot_neurons = {hot_neurons!r} must be an int from 0 to d_ff = {d_ff}:"
      " it is part of the program, not data"
    )


def _no_tokens(x: Array, gate: Array) -> FFNOutput:
  zero = jnp.zeros((), jnp.int32)
  activity = Activity(
    l1=jnp.zeros((), jnp.float32),
    active=jnp.zeros(x.shape[:-1], jnp.int32),
    fired=jnp.zeros(gate.shape[:1], jnp.int32),
    overflowed=zero,
  )
  return FFNOutput(jnp.zeros_like(x), activity)


def _spread_broken(output: FFNOutput, x: Array, up: Array | None) -> FFNOutput:
  """Makes y non-finite where x is, for the gated layer.

  There every u is non-finite and so is the dense y; active neurons show it by
  themselves, but all gates of such a token may be −∞.
  """
  if up is None:
    return output
  broken = ~jnp.all(jnp.isfinite(x), axis=1, keepdims=True)
  y = output.y
  nan = jnp.array(jnp.nan, y.dtype)
  return output._replace(y=jnp.where(broken & jnp.isfinite(y), nan, y))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ffn(
  module: ModuleType,
  hot_neurons: int,
  x: Array,
  gate: Array,
  up: Array | None,
  down: Array,
) -> FFNOutput:
  output = module.forward(x, gate, up, down, hot_neurons=hot_neurons)
  return _spread_broken(output, x, up)


def _ffn_forward(module, hot_neurons, x, gate, up, down):
  output, kept = module.forward_with_residuals(
    x, gate, up, down, hot_neurons=hot_neurons
  )
  return _spread_broken(output, x, up), (kept, x, gate, up, down)


def _ffn_backward(module, hot_neurons, residuals, cotangents):
  dl1 = cotangents.activity.l1
  return tuple(
    module.backward(*residuals, cotangents.y, dl1, hot_neurons=hot_neurons)
  )


_ffn.defvjp(_ffn_forward, _ffn_backward)
