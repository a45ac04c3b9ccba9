import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_jax.formats import EllMatrix, TwellMatrix

# tokens, d_ff, tile_width, slots, width. Few, since each compiles: a ragged
# last tile, one tile, one column per tile, a width below the slots of a tile.
SIZES = [
  (5, 100, 32, 4, 7),
  (4, 65, 16, 16, 65),
  (3, 40, 70, 5, 5),
  (6, 9, 1, 1, 4),
  (4, 64, 32, 8, 3),
]


@jax.jit(static_argnames=("tile_width", "slots", "width"))
def compact(dense, *, tile_width, slots, width):
  matrix = TwellMatrix.pack(dense, tile_width=tile_width, slots=slots)
  ell = EllMatrix.from_twell(matrix, width=width)
  return ell, ell.to_dense(), ell.stored


def is_active(values):
  wide = values.astype(np.float64)
  return (wide > 0) | np.isnan(wide)


def unsigned(values):
  values = np.asarray(values)
  return values.view(f"uint{8 * values.itemsize}")


def check(dense, *, tile_width, slots, width):
  """The format by its definition, one token at a time."""
  ell, unpacked, stored = compact(
    jnp.asarray(dense), tile_width=tile_width, slots=slots, width=width
  )
  active = is_active(dense)
  for token, row in enumerate(dense):
    columns = np.flatnonzero(active[token])
    tiles = np.bincount(columns // tile_width, minlength=1)
    overflow = columns.size > width or tiles.max() > slots
    assert ell.counts[token] == columns.size
    assert ell.overflow[token] == overflow
    assert stored[token] == (0 if overflow else columns.size)
    columns = columns[: stored[token]]
    expected = np.zeros(width, dense.dtype)
    expected[: columns.size] = row[columns]
    np.testing.assert_array_equal(
      unsigned(ell.values[token]), unsigned(expected)
    )
    np.testing.assert_array_equal(ell.columns[token][: columns.size], columns)
    assert not np.any(ell.columns[token][columns.size :])
    if overflow:
      assert np.all(np.isnan(np.asarray(unpacked[token], np.float32)))
    else:
      np.testing.assert_array_equal(
        unsigned(unpacked[token]),
        unsigned(np.where(active[token], row, np.zeros_like(row))),
      )
  assert ell.width == width
  assert ell.d_ff == dense.shape[1]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.05, 0.3]))
def test_holds_the_active_entries_in_order(size, dtype, seed, share):
  tokens, d_ff, tile_width, slots, width = size
  rng = np.random.default_rng(seed)
  dense = rng.normal(size=(tokens, d_ff)).astype(dtype)
  dense = np.where(rng.random(dense.shape) < share, dense, -np.abs(dense))
  check(dense, tile_width=tile_width, slots=slots, width=width)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 32])
def test_a_tile_at_the_edge_of_its_slots(count):
  dense = np.full((2, 96), -1, np.float32)
  dense[0, 32 : 32 + count] = 1 + np.arange(count)
  dense[1, 95] = 2
  check(dense, tile_width=32, slots=4, width=96)


@pytest.mark.parametrize("count", [7, 8, 9])
def test_a_token_at_the_edge_of_the_width(count):
  dense = np.zeros((2, 96), np.float32)
  dense[0, :: 96 // count][:count] = 1
  dense[0, np.flatnonzero(dense[0])[count:]] = 0
  check(dense, tile_width=32, slots=32, width=8)


def test_keeps_bits():
  tiny = np.finfo(np.float32).smallest_subnormal
  row = np.array([tiny, -0.0, np.nan, np.inf, -np.inf, 3.0], np.float32)
  for dtype in (np.float32, jnp.bfloat16):
    dense = row.astype(dtype)
    if dtype is not np.float32:
      dense[0] = np.uint16(1).view(dtype)
    check(dense[None], tile_width=4, slots=4, width=6)


@pytest.mark.parametrize("width", [0, 101])
def test_refuses_a_width_out_of_bounds(width):
  matrix = TwellMatrix.pack(jnp.ones((1, 100)))
  with pytest.raises(ValueError, match=rf"width={width} must be in 1\.\.100"):
    EllMatrix.from_twell(matrix, width=width)
