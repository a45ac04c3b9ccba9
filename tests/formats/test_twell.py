import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_jax.formats import TwellMatrix

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]

# tokens, d_ff, tile_width, slots: a ragged last tile, room for everything, one
# tile wider than d_ff, one column. Few, since each compiles.
SIZES = [(5, 100, 32, 4), (4, 65, 16, 16), (3, 40, 70, 5), (2, 3, 1, 1)]

pack = functools.partial(jax.jit, static_argnames=("tile_width", "slots"))(
  TwellMatrix.pack
)
to_dense = jax.jit(TwellMatrix.to_dense)


def unsigned(values):
  """The bits of a floating-point array."""
  values = np.asarray(values)
  return values.view(f"uint{8 * values.itemsize}")


def assert_same_bits(actual, expected):
  assert actual.dtype == expected.dtype
  np.testing.assert_array_equal(unsigned(actual), unsigned(expected))


def is_active(values):
  # Exact: float64 holds every value of the narrower types.
  with np.errstate(invalid="ignore"):  # signalling NaN
    wide = values.astype(np.float64)
  return (wide > 0) | np.isnan(wide)


def expected_matrix(dense, *, tile_width, slots):
  """The format by its definition, one (token, tile) at a time."""
  tokens, d_ff = dense.shape
  tiles = math.ceil(d_ff / tile_width)
  values = np.zeros((tokens, tiles, slots), dense.dtype)
  columns = np.zeros((tokens, tiles, slots), np.uint16)
  counts = np.zeros((tokens, tiles), np.int32)
  for token in range(tokens):
    for tile in range(tiles):
      entries = dense[token, tile * tile_width : (tile + 1) * tile_width]
      found = np.flatnonzero(is_active(entries))
      counts[token, tile] = found.size
      stored = found[:slots]
      columns[token, tile, : stored.size] = stored
      values[token, tile, : stored.size] = entries[stored]
  return values, columns, counts


@st.composite
def activations(draw):
  """Any bits at all: subnormals, infinities and NaN are often among them."""
  tokens, d_ff, tile_width, slots = draw(st.sampled_from(SIZES))
  dtype = np.dtype(draw(st.sampled_from(DTYPES)))
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  size = (tokens, d_ff)
  bits = np.frombuffer(
    rng.bytes(tokens * d_ff * dtype.itemsize), f"uint{8 * dtype.itemsize}"
  ).reshape(size)
  if draw(st.booleans()):
    # Clears the exponent: zeros and subnormal numbers.
    exponent = unsigned(np.array(np.inf, dtype))
    bits = bits & ~exponent
  density = draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
  # −0 where an entry is left out.
  negative_zero = unsigned(np.array(-0.0, dtype))
  bits = np.where(rng.random(size) < density, bits, negative_zero)
  sizes = {"tile_width": tile_width, "slots": slots}
  return np.ascontiguousarray(bits).view(dtype), sizes


@given(activations())
def test_pack_and_back(example):
  dense, sizes = example
  matrix = pack(dense, **sizes)
  values, columns, counts = expected_matrix(dense, **sizes)
  assert_same_bits(matrix.values, values)
  np.testing.assert_array_equal(matrix.columns, columns)
  np.testing.assert_array_equal(matrix.counts, counts)
  assert matrix.columns.dtype == jnp.uint16
  assert matrix.counts.dtype == jnp.int32
  assert (matrix.d_ff, matrix.slots) == (dense.shape[1], sizes["slots"])

  overflow = counts > sizes["slots"]
  np.testing.assert_array_equal(matrix.overflow, overflow)
  np.testing.assert_array_equal(matrix.active, is_active(dense).sum(1))
  lost = overflow.repeat(sizes["tile_width"], axis=1)[:, : dense.shape[1]]
  kept = np.where(is_active(dense), unsigned(dense), 0)
  back = to_dense(matrix)
  assert np.isnan(np.asarray(back)[lost]).all()
  np.testing.assert_array_equal(unsigned(back)[~lost], kept[~lost])

  if overflow.any():
    with pytest.raises(ValueError, match=f"slots={counts.max()}$") as error:
      matrix.validate()
    assert str(error.value).startswith(f"{overflow.sum()} of {overflow.size} ")
  else:
    matrix.validate()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])  # op by op, fused
def test_keeps_every_bit(dtype, transform):
  # All 16-bit floats, or as many float32; more than one vector of a loop.
  shift = 8 * np.dtype(dtype).itemsize - 16
  bits = np.arange(2**16, dtype=np.uint32) << shift | (1 if shift else 0)
  dense = bits.astype(f"uint{shift + 16}").view(dtype).reshape(256, 256)

  # Apart, since what XLA fuses depends on what else is in a program.
  pack_only = functools.partial(TwellMatrix.pack, tile_width=70, slots=70)
  matrix = transform(pack_only)(jnp.asarray(dense))
  back = transform(TwellMatrix.to_dense)(matrix)
  matrix.validate()
  kept = np.where(is_active(dense), unsigned(dense), 0)
  np.testing.assert_array_equal(unsigned(back), kept)


