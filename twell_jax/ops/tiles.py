"""How the xla implementation walks through a pattern: segments, tiles, steps.

The rows of a pattern (tokens, or neurons of the transposed pattern) are cut
into segments of at most 64 active columns; segments are sorted by length and
cut into tiles. A step takes the next `slots` active columns of each segment of
a tile, and a tile takes as many steps as its longest segment needs. Segments of
like length share a tile, so little is padding, however full a row may be.

    active columns of 5 rows     3   0   150   9   70
    segments (row, columns)      a3  c64 c64 c22  d9  e64 e6
    tiles of 4, steps of 8       · a3 e6 d9 │ c22 c64 c64 e64
                                 2 steps    │ 8 steps
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from twell_jax.formats.bits import Pattern, nth_active

# A multiple of every number of slots in use.
_SEGMENT = 64


class Plan(NamedTuple):
  """The segments of a pattern, by length, ascending.

  What is computed per slot is stored in blocks of [tile, slots], one per step;
  `slot_address` finds it again.
  """

  rows: Int32[Array, "segments"]  # the row of a segment; num_rows for padding
  starts: Int32[Array, "segments"]  # active columns of the row before it
  lengths: Int32[Array, "segments"]
  steps: Int32[Array, "tiles"]  # steps that each tile takes
  first: Int32[Array, "tiles"]  # steps of all tiles before it
  positions: Int32[Array, "segments"]  # where sorting put a segment
  first_segment: Int32[Array, "rows"]  # of each row, before sorting

  @property
  def tile(self) -> int:
    """Segments of a tile."""
    return self.rows.shape[0] // self.steps.shape[0]


def make_plan(
  counts: Int32[Array, "rows"], *, tile: int, slots: int, max_active: int
) -> Plan:
  """Cuts rows into segments and segments into tiles.

  Args:
    counts: Active columns of each row. If they are more than max_active
      together, the plan misses some of them.
    tile: Segments of a tile.
    slots: Active columns of each segment in a step.
    max_active: Bounds the number of segments.
  """
  num_rows = counts.shape[0]
  size = num_rows + max_active // _SEGMENT
  size += -size % tile
  segments = -(-counts // _SEGMENT)
  first_segment = jnp.cumsum(segments) - segments
  index = jnp.arange(size, dtype=jnp.int32)
  row = jnp.repeat(
    jnp.arange(num_rows, dtype=jnp.int32), segments, total_repeat_length=size
  )
  starts = (index - first_segment[row]) * _SEGMENT
  used = index < first_segment[-1] + segments[-1]
  lengths = jnp.where(used, jnp.minimum(counts[row] - starts, _SEGMENT), 0)
  order = jnp.argsort(lengths)
  lengths = lengths[order]
  steps = -(-lengths.reshape(-1, tile)[:, -1] // slots)
  return Plan(
    rows=jnp.where(used, row, num_rows)[order],
    starts=starts[order],
    lengths=lengths,
    steps=steps,
    first=jnp.cumsum(steps) - steps,
    positions=jnp.zeros_like(index).at[order].set(index, unique_indices=True),
    first_segment=first_segment,
  )


def max_steps(num_rows: int, *, tile: int, slots: int, max_active: int) -> int:
  """Steps of a plan at most, if no more than max_active columns are active.

  The longest segment of a tile is no longer than any of the next tile: padded
  to equal lengths, tiles hold at most max_active columns and one tile of full
  segments. Rounding up to steps adds less than one per tile.
  """
  segments = num_rows + max_active // _SEGMENT
  padded_active = max_active + tile * _SEGMENT
  return padded_active // (tile * slots) + -(-segments // tile) + 1


class Tile(NamedTuple):
  """One tile of segments: the rows they are of, and those rows' patterns."""

  write: Int32[Array, "tile"]  # row indices; out of range for padding
  read: Int32[Array, "tile"]  # row indices; some row for padding
  starts: Int32[Array, "tile"]
  lengths: Int32[Array, "tile"]
  pattern: Pattern


def take_tile(plan: Plan, pattern: Pattern, index: Int32[Array, ""]) -> Tile:
  """The tile of that index."""

  def part(values: Int32[Array, "segments"]) -> Int32[Array, "tile"]:
    return lax.dynamic_slice_in_dim(values, index * plan.tile, plan.tile)

  rows = part(plan.rows)
  read = jnp.minimum(rows, pattern.words.shape[0] - 1)
  return Tile(
    write=rows,
    read=read,
    starts=part(plan.starts),
    lengths=part(plan.lengths),
    pattern=Pattern(pattern.words[read], pattern.running[read]),
  )


class Slots(NamedTuple):
  """The active columns of a tile's segments that one step works on."""

  columns: Int32[Array, "tile slots"]
  valid: Bool[Array, "tile slots"]  # False past the end of the segment


def take_slots(
  tile: Tile,
  step: Int32[Array, ""],
  *,
  slots: int,
  word_stride: int = 32,
  bit_stride: int = 1,
) -> Slots:
  """The slots of a step; the strides are those of `nth_active`."""
  offset = (step * slots + jnp.arange(slots, dtype=jnp.int32))[None]
  columns = nth_active(
    tile.pattern,
    tile.starts[:, None] + offset,
    word_stride=word_stride,
    bit_stride=bit_stride,
  )
  # Without the barrier XLA:CPU repeats the search in every fusion that reads
  # the columns.
  return Slots(
    lax.optimization_barrier(columns), offset < tile.lengths[:, None]
  )


class SlotAddress(NamedTuple):
  """Indices into blocks [steps, tile, slots]."""

  block: Int32[Array, "*shape"]
  row: Int32[Array, "*shape"]
  slot: Int32[Array, "*shape"]


def slot_address(
  plan: Plan,
  rows: Int32[Array, "*shape"],
  rank: Int32[Array, "*shape"],
  *,
  slots: int,
) -> SlotAddress:
  """Where the slot of the row's active column of that rank is stored.

  It may be out of range if the row has no such column.
  """
  segment = plan.first_segment[rows] + rank // _SEGMENT
  position = plan.positions.at[segment].get(mode="clip")
  offset = rank % _SEGMENT
  return SlotAddress(
    plan.first[position // plan.tile] + offset // slots,
    position % plan.tile,
    offset % slots,
  )
