"""The dense branch of the xla implementation: all neurons, in chunks of tokens.

    forward   z of a chunk, u ─► h ─► y
    backward  x of a chunk ─► z, u ─► dz, du, h ─► dx, and its part of the
              matrices' gradients, which are added up over the chunks

XLA reserves the memory of both branches of a `lax.cond`. If this one held all
tokens' u, h and cotangents at once, taking the other one would save nothing. A
chunk's products are as fast as those of all tokens, and adding up the
gradients, 36 bytes a weight and chunk, is nothing beside its 16 operations a
weight and token; a call of one chunk is computed without a loop. At (2048,
5632) in float32, chunks of 256 to 4096 tokens took the same CPU time within
10 %, 1024 the least.

The backward pass makes z again from x, in sums of perhaps another order, and
then with the signs that the forward pass found, a bit each: a neuron whose z is
within rounding of zero is active in both or in neither.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt32

from twell_jax.formats.bits import to_bits, to_floats, unpack
from twell_jax.ops import dense_part, reference
from twell_jax.ops.gathered import accumulation_dtype
from twell_jax.ops.outputs import Gradients

CHUNK_TOKENS = 1024


class HotNeurons(NamedTuple):
  """Pre-activations of the first neurons, as the forward pass kept them."""

  z: Float[Array, "tokens hot"]
  u: Float[Array, "tokens hot"] | None


class DenseForward(NamedTuple):
  """Y, the sum of |h| over all tokens, and u of the hot neurons if gated."""

  y: Float[Array, "tokens d_model"]
  l1: Float[Array, ""]
  hot_u: Float[Array, "tokens hot"] | None


def forward(
  z: Float[Array, "tokens d_ff"],
  x: Float[Array, "tokens d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  hot_neurons: int,
) -> DenseForward:
  """The dense layer from z = x gateᵀ on; names as in ffn.py."""
  tokens, dtype = x.shape[0], accumulation_dtype(x.dtype)

  def chunk(first, size, sums):
    u = None if up is None else reference.per_neuron(_rows(x, first, size), up)
    h = reference.hidden(_rows(z, first, size), u)
    hot_u = sums.hot_u
    if hot_u is not None and u is not None:
      hot_u = _put(hot_u, first, u[:, :hot_neurons])
    return DenseForward(
      y=_put(sums.y, first, h @ down),
      l1=sums.l1 + jnp.sum(jnp.abs(h.astype(dtype))),
      hot_u=hot_u,
    )

  hot_u = None
  if up is not None and hot_neurons:
    hot_u = jnp.zeros((tokens, hot_neurons), x.dtype)
  start = DenseForward(jnp.zeros_like(x), jnp.zeros((), dtype), hot_u)
  return _over_chunks(tokens, chunk, start)


def backward(
  words: UInt32[Array, "tokens words"],
  hot: HotNeurons | None,
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  *,
  penalty: Float[Array, ""],
) -> Gradients:
  """The dense layer's gradients, in the dtype of x.

  Args:
    words: A bit for each neuron that is active, of formats/bits.py.
    hot: What was kept of the hot neurons; None without any.
    x: Tokens.
    gate: Gate matrix.
    up: Up matrix, or None.
    down: Down matrix.
    dy: Cotangent of y.
    penalty: Cotangent of each |h|.
  """
  tokens, dtype = x.shape[0], accumulation_dtype(x.dtype)

  def chunk(first, size, sums):
    x_rows, dy_rows = _rows(x, first, size), _rows(dy, first, size)
    hot_z = None if hot is None else _rows(hot.z, first, size)
    z = _again(hot_z, x_rows, gate)
    z = _with_signs(z, unpack(_rows(words, first, size), gate.shape[0]))
    u = None
    if up is not None:
      hot_u = None
      if hot is not None and hot.u is not None:
        hot_u = _rows(hot.u, first, size)
      u = _again(hot_u, x_rows, up)
    part = dense_part.gradients(
      z, u, x_rows, gate, up, down, dy_rows, penalty=penalty
    )
    dx = _put(sums.x, first, part.x.astype(x.dtype))
    return sums.add_matrices(part)._replace(x=dx)

  zeros = jnp.zeros(gate.shape, dtype)
  start = Gradients(
    jnp.zeros_like(x), zeros, None if up is None else zeros, zeros
  )
  gradients = _over_chunks(tokens, chunk, start)
  return jax.tree.map(lambda grad: grad.astype(x.dtype), gradients)


def _over_chunks[Carry](
  tokens: int, chunk: Callable[[Array, int, Carry], Carry], carry: Carry
) -> Carry:
  """Takes `chunk` through all tokens in order.

  Args:
    tokens: Their number.
    chunk: Given the first token of a chunk, their static number, and the carry.
    carry: What it starts with.
  """
  size = min(CHUNK_TOKENS, tokens)
  chunks, rest = divmod(tokens, size)
  if chunks == 1:
    carry = chunk(jnp.int32(0), size, carry)
  else:
    carry = lax.fori_loop(
      0, chunks, lambda i, carry: chunk(i * size, size, carry), carry
    )
  return chunk(jnp.int32(tokens - rest), rest, carry) if rest else carry


def _rows(
  matrix: Array, first: Array, size: int
) -> Float[Array, "size columns"]:
  return lax.dynamic_slice_in_dim(matrix, first, size)


def _put(matrix: Array, first: Array, rows: Array) -> Array:
  return lax.dynamic_update_slice_in_dim(matrix, rows, first, axis=0)


def _again(
  hot: Float[Array, "tokens hot"] | None,
  x: Float[Array, "tokens d_model"],
  matrix: Float[Array, "d_ff d_model"],
) -> Float[Array, "tokens d_ff"]:
  """X matrixᵀ, of which the hot neurons' columns are known."""
  if hot is None:
    return reference.per_neuron(x, matrix)
  known = hot.shape[1]
  if known == matrix.shape[0]:
    return hot
  return jnp.concatenate([hot, reference.per_neuron(x, matrix[known:])], axis=1)


def _with_signs(
  z: Float[Array, "tokens d_ff"], active: Bool[Array, "tokens d_ff"]
) -> Float[Array, "tokens d_ff"]:
  """The magnitude of z, at least the least there is, where active; else 0."""
  bits = to_bits(z)
  magnitude = jnp.maximum(bits << 1 >> 1, jnp.ones((), bits.dtype))
  return to_floats(jnp.where(active, magnitude, jnp.zeros_like(bits)), z.dtype)
