"""Work lists: rows of a sparse matrix, cut into segments of bounded length.

A sparse matrix is here a flat list of entries (columns, values) in which row m
owns the slots start[m] : start[m] + count[m]; in ELL start[m] = m · width. One
block of a gathered kernel works through one segment of a row:

    count 3 0 5, length 2          segments (row, start, length, part)
    row 0 │ a b │ c │              0 a.. 2 part 0     2 h.. 1 part 4
    row 1 │                        2 d.. 2 part 2     1 ..  0 part -1
    row 2 │ d e │ f g │ h │        2 f.. 2 part 3     unused  row -1
                                   0 c.. 1 part 1
    split rows (row, first part, parts, 0):   0 0 2 0   2 2 3 0   unused row -1

* Every row has a segment, an empty one too: its result must be written.
* A row that is its only segment writes its result (part -1). Those of a split
  row write partial results to parts, and a second pass adds the parts of each
  split row in ascending order, so that the sum does not depend on timing.
* Longest segments come first: blocks start in order, and a long one that
  starts last would be waited for.
* Shapes are static: capacities are chosen from bounds on the counts, with
  `max_segments` and `max_parts`, and unused entries have row -1 and length 0.
* Capacities may be smaller; the totals are true all the same, and tell whether
  they were exceeded. Rows that do not fit are then left out as a whole.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

# Fields of an entry of either list.
_FIELDS = 4


class Work(NamedTuple):
  """Segments of rows, and the rows that were split.

  Attributes:
    segments: (row, start, length, part) each, longest first; row -1 if unused.
    split_rows: (row, first part, parts, 0) each; row -1 if unused. There is
      room for 2 · split_rows parts.
    segment_total: Segments that the rows have, those left out included.
    part_total: Parts that they have, likewise.
  """

  segments: Int32[Array, "segments 4"]
  split_rows: Int32[Array, "split_rows 4"]
  segment_total: Int32[Array, ""]
  part_total: Int32[Array, ""]

  @property
  def part_capacity(self) -> int:
    """Parts that there is room for."""
    return 2 * self.split_rows.shape[0]

  @property
  def overflow(self) -> Bool[Array, ""]:
    """True where rows were left out, for want of room."""
    return (self.segment_total > self.segments.shape[0]) | (
      self.part_total > self.part_capacity
    )


def max_segments(
  rows: int, *, width: int, length: int, total: int | None = None
) -> int:
  """The most segments that rows can be cut into.

  A row of c slots has max(1, ⌈c / length⌉) segments, which is at most
  ⌈width / length⌉, and is 1 + ⌊(c - 1) / length⌋ for c of at least 1. Floors
  add up to at most the floor of the sum, in which one row suffices to hold all
  slots: rows + ⌊(total - 1) / length⌋.

  Args:
    rows: Rows, at least 1.
    width: Slots that one row has at most.
    length: Slots of a segment.
    total: Slots that all rows have at most together; rows · width by default.

  Raises:
    ValueError: An argument out of its bounds.
  """
  total = _checked_total(rows, width, length, total)
  by_width = rows * max(1, -(-width // length))
  return min(by_width, rows + max(0, total - 1) // length)


def max_parts(
  rows: int, *, width: int, length: int, total: int | None = None
) -> int:
  """The most parts that split rows can have; an even number, 0 if none splits.

  A row of n ≥ 2 segments has at least (n - 1) · length + 1 slots, that is n /
  ((n - 1) · length + 1) parts a slot, the most where n = 2: there are at most
  ⌊2 · total / (length + 1)⌋. And there are no more than segments. It is rounded
  up to even, since split rows have at least two parts each.

  Args and errors are those of `max_segments`.
  """
  total = _checked_total(rows, width, length, total)
  if width <= length:
    return 0
  by_width = rows * -(-width // length)
  parts = min(by_width, 2 * total // (length + 1))
  return parts + parts % 2


def segments(
  start: Int32[Array, "rows"],
  count: Int32[Array, "rows"],
  *,
  length: int,
  capacity: int,
  part_capacity: int,
) -> Work:
  """The work list of rows: segments of up to `length` slots, longest first.

  Args:
    start: First slot of each row.
    count: Slots of each row, 0 or more.
    length: Slots of a segment at most.
    capacity: Segments that there is room for, as `max_segments` says.
    part_capacity: Parts that there is room for, as `max_parts` says; even.

  Raises:
    ValueError: An argument out of its bounds, or no rows.
  """
  _check_lists(start, count)
  _check_capacities(length, capacity, part_capacity)
  pieces = jnp.maximum(1, (count - 1) // length + 1)
  is_split = pieces > 1
  parts = jnp.where(is_split, pieces, 0)
  # Summed together, in fewer launches: with few tokens those are what counts.
  counted = jnp.stack([pieces, parts, is_split.astype(jnp.int32)])
  end, part_end, split_end = jnp.cumsum(counted, axis=1, dtype=jnp.int32)
  # Ends ascend, so that once a row does not fit, none after it does.
  fits = (end <= capacity) & (part_end <= part_capacity)
  last = count.shape[0] - 1

  index = jnp.arange(capacity, dtype=jnp.int32)
  row = _rows_at(end, index)
  piece = index - (end - pieces)[row]
  entries = _table(
    (index < end[last]) & fits[row],
    row,
    start[row] + piece * length,
    jnp.clip(count[row] - piece * length, 0, length),
    jnp.where(is_split[row], (part_end - parts)[row] + piece, -1),
  )
  # With the index as a second key it need not be stable, which costs XLA more.
  keys = (-entries[:, 2], index)
  _, order = lax.sort(keys, num_keys=2, is_stable=False)

  index = jnp.arange(part_capacity // 2, dtype=jnp.int32)
  row = _rows_at(split_end, index)
  split_rows = _table(
    (index < split_end[last]) & fits[row],
    row,
    (part_end - parts)[row],
    parts[row],
    jnp.zeros_like(row),
  )
  return Work(entries[order], split_rows, end[last], part_end[last])


def _rows_at(
  end: Int32[Array, "rows"], index: Int32[Array, "entries"]
) -> Int32[Array, "entries"]:
  """The row that each index falls into; the last one beyond the end."""
  # Unrolled, the search is one fusion; as a loop it would be some 15 launches.
  row = jnp.searchsorted(end, index, side="right", method="scan_unrolled")
  return jnp.minimum(row.astype(jnp.int32), end.shape[0] - 1)


def of_ell(count: Int32[Array, "rows"], *, width: int, length: int) -> Work:
  """The work list of an ELL matrix, in which row m owns slots m · width on.

  Rows that are cut, few tokens as in decoding, come from `ell_segments`. Rows
  that are not, of thousands of tokens, are sorted, so that none is waited for.

  Args and errors are those of `ell_segments`.
  """
  if length < width:
    return ell_segments(count, width=width, length=length)
  _check_lists(count, count)
  rows = count.shape[0]
  return segments(
    jnp.arange(rows, dtype=jnp.int32) * width,
    count,
    length=length,
    capacity=rows,
    part_capacity=0,
  )


def ell_segments(
  count: Int32[Array, "rows"], *, width: int, length: int
) -> Work:
  """The work list of an ELL matrix whose rows are cut into equal pieces.

  Row m owns slots m · width and on, and has ⌈width / length⌉ entries, whether
  it needs them or not. So each entry is a formula of its index, in one fusion,
  where `segments` sums, searches and sorts in half a dozen launches: this is
  for few rows, whose kernels take no longer than that. First pieces come
  first, then second ones, so nearly in the order of length. Nothing is left
  out, whatever the counts.

  Args:
    count: Slots that are used of each row, 0 to width.
    width: Slots of a row.
    length: Slots of a segment at most.

  Raises:
    ValueError: An argument out of its bounds, or no rows.
  """
  _check_lists(count, count)
  if width < 1 or length < 1:
    raise ValueError(f"{width=} and {length=} must be at least 1 slot")
  rows = count.shape[0]
  pieces = -(-width // length)
  index = jnp.arange(rows * pieces, dtype=jnp.int32)
  piece, row = index // rows, index % rows
  entry_length = jnp.clip(count[row] - piece * length, 0, length)
  entries = _table(
    (piece == 0) | (entry_length > 0),
    row,
    row * width + piece * length,
    entry_length,
    jnp.where(count[row] > length, row * pieces + piece, -1),
  )
  # Room for a part of every piece, of which two come with an entry.
  capacity = -(-rows * pieces // 2) if pieces > 1 else 0
  split_row = jnp.arange(capacity, dtype=jnp.int32)
  read = jnp.minimum(split_row, rows - 1)
  parts = jnp.where(count > length, (count - 1) // length + 1, 0)
  split_rows = _table(
    (split_row < rows) & (parts[read] > 0),
    split_row,
    split_row * pieces,
    parts[read],
    jnp.zeros_like(read),
  )
  total = jnp.sum(jnp.maximum(1, parts), dtype=jnp.int32)
  return Work(entries, split_rows, total, jnp.sum(parts, dtype=jnp.int32))


def _table(
  used: Bool[Array, "entries"], row: Int32[Array, "entries"], *fields: Array
) -> Int32[Array, "entries 4"]:
  """Entries as rows of four numbers; (-1, 0, 0, 0) where unused."""
  columns = [jnp.where(used, row, -1)]
  columns += [jnp.where(used, field, 0) for field in fields]
  assert len(columns) == _FIELDS
  return jnp.stack(columns, axis=1)


def _checked_total(
  rows: int, width: int, length: int, total: int | None
) -> int:
  """The total, its default filled in."""
  for name, value, least in (
    ("rows", rows, 1),
    ("width", width, 0),
    ("length", length, 1),
  ):
    if value < least:
      raise ValueError(f"{name}={value} must be at least {least}")
  if total is None:
    return rows * width
  if total < 0:
    raise ValueError(f"{total=} must be at least 0")
  return min(total, rows * width)


def _check_lists(start: Array, count: Array) -> None:
  if start.ndim != 1 or start.shape != count.shape or not start.size:
    raise ValueError(
      f"start has shape {start.shape} and count {count.shape} but both must be"
      " [rows] with at least one row"
    )
  for name, array in (("start", start), ("count", count)):
    if array.dtype != jnp.int32:
      raise ValueError(f"{name} is {array.dtype} but must be int32: cast it")


def _check_capacities(length: int, capacity: int, part_capacity: int) -> None:
  if length < 1:
    raise ValueError(f"{length=} must be at least 1, the slots of a segment")
  if capacity < 1:
    raise ValueError(
      f"{capacity=} must be at least 1: max_segments() gives one that suffices"
    )
  if part_capacity < 0 or part_capacity % 2:
    raise ValueError(
      f"{part_capacity=} must be an even number of at least 0: max_parts()"
      " gives one that suffices"
    )
