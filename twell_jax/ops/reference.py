"""The dense layer in plain jnp: the oracle of every other implementation.

Every product is computed for every neuron, in the dtype of the inputs, with
roundings where an ordinary dense layer has them; all neurons being computed
alike, no `Choices` change anything here. Gradients are those of
`jax.grad` of that layer (tested), with d|h|/dh = 0 at h = 0, written out so
that all implementations share one `jax.custom_vjp` (see ffn.py).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from twell_jax.formats.bits import is_active
from twell_jax.ops.choices import Choices
from twell_jax.ops.outputs import Activity, FFNOutput, Forward, Gradients


def forward(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  choices: Choices,
) -> FFNOutput:
  """Y = (relu(x gateᵀ) ⊙ x upᵀ) down, and the activity of the call."""
  return forward_with_residuals(x, gate, up, down, choices=choices).output


def forward_with_residuals(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  choices: Choices,
) -> Forward:
  """`forward`, keeping the pre-activations z = x gateᵀ and u = x upᵀ."""
  del choices
  z = per_neuron(x, gate)
  u = None if up is None else per_neuron(x, up)
  active = is_active(z)
  h = hidden(z, u)
  activity = Activity(
    l1=jnp.sum(jnp.abs(h.astype(jnp.float32))) / x.shape[0],
    active=jnp.sum(active, axis=1, dtype=jnp.int32),
    fired=jnp.sum(active, axis=0, dtype=jnp.int32),
    overflowed=jnp.zeros((), jnp.int32),
    dense_tokens=jnp.full((), x.shape[0], jnp.int32),
  )
  return Forward(FFNOutput(h @ down, activity), (z,) if u is None else (z, u))


def per_neuron(
  x: Float[Array, "tokens d_model"], matrix: Float[Array, "d_ff d_model"]
) -> Float[Array, "tokens d_ff"]:
  """X matrixᵀ. For a single token XLA:CPU would really transpose a `.T`."""
  return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())))


def hidden(
  z: Float[Array, "tokens d_ff"], u: Float[Array, "tokens d_ff"] | None
) -> Float[Array, "tokens d_ff"]:
  """H = relu(z) ⊙ u, the input of the down projection.

  relu keeps NaN, and a silent neuron gives 0 whatever its u.
  """
  h = z if u is None else z * u
  return jnp.where(is_active(z), h, jnp.zeros_like(h))


class NeuronGradients(NamedTuple):
  """H again, and the cotangents of z and u; du is None if not gated."""

  h: Float[Array, "tokens d_ff"]
  dz: Float[Array, "tokens d_ff"]
  du: Float[Array, "tokens d_ff"] | None


def neuron_gradients(
  z: Float[Array, "tokens d_ff"],
  u: Float[Array, "tokens d_ff"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  *,
  penalty: Float[Array, ""],
) -> NeuronGradients:
  """From the cotangents of y and of each |h| to those of the pre-activations.

  Args:
    z: Gate pre-activations.
    u: Up pre-activations, or None.
    down: Down matrix.
    dy: Cotangent of y.
    penalty: Cotangent of each |h|: that of l1, over the tokens of the call.
  """
  active = is_active(z)
  h = hidden(z, u)
  dt = per_neuron(dy, down) + penalty.astype(z.dtype) * jnp.sign(h)
  dz = jnp.where(active, dt if u is None else dt * u, jnp.zeros_like(z))
  return NeuronGradients(h, dz, None if u is None else dt * hidden(z, None))


def backward(
  kept: tuple[Array, ...],
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  dl1: Float[Array, ""],
  *,
  choices: Choices,
) -> Gradients:
  """Gradients of sum(dy ⊙ y) + dl1 · l1; names as in arXiv 2603.23198."""
  del choices
  u = None if up is None else kept[1]
  h, dz, du = neuron_gradients(kept[0], u, down, dy, penalty=dl1 / x.shape[0])
  dx, dup = dz @ gate, None
  if up is not None and du is not None:
    dx, dup = dx + du @ up, du.T @ x
  return Gradients(x=dx, gate=dz.T @ x, up=dup, down=h.T @ dy)
