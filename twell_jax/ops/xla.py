"""The layer in portable XLA: a dense gate matmul, then active neurons only.

    z = x gateᵀ ─► words, the bits of z > 0 ─► segments of tokens (tiles.py)
      └► tiles of segments ─► a loop over their slots, 8 at a time:
           column of a slot ─► u = x · up[column] ─► y += (z u) down[column]
                └► blocks of z and u at the slots, for the backward pass

A column is searched when its slot is reached: exact for any number of active
neurons, no capacity, no overflow.

Of the tokens × d_ff numbers of z the words and the blocks are kept. The
backward pass runs the same loop for dx, and another over segments of neurons,
with the words transposed, for the gradients of the weights (xla_loops.py).

The first `hot_neurons` have no bits in the loops' pattern: they are dense
products (dense_part.py), onto whose sums the loops add.

Rows of a matrix are read where they lie: a gather that feeds a multiply-add is
one XLA fusion and materialises nothing. If more than a share of the neurons is
active, both passes compute the dense products instead (xla_dense.py), by a
`lax.cond` on device: a choice of speed, not of result.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt32

from twell_jax.formats.bits import (
  Pattern,
  columns_pattern,
  is_active,
  make_pattern,
  pack,
  without_first,
)
from twell_jax.ops import dense_part, reference, xla_dense
from twell_jax.ops.choices import Choices
from twell_jax.ops.outputs import Activity, FFNOutput, Forward, Gradients
from twell_jax.ops.tiles import max_steps
from twell_jax.ops.xla_dense import HotNeurons
from twell_jax.ops.xla_loops import (
  Blocks,
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
  choices: Choices,
) -> FFNOutput:
  """The layer and its activity; see ffn.py."""
  return _forward(x, gate, up, down, choices, store=False).output


def forward_with_residuals(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  choices: Choices,
) -> Forward:
  """`forward`, keeping which neurons were active, and z and u there."""
  return _forward(x, gate, up, down, choices, store=True)


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


def _sizes(
  x: Float[Array, "tokens d_model"], d_ff: int, choices: Choices
) -> Sizes:
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
  share = choices.dense_above
  if share is None:
    share = sparse_share(tokens, d_model, x.dtype.itemsize)
  max_active = int(min(share, 1.0) * tokens * d_ff)
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
  return lax.cond(_is_sparse(pattern, sizes), sparse, dense)


def _is_sparse(pattern: Pattern, sizes: Sizes) -> Bool[Array, ""]:
  """Whether so few neurons are active that the sparse loops are faster."""
  active = jnp.sum(pattern.counts)
  return (active <= sizes.max_active) & (sizes.max_active > 0)


def _forward(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  choices: Choices,
  *,
  store: bool,
) -> Forward:
  tokens, hot_neurons = x.shape[0], choices.hot_neurons
  x_rows = _pad_gemv(x)
  z = reference.per_neuron(x_rows, gate)[:tokens]
  # Silent in the row of padding, also where a gate is not finite: 0 · ∞ = NaN.
  z_rows = _pad_gemv(z)
  words = pack(is_active(z))
  pattern = _cold_pattern(words, hot_neurons)
  sizes = _sizes(x, gate.shape[0] - hot_neurons, choices)
  hot = slice(hot_neurons)

  def no_values():
    if not store or sizes.max_active == 0:
      return None
    return no_blocks(x.dtype, sizes, gated=up is not None)

  def dense():
    y, l1, hot_u = xla_dense.forward(
      z_rows, x_rows, up, down, hot_neurons=hot_neurons if store else 0
    )
    hot_u = None if hot_u is None else hot_u[:tokens]
    return _Sums(y[:tokens], l1, hot_u, no_values())

  def sparse():
    part = dense_part.forward(x_rows, z_rows[:, hot], _rows(up, hot), down[hot])
    y, l1, blocks = loop_forward(
      make_walk(pattern, sizes),
      z,
      x,
      up,
      down,
      start=LoopForward(part.y[:tokens], part.l1, no_values()),
    )
    hot_u = None if part.u is None or not store else part.u[:tokens]
    return _Sums(y.astype(x.dtype), l1, hot_u, blocks)

  y, l1, hot_u, blocks = _by_activity(pattern, sizes, sparse, dense)
  active = lax.population_count(words).astype(jnp.int32)
  activity = Activity(
    l1=l1.astype(jnp.float32) / tokens,
    active=jnp.sum(active, axis=1),
    fired=jnp.sum(is_active(z), axis=0, dtype=jnp.int32),
    overflowed=jnp.zeros((), jnp.int32),
    dense_tokens=jnp.where(_is_sparse(pattern, sizes), 0, tokens),
  )
  kept_hot = HotNeurons(z[:, hot], hot_u) if hot_neurons else None
  return Forward(FFNOutput(y, activity), _Kept(words, kept_hot, blocks))


class _Sums(NamedTuple):
  """What a branch of the forward pass returns."""

  y: Float[Array, "tokens d_model"]
  l1: Float[Array, ""]  # times the number of tokens
  hot_u: Float[Array, "tokens hot"] | None
  blocks: Blocks | None


class _Kept(NamedTuple):
  """What the backward pass needs besides the inputs.

  Attributes:
    words: A bit for each neuron that is active, hot ones included.
    hot: Of the hot neurons; None without any.
    blocks: Of the slots of the loops; None if the loops are never taken.
  """

  words: UInt32[Array, "tokens words"]
  hot: HotNeurons | None
  blocks: Blocks | None


def _cold_pattern(
  words: UInt32[Array, "tokens words"], hot_neurons: int
) -> Pattern:
  """Without the hot neurons, whose columns stay, so that indices do."""
  return make_pattern(without_first(words, hot_neurons))


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
  choices: Choices,
) -> Gradients:
  """Gradients of sum(dy ⊙ y) + dl1 · l1; names as in arXiv 2603.23198."""
  words, hot, blocks = kept
  d_ff, hot_neurons = gate.shape[0], choices.hot_neurons
  pattern = _cold_pattern(words, hot_neurons)
  sizes = _sizes(x, d_ff - hot_neurons, choices)
  penalty = dl1 / x.shape[0]

  def dense():
    return xla_dense.backward(
      words, hot, x, gate, up, down, dy, penalty=penalty
    )

  if blocks is None:
    return dense()

  def sparse():
    hot_z, hot_u = hot or HotNeurons(jnp.zeros((x.shape[0], 0), x.dtype), None)
    part = dense_part.backward(hot_z, hot_u, x, gate, up, down, dy, dl1)
    walk = make_walk(pattern, sizes)
    dx, dt_blocks = loop_dx(
      walk, blocks, gate, up, down, dy, penalty=penalty, start=part.x
    )
    weights = loop_weights(
      walk,
      columns_pattern(pattern.words, d_ff),
      blocks,
      x,
      dy,
      dt_blocks=dt_blocks,
      start=Weights(part.gate, part.up, part.down),
    )
    gradients = Gradients(dx, *weights)
    return jax.tree.map(lambda grad: grad.astype(x.dtype), gradients)

  return _by_activity(pattern, sizes, sparse, dense)