def test_float64():
  dense = np.array([[5e-324, -1.0, np.nan, 1 / 3, 0.0]])
  with jax.enable_x64(True):
    matrix = pack(jnp.asarray(dense), tile_width=4, slots=4)
    matrix.validate()
    back = to_dense(matrix)
    assert_same_bits(back, np.where(is_active(dense), dense, 0.0))


def test_docstring_example():
  dense = jnp.array(
    [[0, 5, 0, 7, 0, 0, 0, 0, 0, 9], [1, 2, 3, 4, 0, 0, 6, 0, 0, 0]],
    jnp.bfloat16,
  )
  matrix = pack(dense, tile_width=4, slots=3)
  assert matrix.values.astype(jnp.int32).tolist() == [
    [[5, 7, 0], [0, 0, 0], [9, 0, 0]],
    [[1, 2, 3], [6, 0, 0], [0, 0, 0]],
  ]
  assert matrix.columns.tolist() == [
    [[1, 3, 0], [0, 0, 0], [1, 0, 0]],
    [[0, 1, 2], [2, 0, 0], [0, 0, 0]],
  ]
  assert matrix.counts.tolist() == [[2, 0, 1], [4, 1, 0]]
  assert matrix.active.tolist() == [3, 5]
  assert matrix.nbytes == 6 * (3 * (2 + 2) + 4)


def test_default_sizes():
  matrix = pack(jnp.ones((2, 300), jnp.bfloat16))
  assert (matrix.tile_width, matrix.slots) == (256, 32)
  assert matrix.nbytes == 2 * 2 * 132
  assert matrix.counts.tolist() == [[256, 44], [256, 44]]


@pytest.mark.parametrize("d_ff", [1, 256, 300])
def test_no_tokens(d_ff):
  matrix = pack(jnp.zeros((0, d_ff)))
  matrix.validate()
  assert to_dense(matrix).shape == (0, d_ff)
  assert matrix.active.shape == (0,)


def example_matrix():
  """Tile 0 of token 1 is full, tile 1 empty, tile 2 (2 wide) holds one."""
  dense = jnp.array(
    [[0, 5, 0, 7, 0, 0, 0, 0, 0, 9], [1, 2, 3, 4, 0, 0, 0, 0, 8, 0]],
    jnp.float32,
  )
  return pack(dense, tile_width=4, slots=4)


def test_vmap_and_scan_stack_matrices():
  dense = to_dense(example_matrix())
  stack = jnp.stack([dense, 2 * dense])
  packed = functools.partial(pack, tile_width=4, slots=2)
  by_vmap = jax.vmap(packed)(stack)
  _, by_scan = jax.lax.scan(lambda _, dense: (None, packed(dense)), None, stack)
  for stacked in (by_vmap, by_scan):
    assert stacked.values.shape == (2, 2, 3, 2)
    assert stacked.slots == 2
    assert stacked.active.tolist() == [[3, 5], [3, 5]]
    assert stacked.overflow.sum() == 2
    one = jax.tree.map(lambda array: array[1], stacked)
    expected = packed(stack[1])
    jax.tree.map(np.testing.assert_array_equal, one, expected)
    np.testing.assert_array_equal(
      jax.vmap(to_dense)(stacked)[1], to_dense(expected)
    )
    with pytest.raises(ValueError, match="matrices of a stack one by one"):
      stacked.validate()


def test_is_a_pytree_of_anything():
  matrix = example_matrix()
  leaves, structure = jax.tree.flatten(matrix)
  assert len(leaves) == 3
  names = jax.tree.unflatten(structure, ["values", "columns", "counts"])
  assert (names.values, names.columns, names.counts, names.d_ff) == (
    "values",
    "columns",
    "counts",
    10,
  )
  shapes = jax.eval_shape(lambda matrix: matrix, matrix)
  assert shapes.nbytes == matrix.nbytes
  paths = jax.tree_util.tree_leaves_with_path(matrix)
  assert [jax.tree_util.keystr(path) for path, _ in paths] == [
    ".values",
    ".columns",
    ".counts",
  ]
  # Static fields are part of the structure.
  with pytest.raises(ValueError, match=r"metadata|pytree"):
    jax.tree.map(
      lambda one, other: one, matrix, dataclasses.replace(matrix, d_ff=9)
    )


def changed(name, place, value):
  """A corruption: one number replaced."""

  def corrupt(matrix):
    array = getattr(matrix, name).at[place].set(value)
    return dataclasses.replace(matrix, **{name: array})

  return corrupt


def replaced(**fields):
  """A corruption: whole fields replaced, by functions of what they were."""

  def corrupt(matrix):
    new = {name: f(getattr(matrix, name)) for name, f in fields.items()}
    return dataclasses.replace(matrix, **new)

  return corrupt


