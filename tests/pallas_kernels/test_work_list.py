"""Work lists against a plain loop over rows, and capacities by brute force."""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import work_list

UNUSED = [-1, 0, 0, 0]

# Each shape is a program of its own.
pytestmark = pytest.mark.usefixtures("quick_compilation")


def cut(start, count, length):
  """All segments in order of rows, and the split rows, as lists."""
  entries, split_rows, part = [], [], 0
  for row, (first, slots) in enumerate(zip(start, count)):
    pieces = [
      (first + offset, min(length, slots - offset))
      for offset in range(0, slots, length)
    ] or [(first, 0)]
    if len(pieces) > 1:
      split_rows.append([row, part, len(pieces), 0])
    for place, size in pieces:
      entries.append([row, place, size, part if len(pieces) > 1 else -1])
      part += len(pieces) > 1
  return entries, split_rows, part


def listed(entries, capacity):
  """The array of a list: sorted if of segments, filled up."""
  return np.array(entries + [UNUSED] * (capacity - len(entries))).reshape(-1, 4)


def longest_first(entries):
  return sorted(entries, key=lambda entry: -entry[2])


def starts(count):
  """Lists of slots one after the other, with gaps of garbage."""
  return np.cumsum([0, *(slots + 3 for slots in count)])[:-1].tolist()


def work_of(count, length, capacity, part_capacity):
  work = work_list.segments(
    jnp.array(starts(count), jnp.int32),
    jnp.array(count, jnp.int32),
    length=length,
    capacity=capacity,
    part_capacity=part_capacity,
  )
  assert all(array.dtype == jnp.int32 for array in work)
  return work


@hypothesis.given(
  count=st.lists(st.integers(0, 9), min_size=1, max_size=6),
  length=st.integers(1, 10),
  spare=st.integers(0, 3),
  spare_parts=st.integers(0, 2),
)
def test_work_is_that_of_a_loop(count, length, spare, spare_parts):
  entries, split_rows, parts = cut(starts(count), count, length)
  # Without anything to spare, the capacities are reached exactly.
  capacity = len(entries) + spare
  part_capacity = parts + parts % 2 + 2 * spare_parts
  work = work_of(count, length, capacity, part_capacity)
  expected = listed(longest_first(entries), capacity)
  np.testing.assert_array_equal(work.segments, expected)
  np.testing.assert_array_equal(
    work.split_rows, listed(split_rows, part_capacity // 2)
  )
  assert (work.segment_total, work.part_total) == (len(entries), parts)
  assert work.part_capacity == part_capacity
  assert not work.overflow


@hypothesis.given(
  count=st.lists(st.integers(0, 9), min_size=1, max_size=6),
  length=st.integers(1, 10),
  capacity=st.integers(1, 12),
  part_capacity=st.integers(0, 5).map(lambda pairs: 2 * pairs),
)
def test_rows_that_do_not_fit_are_left_out_whole(
  count, length, capacity, part_capacity
):
  entries, split_rows, parts = cut(starts(count), count, length)
  kept = 0  # rows, of those in order of which all before fit too
  for row in range(len(count)):
    mine = [entry for entry in entries if entry[0] <= row]
    if len(mine) > capacity:
      break
    if sum(entry[3] >= 0 for entry in mine) > part_capacity:
      break
    kept = row + 1
  work = work_of(count, length, capacity, part_capacity)
  entries_kept = longest_first([e for e in entries if e[0] < kept])
  expected = listed(entries_kept, capacity)
  np.testing.assert_array_equal(work.segments, expected)
  split_kept = [entry for entry in split_rows if entry[0] < kept]
  np.testing.assert_array_equal(
    work.split_rows, listed(split_kept, part_capacity // 2)
  )
  assert (work.segment_total, work.part_total) == (len(entries), parts)
  assert work.overflow == (kept < len(count))


def test_the_drawn_example():
  work = jax.jit(lambda: work_of([3, 0, 5], 2, 7, 6))()
  place = starts([3, 0, 5])
  np.testing.assert_array_equal(
    work.segments,
    [
      [0, place[0], 2, 0],
      [2, place[2], 2, 2],
      [2, place[2] + 2, 2, 3],
      [0, place[0] + 2, 1, 1],
      [2, place[2] + 4, 1, 4],
      [1, place[1], 0, -1],
      UNUSED,
    ],
  )
  np.testing.assert_array_equal(
    work.split_rows, [[0, 0, 2, 0], [2, 2, 3, 0], UNUSED]
  )


def all_counts(rows, width, total):
  for count in itertools.product(range(width + 1), repeat=rows):
    if total is None or sum(count) <= total:
      yield count


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("width", [0, 1, 4, 5])
@pytest.mark.parametrize("total", [None, 0, 1, 5, 7])
def test_capacities_always_suffice(rows, width, total):
  for length in range(1, 6):
    needed, needed_parts = 0, 0
    for count in all_counts(rows, width, total):
      entries, _, parts = cut([0] * rows, count, length)
      needed = max(needed, len(entries))
      needed_parts = max(needed_parts, parts)
    sizes = {"width": width, "length": length, "total": total}
    capacity = work_list.max_segments(rows, **sizes)
    part_capacity = work_list.max_parts(rows, **sizes)
    assert capacity >= needed
    assert part_capacity % 2 == 0
    assert part_capacity >= needed_parts
    if total is None:
      # Full rows reach both, but for an odd number of parts.
      assert capacity == needed
      assert part_capacity in (needed_parts, needed_parts + 1)
    if total is not None and total <= width:
      # One row of all slots reaches it.
      assert capacity == needed


def test_bound_by_total_beats_that_by_width():
  # A transposed pattern: few neurons fire for every token.
  sizes = {"width": 16384, "length": 1024, "total": 16384 * 30}
  assert work_list.max_segments(5632, **sizes) == 5632 + 479
  assert work_list.max_parts(5632, **sizes) == 960
  # A length that no row exceeds splits none.
  assert work_list.max_segments(16384, width=128, length=128) == 16384
  assert work_list.max_parts(16384, width=128, length=128) == 0


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"rows": 0}, "rows=0 must be at least 1"),
    ({"width": -1}, "width=-1 must be at least 0"),
    ({"length": 0}, "length=0 must be at least 1"),
    ({"total": -1}, "total=-1 must be at least 0"),
  ],
)
@pytest.mark.parametrize(
  "function", [work_list.max_segments, work_list.max_parts]
)
def test_capacities_refuse(function, changes, message):
  sizes = {"rows": 2, "width": 3, "length": 1} | changes
  with pytest.raises(ValueError, match=message):
    function(sizes.pop("rows"), **sizes)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"length": 0}, "length=0 must be at least 1"),
    ({"capacity": 0}, "capacity=0 must be at least 1"),
    ({"part_capacity": 3}, "part_capacity=3 must be an even number"),
    ({"part_capacity": -2}, "part_capacity=-2 must be an even number"),
    ({"count": jnp.zeros(3, jnp.int32)}, r"count \(3,\) but both must be"),
    ({"start": jnp.zeros(2, jnp.uint32)}, "start is uint32 but must be int32"),
    ({"count": jnp.zeros(2)}, "count is float32 but must be int32"),
    (
      {"start": jnp.zeros(0, jnp.int32), "count": jnp.zeros(0, jnp.int32)},
      "at least one row",
    ),
  ],
)
def test_segments_refuses(changes, message):
  arguments = {
    "start": jnp.zeros(2, jnp.int32),
    "count": jnp.zeros(2, jnp.int32),
    "length": 2,
    "capacity": 4,
    "part_capacity": 4,
  } | changes
  start, count = arguments.pop("start"), arguments.pop("count")
  with pytest.raises(ValueError, match=message):
    work_list.segments(start, count, **arguments)


