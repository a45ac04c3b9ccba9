"""How the xla implementation walks through a pattern: tiles, steps and slots.

The rows of a pattern (tokens, or neurons of the transposed pattern) are sorted
by their number of active columns and cut into tiles. A step takes the next
`slots` active columns of each row of a tile, and a tile takes as many steps as
its fullest row needs: rows of like counts share a tile, so little is padding,
and no row is ever too full.

    sorted rows   0 0 1 2 | 3 3 4 5 | 8 9 12 31     tiles of 4
    steps of 8        1   |    1    |      4
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from twell_jax.formats.bits import Pattern, nth_active


class Plan(NamedTuple):
  """The tiles of a pattern.

  What is stored by slot lies in blocks of [tile, slots], one per step: slot s
  of the row at sorted position q is in block first[q // tile] + s // slots.
  """

  order: Int32[Array, "padded_rows"]  # rows, by count; ≥ num_rows is padding
  counts: Int32[Array, "padded_rows"]  # active columns of those rows
  steps: Int32[Array, "tiles"]  # steps that each tile takes
  first: Int32[Array, "tiles"]  # steps of all tiles before it

  @property
  def tile(self) -> int:
    """Rows of a tile."""
    return self.order.shape[0] // self.steps.shape[0]

  @property
  def num_steps(self) -> Int32[Array, ""]:
    """Steps of all tiles."""
    return self.first[-1] + self.steps[-1]

  def positions(self) -> Int32[Array, "padded_rows"]:
    """The sorted position of each row."""
    sorted_at = jnp.arange(self.order.shape[0], dtype=jnp.int32)
    return (
      jnp.zeros_like(sorted_at)
      .at[self.order]
      .set(sorted_at, unique_indices=True)
    )


def make_plan(counts: Int32[Array, "rows"], *, tile: int, slots: int) -> Plan:
  """Sorts rows by count, ascending, and cuts them into tiles."""
  rows = counts.shape[0]
  counts = jnp.pad(counts, (0, -rows % tile))
  order = jnp.arange(counts.shape[0], dtype=jnp.int32)
  if rows > tile:
    order = jnp.argsort(counts).astype(jnp.int32)
    counts = counts[order]
  steps = -(-counts.reshape(-1, tile).max(axis=1) // slots)
  return Plan(order, counts, steps, jnp.cumsum(steps) - steps)


class Tile(NamedTuple):
  """One tile of rows: where they come from and which columns are active."""

  write: Int32[Array, "tile"]  # row indices; out of range for padding
  read: Int32[Array, "tile"]  # row indices; some row for padding
  counts: Int32[Array, "tile"]
  pattern: Pattern


def take_tile(plan: Plan, pattern: Pattern, index: Int32[Array, ""]) -> Tile:
  """The tile of that index."""
  start = index * plan.tile
  rows = lax.dynamic_slice_in_dim(plan.order, start, plan.tile)
  counts = lax.dynamic_slice_in_dim(plan.counts, start, plan.tile)
  read = jnp.minimum(rows, pattern.words.shape[0] - 1)
  words, running = pattern.words[read], pattern.running[read]
  return Tile(rows, read, counts, Pattern(words, running))


class Slots(NamedTuple):
  """The active columns of a tile's rows that one step works on."""

  columns: Int32[Array, "tile slots"]
  valid: Bool[Array, "tile slots"]  # False past the row's last active column


def take_slots(
  tile: Tile,
  step: Int32[Array, ""],
  *,
  slots: int,
  word_stride: int = 32,
  bit_stride: int = 1,
) -> Slots:
  """The slots of a step; the strides are those of `nth_active`."""
  rank = step * slots + jnp.arange(slots, dtype=jnp.int32)
  rank = jnp.broadcast_to(rank, (tile.counts.shape[0], slots))
  columns = nth_active(
    tile.pattern, rank, word_stride=word_stride, bit_stride=bit_stride
  )
  # Without the barrier XLA:CPU repeats the search in every fusion that reads
  # the columns.
  return Slots(lax.optimization_barrier(columns), rank < tile.counts[:, None])