@pytest.mark.parametrize(
  ("corrupt", "message"),
  [
    (replaced(values=lambda v: v[0]), r"values has shape \(3, 4\) but must be"),
    (
      replaced(values=lambda v: v.astype(jnp.int32)),
      r"values is int32\[2, 3, 4\] but must be bfloat16 or float16 or",
    ),
    (
      replaced(columns=lambda c: c.astype(jnp.int32)),
      r"columns is int32\[2, 3, 4\] but must be uint16\[2, 3, 4\]",
    ),
    (
      replaced(columns=lambda c: c[:, :, :3]),
      r"columns is uint16\[2, 3, 3\] but must be uint16\[2, 3, 4\]",
    ),
    (
      replaced(counts=lambda c: c[:, :2]),
      r"counts is int32\[2, 2\] but must be int32\[2, 3\]",
    ),
    (
      replaced(counts=lambda c: c.astype(jnp.int16)),
      r"counts is int16\[2, 3\] but must be int32\[2, 3\]",
    ),
    (replaced(d_ff=lambda _: 13), "3 tiles of 4 columns, .* make d_ff=13"),
    (replaced(d_ff=lambda _: 0), "3 tiles of 4 columns, .* make d_ff=0"),
    (replaced(tile_width=lambda _: 0), r"tile_width=0 must be in 1\.\.65536"),
    (replaced(tile_width=lambda _: 3), r"slots=4 must be in 1\.\.3"),
    (changed("counts", (0, 1), -1), r"at token 0, tile 1: counts is -1 but"),
    (
      changed("counts", (1, 0), 5),
      r"at token 1, tile 0: counts is 5 .* 0\.\.4",
    ),
    (
      changed("counts", (0, 2), 3),
      r"at token 0, tile 2: counts is 3 .* 0\.\.2",
    ),
    (
      changed("columns", (0, 2, 0), 2),
      "at token 0, tile 2, slot 0: column 2 is outside the tile, which is 2",
    ),
    (
      changed("columns", (1, 0, 1), 0),
      "at token 1, tile 0, slot 1: column 0 does not ascend, after 0",
    ),
    (
      changed("columns", (1, 0, 1), 3),
      "at token 1, tile 0, slot 2: column 2 does not ascend, after 3",
    ),
    (
      changed("values", (0, 0, 0), 0.0),
      "at token 0, tile 0, slot 0: the value of bits 0x0 is not active",
    ),
    (
      changed("values", (0, 0, 1), -2.0),
      "at token 0, tile 0, slot 1: the value of bits 0xc0000000 is not active",
    ),
    (
      changed("values", (0, 0, 2), 1.0),
      "at token 0, tile 0, slot 2: the slot is unused but holds column 0 and"
      " the value of bits 0x3f800000",
    ),
    (
      changed("values", (0, 1, 0), -0.0),
      "at token 0, tile 1, slot 0: the slot is unused but holds",
    ),
    (
      changed("columns", (1, 2, 3), 1),
      "at token 1, tile 2, slot 3: the slot is unused but holds column 1",
    ),
    (
      changed("counts", (1, 2), 2),
      "at token 1, tile 2, slot 1: column 0 does not ascend, after 0",
    ),
  ],
)
def test_validate_finds(corrupt, message):
  example_matrix().validate()
  corrupted = corrupt(example_matrix())
  with pytest.raises(ValueError, match=message) as error:
    corrupted.validate()
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("shape", "dtype", "sizes", "message"),
  [
    ((4,), jnp.float32, {}, r"shape \(4,\) but must be \[tokens, d_ff\]"),
    ((2, 3, 4), jnp.float32, {}, "reshape leading axes to one"),
    ((2, 0), jnp.float32, {}, "with d_ff of at least 1"),
    ((2, 4), jnp.int32, {}, "activation is int32 but must be one of bfloat16"),
    ((2, 4), jnp.float8_e5m2, {}, "activation is float8_e5m2 but must be one"),
    ((2, 4), jnp.float32, {"tile_width": 0}, r"tile_width=0 must be in 1\.\."),
    (
      (2, 4),
      jnp.float32,
      {"tile_width": 65537},
      r"tile_width=65537 must be in 1\.\.65536",
    ),
    ((2, 4), jnp.float32, {"slots": 0}, r"slots=0 must be in 1\.\.256"),
    (
      (2, 4),
      jnp.float32,
      {"tile_width": 16},
      r"slots=32 must be in 1\.\.16, the width of a tile",
    ),
  ],
)
def test_pack_refuses(shape, dtype, sizes, message):
  with pytest.raises(ValueError, match=message) as error:
    TwellMatrix.pack(jnp.zeros(shape, dtype), **sizes)
  assert "\n" not in str(error.value)


def test_widest_tile():
  dense = np.zeros((1, 2**16 + 1), np.float32)
  dense[0, [0, 2**16 - 1, 2**16]] = 1, 2, 3
  matrix = pack(dense, tile_width=2**16, slots=2)
  matrix.validate()
  assert matrix.columns.tolist() == [[[0, 2**16 - 1], [0, 0]]]
  np.testing.assert_array_equal(to_dense(matrix), dense)
