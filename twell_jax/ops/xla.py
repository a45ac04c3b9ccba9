"""The layer in portable XLA: a dense gate matmul, then active neurons only.

    z = x gateᵀ ─► bit pattern of {z > 0} ─► tokens sorted by active neurons
        └► tiles of tokens ─► a loop over their slots, 8 at a time:
             columns of the slots ─► u = x · up[column] ─► y += (z u) down[column]

A tile's loop ends with its fullest token and columns are searched when their slot
is reached: exact for any number of active neurons, no capacity, no overflow. The
backward pass runs the same loop for dx, and a second one over tiles of neurons,
with the transposed pattern, for the gradients of the weights; both take
u = x · up[column] and dt = dy · down[column] from where they were computed.

Rows of a matrix are read where they lie: a gather that feeds a multiply-add is one
XLA fusion and materialises nothing. If the work that a pattern asks for exceeds a
share of the dense layer's, both passes compute the dense products instead, by a
`lax.cond` on device: a choice of speed, not of result.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from twell_jax.formats.bits import (
  Pattern,
  columns_pattern,
  is_active,
  nth_active,
  rank_of,
  rows_pattern,
)
from twell_jax.ops import reference
from twell_jax.ops.gathered import add_rows, row_dots
from twell_jax.ops.outputs import Activity, FFNOutput, Forward, Gradients

# Share of the dense layer's multiply-adds up to which the sparse loops win on
# CPU, by bytes per number (measured with experiments/bench_ffn.py).
_SPARSE_LIMIT = {2: 0.05, 4: 0.10, 8: 0.10}

# Numbers in the accumulator of a tile: large enough to spread the cost of a
# step, small enough for the second-level cache.
_TILE_NUMBERS = 2**18
_MAX_TILE = 256

# Indices made here are in range by construction.
_TRUSTED = "promise_in_bounds"


def forward(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
) -> FFNOutput:
  """y = (relu(x gateᵀ) ⊙ x upᵀ) down over active neurons, and the activity."""
  return _forward(x, gate, up, down, store=False).output


def forward_with_residuals(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
) -> Forward:
  """`forward`, keeping z and, of the gated layer, u at active neurons."""
  return _forward(x, gate, up, down, store=up is not None)


class _Plan(NamedTuple):
  """How the rows of a pattern are worked through: tiles of rows of like counts.

  A step works on the next `slots` active columns of a tile's rows. What a step
  computes per slot is stored in a block of [tile, slots]; slot s of the row at
  sorted position q is in block first[q // tile] + s // slots.
  """

  order: Int32[Array, "padded_rows"]  # rows, by count; ≥ num_rows is padding
  counts: Int32[Array, "padded_rows"]  # active columns of those rows
  steps: Int32[Array, "tiles"]  # steps that each tile takes
  first: Int32[Array, "tiles"]  # steps of all tiles before it

  @property
  def tile(self) -> int:
    return self.order.shape[0] // self.steps.shape[0]

  @property
  def num_steps(self) -> Int32[Array, ""]:
    return self.first[-1] + self.steps[-1]


def _plan(counts: Int32[Array, "rows"], *, tile: int, slots: int) -> _Plan:
  rows = counts.shape[0]
  counts = jnp.pad(counts, (0, -rows % tile))
  order = jnp.arange(counts.shape[0], dtype=jnp.int32)
  if rows > tile:
    order = jnp.argsort(counts).astype(jnp.int32)
    counts = counts[order]
  steps = -(-counts.reshape(-1, tile).max(axis=1) // slots)
  return _Plan(order, counts, steps, jnp.cumsum(steps) - steps)


class _Sizes(NamedTuple):
  """Static sizes of the loops, from the shape of a call."""

  tile: int  # tokens of a tile
  slots: int  # active neurons of each token in a step
  max_steps: int  # steps up to which sparse is taken to be faster than dense
  neuron_tile: int  # neurons of a tile, for the gradients of the weights


def _sizes(x: Float[Array, "tokens d_model"], d_ff: int) -> _Sizes:
  tokens, d_model = x.shape
  largest = min(
    _MAX_TILE, max(1, 2 ** ((_TILE_NUMBERS // d_model).bit_length() - 1))
  )
  tile = min(largest, tokens)
  slots = min(32, max(8, 512 // tile))
  limit = _SPARSE_LIMIT[x.dtype.itemsize]
  return _Sizes(
    tile=tile,
    slots=slots,
    max_steps=int(limit * tokens * d_ff / (tile * slots)),
    neuron_tile=min(max(1, largest // 2), d_ff),
  )


class _Tile(NamedTuple):
  """One tile of rows: where they come from and which columns are active."""

  write: Int32[Array, "tile"]  # row indices; out of range for padding
  read: Int32[Array, "tile"]  # row indices; some row for padding
  counts: Int32[Array, "tile"]
  pattern: Pattern


def _tile(plan: _Plan, pattern: Pattern, i: Int32[Array, ""]) -> _Tile:
  start = i * plan.tile
  rows = lax.dynamic_slice_in_dim(plan.order, start, plan.tile)
  counts = lax.dynamic_slice_in_dim(plan.counts, start, plan.tile)
  read = jnp.minimum(rows, pattern.words.shape[0] - 1)
  return _Tile(
    rows, read, counts, Pattern(pattern.words[read], pattern.running[read])
  )


class _Slots(NamedTuple):
  """The active columns of a tile's rows that one step works on."""

  columns: Int32[Array, "tile slots"]
  valid: Bool[Array, "tile slots"]  # False past the row's last active column


def _slots(
  tile: _Tile, step: Int32[Array, ""], slots: int, **strides
) -> _Slots:
  rank = step * slots + jnp.arange(slots, dtype=jnp.int32)
  rank = jnp.broadcast_to(rank, (tile.counts.shape[0], slots))
  # Without the barrier XLA:CPU repeats the search in every fusion that reads
  # the columns.
  columns = lax.optimization_barrier(nth_active(tile.pattern, rank, **strides))
  return _Slots(columns, rank < tile.counts[:, None])


def _forward(x, gate, up, down, *, store: bool) -> Forward:
  tokens, d_ff = x.shape[0], gate.shape[0]
  z = reference.per_neuron(_pad_gemv(x), gate)[:tokens]
  active = is_active(z)
  pattern = rows_pattern(active)
  sizes = _sizes(x, d_ff)
  plan = _plan(pattern.counts, tile=sizes.tile, slots=sizes.slots)

  def dense():
    u = None if up is None else reference.per_neuron(_pad_gemv(x), up)
    h = reference.hidden(_pad_gemv(z), u)
    l1 = jnp.sum(jnp.abs(h.astype(_accumulator(x.dtype))))
    return (
      (h @ down)[:tokens],
      l1,
      _no_blocks(sizes, x.dtype) if store else None,
    )

  def sparse():
    return _sparse_forward(x, z, up, down, pattern, plan, sizes, store=store)

  y, l1, blocks = _by_work(plan, sizes, sparse, dense)
  activity = Activity(
    l1=l1.astype(jnp.float32) / tokens,
    active=pattern.counts,
    fired=jnp.sum(active, axis=0, dtype=jnp.int32),
    overflowed=jnp.zeros((), jnp.int32),
  )
  return Forward(FFNOutput(y, activity), (z, blocks) if store else (z,))


def _pad_gemv(x: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
  """A second row of zeros below a single 16-bit row.

  A product with one such row takes XLA:CPU seven times as long as with two.
  """
  alone = x.shape[0] == 1 and x.dtype.itemsize == 2
  return jnp.pad(x, ((0, 1), (0, 0))) if alone else x


def _by_work(plan: _Plan, sizes: _Sizes, sparse, dense):
  """The result of `sparse` or `dense`, whichever is the faster on device."""
  if sizes.max_steps == 0:
    return dense()
  return lax.cond(plan.num_steps <= sizes.max_steps, sparse, dense)


def _no_blocks(sizes: _Sizes, dtype) -> Float[Array, "steps tile slots"]:
  shape = (sizes.max_steps, sizes.tile, sizes.slots)
  return jnp.zeros(shape, _accumulator(dtype))


def _accumulator(dtype):
  return jnp.promote_types(dtype, jnp.float32)


def _sparse_forward(x, z, up, down, pattern, plan, sizes, *, store: bool):
  """y, the sum of |h|, and the blocks of u if they are to be stored."""
  dtype = _accumulator(x.dtype)

  def one_tile(i, carry):
    y, l1, blocks = carry
    tile = _tile(plan, pattern, i)
    x_tile = x[tile.read]

    def step(s, carry):
      total, l1, blocks = carry
      columns, valid = _slots(tile, s, sizes.slots)
      h = _gate_values(z, tile.read[:, None], columns, valid)
      if up is not None:
        u = row_dots(x_tile, up, columns)
        # Not h * u alone: u may be infinite where there is no slot.
        h = jnp.where(valid, h * u, 0)
      if store:
        blocks = lax.dynamic_update_slice(
          blocks, u[None], (plan.first[i] + s, 0, 0)
        )
      return add_rows(total, h, down, columns), l1 + jnp.sum(jnp.abs(h)), blocks

    total = jnp.zeros((sizes.tile, x.shape[1]), dtype)
    total, l1, blocks = lax.fori_loop(
      0, plan.steps[i], step, (total, l1, blocks)
    )
    return _put_rows(y, tile.write, total), l1, blocks

  blocks = _no_blocks(sizes, x.dtype) if store else None
  start = jnp.zeros_like(x), jnp.zeros((), dtype), blocks
  return lax.fori_loop(0, plan.steps.shape[0], one_tile, start)


def _gate_values(z, rows, columns, valid):
  """z at the slots, 0 where there is none, for accumulation."""
  values = z.at[rows, columns].get(mode=_TRUSTED).astype(_accumulator(z.dtype))
  return jnp.where(valid, values, 0)


def _put_rows(matrix, rows, values):
  """Rows of the matrix replaced; those out of range (padding) are dropped."""
  return matrix.at[rows].set(
    values.astype(matrix.dtype), mode="drop", unique_indices=True
  )


def backward(
  kept: tuple[Array, ...],
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  dl1: Float[Array, ""],
) -> Gradients:
  """Gradients of sum(dy ⊙ y) + dl1 · l1; names as in arXiv 2603.23198."""
  z = kept[0]
  active = is_active(z)
  pattern = rows_pattern(active)
  sizes = _sizes(x, gate.shape[0])
  plan = _plan(pattern.counts, tile=sizes.tile, slots=sizes.slots)

  def dense():
    residuals = (z,) if up is None else (z, reference.per_neuron(x, up))
    return reference.backward(residuals, x, gate, up, down, dy, dl1)

  def sparse():
    u = None if up is None else kept[1]
    dx, dt = _sparse_dx(x, z, u, gate, up, down, dy, dl1, pattern, plan, sizes)
    stored = _Stored(pattern, plan, z, u, dt)
    weights = _sparse_weights(stored, columns_pattern(active), x, dy, sizes)
    return Gradients(dx, *weights)

  return _by_work(plan, sizes, sparse, dense)


def _sparse_dx(x, z, u, gate, up, down, dy, dl1, pattern, plan, sizes):
  """dx, and the blocks of dt = dy downᵀ + the l1 term at active neurons."""
  dtype = _accumulator(x.dtype)
  penalty = dl1.astype(dtype) / x.shape[0]

  def one_tile(i, carry):
    dx, blocks = carry
    tile = _tile(plan, pattern, i)
    dy_tile = dy[tile.read]

    def step(s, carry):
      total, blocks = carry
      columns, valid = _slots(tile, s, sizes.slots)
      block = plan.first[i] + s
      p = _gate_values(z, tile.read[:, None], columns, valid)
      h = p if u is None else p * u[block]
      dt = row_dots(dy_tile, down, columns) + penalty * jnp.sign(h)
      dt = jnp.where(valid, dt, 0)
      blocks = lax.dynamic_update_slice(blocks, dt[None], (block, 0, 0))
      if u is None:
        return add_rows(total, dt, gate, columns), blocks
      dz = jnp.where(valid, dt * u[block], 0)
      total = add_rows(total, dz, gate, columns)
      return add_rows(total, dt * p, up, columns), blocks

    total = jnp.zeros((sizes.tile, x.shape[1]), dtype)
    total, blocks = lax.fori_loop(0, plan.steps[i], step, (total, blocks))
    return _put_rows(dx, tile.write, total), blocks

  start = jnp.zeros_like(x), _no_blocks(sizes, x.dtype)
  return lax.fori_loop(0, plan.steps.shape[0], one_tile, start)


class _Stored(NamedTuple):
  """What the loops over tokens left, to be read by the loop over neurons."""

  pattern: Pattern
  plan: _Plan
  z: Float[Array, "tokens d_ff"]
  u: Float[Array, "steps tile slots"] | None
  dt: Float[Array, "steps tile slots"]


def _sparse_weights(stored: _Stored, transposed: Pattern, x, dy, sizes):
  """Gradients of gate, up and down: rows of x and dy, summed per neuron."""
  dtype = _accumulator(x.dtype)
  tile_size = sizes.neuron_tile
  num_neurons = transposed.words.shape[0]
  plan = _plan(transposed.counts, tile=tile_size, slots=8)
  padded = jnp.arange(stored.plan.order.shape[0], dtype=jnp.int32)
  position = (
    jnp.zeros_like(padded)
    .at[stored.plan.order]
    .set(padded, unique_indices=True)
  )
  gated = stored.u is not None

  def one_tile(i, carry):
    tile = _tile(plan, transposed, i)
    neurons = tile.read[:, None]

    def step(s, totals):
      tokens, valid = _slots(
        tile, s, 8, word_stride=1, bit_stride=transposed.words.shape[1]
      )
      address = _slot_address(stored, position, tokens, neurons)
      p = _gate_values(stored.z, tokens, neurons, valid)
      dt = jnp.where(valid, stored.dt.at[address].get(mode="clip"), 0)
      if not gated:
        dgate, ddown = totals
        return add_rows(dgate, dt, x, tokens), add_rows(ddown, p, dy, tokens)
      u = jnp.where(valid, stored.u.at[address].get(mode="clip"), 0)
      dgate, dup, ddown = totals
      return (
        add_rows(dgate, dt * u, x, tokens),
        add_rows(dup, dt * p, x, tokens),
        add_rows(ddown, p * u, dy, tokens),
      )

    zeros = jnp.zeros((tile_size, x.shape[1]), dtype)
    totals = lax.fori_loop(0, plan.steps[i], step, (zeros,) * len(carry))
    return tuple(
      _put_rows(matrix, tile.write, total)
      for matrix, total in zip(carry, totals)
    )

  zeros = jnp.zeros((num_neurons, x.shape[1]), x.dtype)
  # Tiles come with counts ascending: those of silent neurons stay zero.
  silent = jnp.sum(plan.steps == 0)
  grads = lax.fori_loop(
    silent, plan.steps.shape[0], one_tile, (zeros,) * (3 if gated else 2)
  )
  return grads if gated else (grads[0], None, grads[1])


def _slot_address(stored: _Stored, position, tokens, neurons):
  """Block, row and slot in which the token loops stored (token, neuron).

  Of a pair that is not active it may be out of range.
  """
  _, tile, slots = stored.dt.shape
  slot = rank_of(stored.pattern, tokens, neurons)
  sorted_at = position.at[tokens].get(mode=_TRUSTED)
  first = stored.plan.first.at[sorted_at // tile].get(mode=_TRUSTED)
  return first + slot // slots, sorted_at % tile, slot % slots
