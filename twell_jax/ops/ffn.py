"""The public operation: a feed-forward layer that computes active neurons only.

One `jax.custom_vjp` serves every implementation: a module with the functions of
reference.py, `forward`, `forward_with_residuals` and `backward`, of the same
signatures. The `Choices` are theirs to use, since only they know which products
the hot neurons and the others can share; dense_part.py has those of the former.
"""

import functools
from types import MappingProxyType, ModuleType

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from twell_jax.formats import Capacities
from twell_jax.ops import mosaic, reference, xla
from twell_jax.ops.choices import Choices
from twell_jax.ops.outputs import Activity, FFNOutput

IMPLEMENTATIONS = MappingProxyType(
  {"reference": reference, "xla": xla, "mosaic": mosaic}
)

# The name, for a rematerialisation policy, of what an implementation keeps for
# its backward pass besides the inputs.
RESIDUALS = "ffn_residuals"

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def sparse_ffn(
  x: Float[Array, "*tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  implementation: str | None = None,
  hot_neurons: int = 0,
  capacities: Capacities | None = None,
  dense_above: float | None = None,
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
    capacities: For "mosaic", how many active neurons of a token are packed, and
      how many of the tokens with more are kept for the backward pass; the rest
      is computed again. A choice of speed and memory, not of result, that
      `formats.capacities` makes from measured activity. By default 1/32 of the
      neurons, rounded up to a multiple of 128, and no tokens. What is larger
      than the numbers of neurons and tokens is as many as there are.
    dense_above: Share of the neurons that is active, in the mean over tokens,
      above which the call is computed by dense products throughout: decided on
      device, counted in `Activity.dense_tokens`, a choice of speed. None is
      what was measured on CPU for "xla", and modelled of an H200 for "mosaic".

  Returns:
    y, of the shape and dtype of x, and the activity of the call.

  Raises:
    ValueError: Shapes or dtypes that do not fit, an unknown implementation, or
      a choice out of its bounds.
    NotImplementedError: "mosaic" where the dtype, d_model or device is none of
      its own.

  References:
    Cetin et al., Sparser, Faster, Lighter Transformer Language Models,
    arXiv 2603.23198.
  """
  x, gate, down = jnp.asarray(x), jnp.asarray(gate), jnp.asarray(down)
  up = None if up is None else jnp.asarray(up)
  check_arguments(x, gate, up, down)
  choices = Choices(hot_neurons, capacities, dense_above)
  choices.check(d_ff=gate.shape[0])
  name = "xla" if implementation is None else implementation
  if name not in IMPLEMENTATIONS:
    raise ValueError(
      f"{implementation=} is unknown: use one of {sorted(IMPLEMENTATIONS)} or"
      " None for the platform's"
    )
  if x.size == 0:
    return _no_tokens(x, gate)
  rows = x.reshape(-1, x.shape[-1])
  y, activity = _ffn(IMPLEMENTATIONS[name], choices, rows, gate, up, down)
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


def _no_tokens(x: Array, gate: Array) -> FFNOutput:
  zero = jnp.zeros((), jnp.int32)
  activity = Activity(
    l1=jnp.zeros((), jnp.float32),
    active=jnp.zeros(x.shape[:-1], jnp.int32),
    fired=jnp.zeros(gate.shape[:1], jnp.int32),
    overflowed=zero,
    dense_tokens=zero,
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
  choices: Choices,
  x: Array,
  gate: Array,
  up: Array | None,
  down: Array,
) -> FFNOutput:
  output = module.forward(x, gate, up, down, choices=choices)
  return _spread_broken(output, x, up)


def _ffn_forward(module, choices, x, gate, up, down):
  output, kept = module.forward_with_residuals(
    x, gate, up, down, choices=choices
  )
  kept = jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUALS), kept)
  return _spread_broken(output, x, up), (kept, x, gate, up, down)


def _ffn_backward(module, choices, residuals, cotangents):
  dl1 = cotangents.activity.l1
  return tuple(module.backward(*residuals, cotangents.y, dl1, choices=choices))


_ffn.defvjp(_ffn_forward, _ffn_backward)
