"""The part of the hot neurons: dense products, not yet rounded.

Every neuron adds its own part to y, so the neurons may be cut in two: the first
`hot_neurons`, computed here for all tokens, and the others, computed where they
are active. Sums over neurons (y and dx) are handed on in the accumulation
dtype, so that an implementation adds its own part before the one rounding to
the dtype of x.

There may be no hot neurons. Nothing is computed of them then, not even an array
without elements: XLA:CPU of jaxlib 0.11.2 ends with a segmentation fault when
it compiles the backward pass with such arrays for several devices.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from twell_jax.ops import reference
from twell_jax.ops.gathered import accumulation_dtype
from twell_jax.ops.outputs import Gradients


class DensePart(NamedTuple):
  """What the hot neurons add to a call.

  Attributes:
    y: Their part of y, in the accumulation dtype.
    l1: The sum of their |h| over all tokens, in the accumulation dtype.
    u: Pre-activations x upᵀ in the dtype of x, for `backward`; None if the
      layer is not gated or there are no hot neurons.
  """

  y: Float[Array, "tokens d_model"]
  l1: Float[Array, ""]
  u: Float[Array, "tokens hot"] | None


def forward(
  x: Float[Array, "tokens d_model"],
  z: Float[Array, "tokens hot"],
  up: Float[Array, "hot d_model"] | None,
  down: Float[Array, "hot d_model"],
) -> DensePart:
  """The dense layer from z = x gateᵀ on; of the hot neurons' rows only."""
  dtype = accumulation_dtype(x.dtype)
  if z.shape[1] == 0:
    return DensePart(jnp.zeros(x.shape, dtype), jnp.zeros((), dtype), None)
  u = None if up is None else reference.per_neuron(x, up)
  h = reference.hidden(z, u)
  y = jnp.matmul(h, down, preferred_element_type=dtype)
  return DensePart(y, jnp.sum(jnp.abs(h.astype(dtype))), u)


def backward(
  z: Float[Array, "tokens hot"],
  u: Float[Array, "tokens hot"] | None,
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  dl1: Float[Array, ""],
) -> Gradients:
  """Their part of dx and of all rows' gradients, in the accumulation dtype.

  Args:
    z: Gate pre-activations of the hot neurons, the first ones.
    u: What `forward` returned of them.
    x: Tokens.
    gate: Gate matrix of all neurons.
    up: Up matrix, or None.
    down: Down matrix.
    dy: Cotangent of y.
    dl1: Cotangent of l1, the mean over tokens.
  """
  dtype = accumulation_dtype(x.dtype)
  hot_neurons = z.shape[1]
  if hot_neurons == 0:
    zeros = jnp.zeros(gate.shape, dtype)
    dup = None if up is None else zeros
    return Gradients(jnp.zeros(x.shape, dtype), zeros, dup, zeros)

  hot = slice(hot_neurons)
  part = gradients(
    z,
    u,
    x,
    gate[hot],
    None if up is None else up[hot],
    down[hot],
    dy,
    penalty=dl1 / x.shape[0],
  )

  def rows(matrix):
    return jnp.pad(matrix, ((0, gate.shape[0] - hot_neurons), (0, 0)))

  return Gradients(
    x=part.x,
    gate=rows(part.gate),
    up=None if part.up is None else rows(part.up),
    down=rows(part.down),
  )


def gradients(
  z: Float[Array, "tokens d_ff"],
  u: Float[Array, "tokens d_ff"] | None,
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  *,
  penalty: Float[Array, ""],
) -> Gradients:
  """Those of the dense layer, not yet rounded; from z and u on.

  Args:
    z: Gate pre-activations of all these neurons.
    u: Up pre-activations, or None.
    x: Tokens.
    gate: Gate matrix.
    up: Up matrix, or None.
    down: Down matrix.
    dy: Cotangent of y.
    penalty: Cotangent of each |h|.
  """
  dtype = accumulation_dtype(x.dtype)

  def product(a, b):
    return jnp.matmul(a, b, preferred_element_type=dtype)

  h, dz, du = reference.neuron_gradients(z, u, down, dy, penalty=penalty)
  dx, dup = product(dz, gate), None
  if up is not None and du is not None:
    dx, dup = dx + product(du, up), product(du.T, x)
  return Gradients(x=dx, gate=product(dz.T, x), up=dup, down=product(h.T, dy))