@hypothesis.given(
  count=st.lists(st.integers(0, 9), min_size=1, max_size=6),
  length=st.integers(1, 10),
)
def test_ell_segments_are_those_of_a_loop(count, length):
  """The same segments, where each piece of a row has a part of its own."""
  width = 9
  pieces = -(-width // length)
  work = work_list.ell_segments(
    jnp.array(count, jnp.int32), width=width, length=length
  )
  entries, split_rows, parts = cut(
    [row * width for row in range(len(count))], count, length
  )
  used = [
    entry for entry in np.asarray(work.segments).tolist() if entry[0] >= 0
  ]
  # By piece, then by row.
  assert used == sorted(
    used, key=lambda e: ((e[1] - e[0] * width) // length, e[0])
  )
  number = {
    (entry[0], entry[1]): (
      entry[0] * pieces + (entry[1] - entry[0] * width) // length
      if entry[3] >= 0
      else -1
    )
    for entry in entries
  }
  expected = [[*entry[:3], number[entry[0], entry[1]]] for entry in entries]
  assert sorted(used) == sorted(expected)
  split = [row for row in np.asarray(work.split_rows).tolist() if row[0] >= 0]
  assert split == [
    [row, row * pieces, many, 0] for row, _, many, _ in split_rows
  ]
  assert work.segment_total == len(entries)
  assert work.part_total == parts
  assert not work.overflow
  assert all(entry[3] < work.part_capacity for entry in used)
  unused = np.asarray(work.segments)[np.asarray(work.segments)[:, 0] < 0]
  assert (unused == UNUSED).all()


def test_of_ell_cuts_few_rows_and_sorts_whole_ones():
  count = jnp.array([2, 0, 5, 3], jnp.int32)
  cut_rows = work_list.of_ell(count, width=6, length=2)
  jax.tree.map(
    np.testing.assert_array_equal,
    cut_rows,
    work_list.ell_segments(count, width=6, length=2),
  )
  whole = work_list.of_ell(count, width=6, length=6)
  np.testing.assert_array_equal(
    whole.segments,
    [[2, 12, 5, -1], [3, 18, 3, -1], [0, 0, 2, -1], [1, 6, 0, -1]],
  )
  assert whole.part_capacity == 0


@pytest.mark.parametrize(
  ("count", "sizes", "message"),
  [
    (jnp.zeros(3, jnp.int32), {"width": 0, "length": 4}, "width=0 and length"),
    (jnp.zeros(3, jnp.int32), {"width": 4, "length": 0}, "at least 1 slot"),
    (jnp.zeros(3), {"width": 4, "length": 4}, "is float32 but must be int32"),
    (jnp.zeros((0,), jnp.int32), {"width": 4, "length": 4}, "at least one row"),
  ],
)
def test_ell_segments_refuse(count, sizes, message):
  with pytest.raises(ValueError, match=message):
    work_list.ell_segments(count, **sizes)
