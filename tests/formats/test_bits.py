import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_jax.formats.bits import (
  columns_pattern,
  is_active,
  make_pattern,
  nth_active,
  pack,
  rank_of,
  rows_pattern,
  unpack,
  without_first,
)

# Few shapes, since each compiles: whole words and not, one row, one column.
SHAPES = [(1, 1), (5, 31), (3, 32), (33, 33), (70, 100)]


@st.composite
def masks(draw):
  """Booleans whose rows are empty, full, or of any density."""
  rows, columns = draw(st.sampled_from(SHAPES))
  densities = draw(
    st.lists(
      st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
      min_size=rows,
      max_size=rows,
    )
  )
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  return rng.random((rows, columns)) < np.array(densities)[:, None]


def columns_pattern_of(active):
  return columns_pattern(pack(active), active.shape[1])


@functools.partial(jax.jit, static_argnames=("pattern_of", "num_ranks"))
def search(active, *, pattern_of, num_ranks):
  pattern = pattern_of(active)
  rows = pattern.words.shape[0]
  strides = {}
  if pattern_of is columns_pattern_of:
    strides = {"word_stride": 1, "bit_stride": pattern.words.shape[1]}
  rank = jnp.arange(num_ranks, dtype=jnp.int32)[None]
  rank = jnp.broadcast_to(rank, (rows, num_ranks))
  return pattern, nth_active(pattern, rank, **strides)


rows_pattern_of = jax.jit(rows_pattern)


def expected_columns(active, num_ranks):
  columns = np.zeros((active.shape[0], num_ranks), np.int32)
  for row, found in enumerate(map(np.flatnonzero, active)):
    columns[row, : found.size] = found
  return columns


@given(masks())
def test_rows_pattern(active):
  # Two ranks more than a full row has, to read 0 there.
  num_ranks = active.shape[1] + 2
  pattern, columns = search(
    active, pattern_of=rows_pattern, num_ranks=num_ranks
  )
  words = np.asarray(pattern.words)
  column = np.arange(active.shape[1])
  bits = words[:, column // 32] >> (column % 32).astype(np.uint32) & 1
  np.testing.assert_array_equal(bits, active)
  np.testing.assert_array_equal(pattern.counts, active.sum(1))
  np.testing.assert_array_equal(
    pattern.running, np.bitwise_count(words).cumsum(1)
  )
  np.testing.assert_array_equal(columns, expected_columns(active, num_ranks))
  assert columns.dtype == jnp.int32


@given(masks())
def test_columns_pattern(active):
  num_ranks = active.shape[0] + 2
  pattern, rows = search(
    active, pattern_of=columns_pattern_of, num_ranks=num_ranks
  )
  np.testing.assert_array_equal(pattern.counts, active.sum(0))
  # The n-th active row of a column, in the order of bits inside words.
  num_words = pattern.words.shape[1]
  row = np.arange(active.shape[0])
  order = np.lexsort((row // num_words, row % num_words))
  in_order = expected_columns(active[order].T, num_ranks)
  used = np.arange(num_ranks) < active.sum(0)[:, None]
  np.testing.assert_array_equal(rows, np.where(used, order[in_order], 0))


@given(masks())
def test_unpack_inverts_pack(active):
  words = jax.jit(pack)(active)
  assert words.dtype == jnp.uint32
  columns = active.shape[1]
  unpacked = jax.jit(unpack, static_argnums=1)(words, columns)
  np.testing.assert_array_equal(unpacked, active)


@given(masks(), st.sampled_from([0, 1, 31, 32, 33, 100]))
def test_without_first(active, columns):
  columns = min(columns, active.shape[1])
  expected = active & (np.arange(active.shape[1]) >= columns)
  words = without_first(pack(jnp.asarray(active)), columns)
  np.testing.assert_array_equal(words, pack(jnp.asarray(expected)))
  jax.tree.map(
    np.testing.assert_array_equal, make_pattern(words), rows_pattern(expected)
  )


@given(masks())
def test_rank_of_inverts_nth_active(active):
  row, column = np.indices(active.shape, np.int32)
  rank = jax.jit(rank_of)(rows_pattern_of(active), row, column)
  before = active.cumsum(1) - active
  np.testing.assert_array_equal(rank, before)


def test_patterns_without_rows():
  pattern = rows_pattern(jnp.zeros((0, 40), bool))
  assert pattern.words.shape == (0, 2)
  assert nth_active(pattern, jnp.zeros((0, 3), jnp.int32)).shape == (0, 3)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_16_bit_float(dtype, transform):
  values = np.arange(2**16, dtype=np.uint16).view(dtype)
  with np.errstate(invalid="ignore"):  # signalling NaN
    wide = values.astype(np.float64)
  np.testing.assert_array_equal(
    transform(is_active)(jnp.asarray(values)), (wide > 0) | np.isnan(wide)
  )


def special_values(dtype):
  """±0, the least and largest subnormals, normals, ±inf, NaN of both signs."""
  info = np.finfo(dtype)
  positive = np.array(
    [
      0,
      info.smallest_subnormal,
      info.smallest_normal - info.smallest_subnormal,
      info.smallest_normal,
      1,
      info.max,
      np.inf,
      np.nan,
    ],
    dtype,
  )
  return np.concatenate([positive, np.negative(positive)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(dtype):
  values = special_values(dtype)
  expected = (values > 0) | np.isnan(values)
  assert expected.sum() == 8
  with jax.enable_x64(dtype == np.float64):
    z = jnp.asarray(values)
    assert z.dtype == dtype
    np.testing.assert_array_equal(is_active(z), expected)
    np.testing.assert_array_equal(jax.jit(is_active)(z), expected)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64))
def test_any_float32(bits):
  values = np.array(bits, np.uint32).view(np.float32)
  np.testing.assert_array_equal(
    is_active(jnp.asarray(values)), (values > 0) | np.isnan(values)
  )
