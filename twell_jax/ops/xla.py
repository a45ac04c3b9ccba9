"""The layer in portable XLA: a dense gate matmul, then active neurons only.

    z = x gateᵀ ─► bit pattern of {z > 0} ─► segments of tokens (tiles.py)
      └► tiles of segments ─► a loop over their slots, 8 at a time:
           column of a slot ─► u = x · up[column] ─► y += (z u) down[column]

A column is searched when its slot is reached: exact for any number of active
neurons, no capacity, no overflow. The backward pass runs the same loop for dx,
and another over segments of neurons, with the transposed pattern, for the
gradients of the weights. That one reads u = x · up[column] and
dt = dy · down[column] where the loops over tokens stored them.

The first `hot_neurons` have no bits in the pattern: they are dense products
(dense_part.py), onto whose sums the loops add.

Rows of a matrix are read where they lie: a gather that feeds a multiply-add is
one XLA fusion and materialises nothing. If more than a share of the neurons is
active, both passes compute the dense products instead, by a `lax.cond` on
device: a choice of speed, not of result.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from twell_jax.formats.bits import (
  Pattern,
  columns_pattern,
  is_active,
  rows_pattern,
)
from twell_jax.ops import dense_part, reference
from twell_jax.ops.gathered import accumulation_dtype
from twell_jax.ops.outputs import Activity, FFNOutput, Forward, Gradients
from twell_jax.ops.tiles import max_steps
from twell_jax.ops.xla_loops import (
  LoopForward,
  Sizes,
  Weights,
  loop_dx,
  loop_forward,
  loop_weights,
  make_walk,
  no_blocks,
)

# Numbers in the accumulator of a tile: enough to spread the cost of a step, few
# enough for the second-level cache.
_TILE_NUMBERS = 2**18
_MAX_TILE = 256


def forward(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  hot_neurons: int,
) -> FFNOutput:
  """The layer and its activity; see ffn.py."""
  return _forward(x, gate, up, down, hot_neurons, store=False).output


def forward_with_residuals(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  hot_neurons: int,
) -> Forward:
  """`forward`, keeping z, its pattern and, if gated, the u that it needed."""
  return _forward(x, gate, up, down, hot_neurons, store=up is not None)


def sparse_share(tokens: int, d_model: int, itemsize: int) -> float:
  """Active share of the neurons up to which the sparse loops win on CPU.

  Dense products of a few tokens wait for memory, and those of 16-bit numbers
  are slow; so are gathered rows of few numbers. Where both break even is
  measured by experiments/break_even.py.
  """
  if tokens <= 8:
    return 0.15
  share = 0.08 if itemsize == 2 else 0.06
  return share * min(1.0, d_model / 256)


def _sizes(x: Float[Array, "tokens d_model"], d_ff: int) -> Sizes:
  """Of the loops over d_ff neurons, the hot ones not counted."""
  tokens, d_model = x.shape
  if tokens * d_ff >= 2**31:
    raise ValueError(
      f"{tokens} tokens × {d_ff} neurons must be below 2^31, the range of the"
      " counters: call the layer on fewer tokens at once"
    )
  largest = min(_MAX_TILE, max(2, _power_of_two(_TILE_NUMBERS // d_model)))
  tile = min(largest, tokens)
  slots = min(32, max(8, _power_of_two(512 // tile)))
  share = sparse_share(tokens, d_model, x.dtype.itemsize)
  max_active = int(share * tokens * d_ff)
  return Sizes(
    tile=tile,
    slots=slots,
    max_active=max_active,
    max_steps=max_steps(tokens, tile=tile, slots=slots, max_active=max_active),
    neuron_tile=min(largest // 2, d_ff),
  )


def _power_of_two(number: int) -> int:
  """The largest power of two up to a number; 0 for 0."""
  return 1 << number.bit_length() >> 1


def _by_activity[Result](
  pattern: Pattern,
  sizes: Sizes,
  sparse: Callable[[], Result],
  dense: Callable[[], Result],
) -> Result:
  """The result of `sparse` or `dense`, whichever should be the faster."""
  if sizes.max_active == 0:
    return dense()
  active = jnp.sum(pattern.counts)
  return lax.cond(active <= sizes.max_active, sparse, dense)


def _forward(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  hot_neurons: int,
  *,
  store: bool,
) -> Forward:
  tokens, d_ff = x.shape[0], gate.shape[0]
  x_rows = _pad_gemv(x)
  z_rows = reference.per_neuron(x_rows, gate)
  z = z_rows[:tokens]
  active = is_active(z)
  pattern = rows_pattern(_cold(active, hot_neurons))
  sizes = _sizes(x, d_ff - hot_neurons)
  hot = slice(hot_neurons)

  def dense():
    u = None if up is None else reference.per_neuron(x_rows, up)
    h = reference.hidden(z_rows, u)
    l1 = jnp.sum(jnp.abs(h.astype(accumulation_dtype(x.dtype))))
    hot_u, blocks = None, None
    if u is not None and store:
      hot_u = u[:tokens, hot] if hot_neurons else None
      blocks = no_blocks(x, sizes)
    return _Sums((h @ down)[:tokens], l1, hot_u, blocks)

  def sparse():
    part = dense_part.forward(x_rows, z_rows[:, hot], _rows(up, hot), down[hot])
    blocks = no_blocks(x, sizes) if store else None
    y, l1, blocks = loop_forward(
      make_walk(z, pattern, sizes),
      x,
      up,
      down,
      start=LoopForward(part.y[:tokens], part.l1, blocks),
    )
    hot_u = None
    if part.u is not None and store:
      hot_u = part.u[:tokens]
    return _Sums(y.astype(x.dtype), l1, hot_u, blocks)

  sums = _by_activity(pattern, sizes, sparse, dense)
  num_active = pattern.counts
  if hot_neurons:
    num_active += jnp.sum(active[:, hot], axis=1, dtype=jnp.int32)
  activity = Activity(
    l1=sums.l1.astype(jnp.float32) / tokens,
    active=num_active,
    fired=jnp.sum(active, axis=0, dtype=jnp.int32),
    overflowed=jnp.zeros((), jnp.int32),
  )
  kept = _Kept(z, pattern, sums.hot_u, sums.u_blocks)
  return Forward(FFNOutput(sums.y, activity), kept)


class _Sums(NamedTuple):
  """What a branch of the forward pass returns."""

  y: Float[Array, "tokens d_model"]
  l1: Float[Array, ""]  # times the number of tokens
  hot_u: Float[Array, "tokens hot"] | None
  u_blocks: Float[Array, "steps tile slots"] | None


class _Kept(NamedTuple):
  """What the backward pass needs besides the inputs; u if gated."""

  z: Float[Array, "tokens d_ff"]
  pattern: Pattern
  hot_u: Float[Array, "tokens hot"] | None
  u_blocks: Float[Array, "steps tile slots"] | None


def _cold(
  active: Bool[Array, "tokens d_ff"], hot_neurons: int
) -> Bool[Array, "tokens d_ff"]:
  """Without the hot neurons, whose columns stay, so that indices do."""
  return active & (jnp.arange(active.shape[1]) >= hot_neurons)[None]


def _rows(
  matrix: Float[Array, "d_ff d_model"] | None, rows: slice
) -> Float[Array, "rows d_model"] | None:
  return None if matrix is None else matrix[rows]


def _pad_gemv(x: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
  """A second row of zeros below a single 16-bit row.

  A product with one such row takes XLA:CPU seven times as long as with two.
  """
  alone = x.shape[0] == 1 and x.dtype.itemsize == 2
  return jnp.pad(x, ((0, 1), (0, 0))) if alone else x


def backward(
  kept: _Kept,
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  dl1: Float[Array, ""],
  *,
  hot_neurons: int,
) -> Gradients:
  """Gradients of sum(dy ⊙ y) + dl1 · l1; names as in arXiv 2603.23198."""
  z, pattern, hot_u, u_blocks = kept
  d_ff = gate.shape[0]
  sizes = _sizes(x, d_ff - hot_neurons)
  hot = slice(hot_neurons)

  def dense():
    u = hot_u
    if up is not None and hot_neurons < d_ff:
      u = reference.per_neuron(x, up)
    residuals = (z,) if u is None else (z, u)
    return reference.backward(
      residuals, x, gate, up, down, dy, dl1, hot_neurons=hot_neurons
    )

  def sparse():
    part = dense_part.backward(z[:, hot], hot_u, x, gate, up, down, dy, dl1)
    walk = make_walk(z, pattern, sizes)
    dx, dt_blocks = loop_dx(
      walk, u_blocks, gate, up, down, dy, dl1, start=part.x
    )
    start = Weights(part.gate, part.up, part.down)
    transposed = columns_pattern(_cold(is_active(z), hot_neurons))
    weights = loop_weights(
      walk, transposed, u_blocks, x, dy, dt_blocks=dt_blocks, start=start
    )
    gradients = Gradients(dx, *weights)
    return jax.tree.map(lambda grad: grad.astype(x.dtype), gradients)

  return _by_activity(pattern, sizes, sparse, dense)
