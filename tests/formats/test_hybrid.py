import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_jax.formats import HybridMatrix, TwellMatrix

DTYPES = [jnp.bfloat16, jnp.float32]

# tokens, d_ff, width, dense_rows. Few, since each compiles: no dense rows, one,
# one for every token; a width of one, and of d_ff.
SIZES = [
  (6, 100, 7, 2),
  (5, 65, 1, 0),
  (7, 40, 8, 1),
  (4, 33, 33, 4),
  (5, 70, 2, 5),
]

pack = jax.jit(HybridMatrix.pack, static_argnames=("width", "dense_rows"))
to_dense = jax.jit(HybridMatrix.to_dense)


def unsigned(values):
  """The bits of a floating-point array."""
  values = np.asarray(values)
  return values.view(f"uint{8 * values.itemsize}")


def is_active(values):
  # Exact: float64 holds every value of the narrower types.
  with np.errstate(invalid="ignore"):  # signalling NaN
    wide = values.astype(np.float64)
  return (wide > 0) | np.isnan(wide)


def assert_packed(matrix, dense, *, width, dense_rows, lost=None):
  """The format by its definition, one token at a time.

  Args:
    matrix: What was made.
    dense: The activation it was made from.
    width: Entries kept per token.
    dense_rows: Dense rows.
    lost: Tokens that do not fit ELL for another reason than their count.
  """
  active = is_active(dense)
  counts = active.sum(axis=1)
  beyond = counts > width
  if lost is not None:
    beyond |= lost
  assert (matrix.width, matrix.dense_rows) == (width, dense_rows)
  assert matrix.d_ff == dense.shape[1]
  assert matrix.dense.dtype == matrix.ell.values.dtype == dense.dtype
  np.testing.assert_array_equal(matrix.counts, counts)
  np.testing.assert_array_equal(matrix.ell.overflow, beyond)

  kept = np.where(active, unsigned(dense), 0)
  chosen = np.flatnonzero(beyond)[:dense_rows]
  tokens = np.full(dense_rows, -1)
  tokens[: chosen.size] = chosen
  np.testing.assert_array_equal(matrix.rows.tokens, tokens)
  np.testing.assert_array_equal(matrix.rows.used, tokens >= 0)
  slots = np.full(dense.shape[0], -1)
  slots[chosen] = np.arange(chosen.size)
  np.testing.assert_array_equal(matrix.rows.slots, slots)
  np.testing.assert_array_equal(
    unsigned(matrix.dense), np.where(tokens[:, None] >= 0, kept[tokens], 0)
  )

  values = np.zeros((dense.shape[0], width), kept.dtype)
  columns = np.zeros(values.shape, np.int32)
  for token in np.flatnonzero(~beyond):
    found = np.flatnonzero(active[token])
    values[token, : found.size] = kept[token, found]
    columns[token, : found.size] = found
  np.testing.assert_array_equal(unsigned(matrix.ell.values), values)
  np.testing.assert_array_equal(matrix.ell.columns, columns)
  assert matrix.ell.columns.dtype == jnp.int32

  overflow = beyond & (slots < 0)
  np.testing.assert_array_equal(matrix.overflow, overflow)
  back = to_dense(matrix)
  assert back.dtype == dense.dtype
  np.testing.assert_array_equal(unsigned(back)[~overflow], kept[~overflow])
  assert np.isnan(np.asarray(back)[overflow]).all()


def check_pack(dense, *, width, dense_rows):
  matrix = pack(jnp.asarray(dense), width=width, dense_rows=dense_rows)
  assert_packed(matrix, dense, width=width, dense_rows=dense_rows)
  return matrix


@st.composite
def activations(draw):
  """Any bits at all, in rows each of a density of its own."""
  tokens, d_ff, width, dense_rows = draw(st.sampled_from(SIZES))
  dtype = np.dtype(draw(st.sampled_from(DTYPES)))
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  raw = rng.bytes(tokens * d_ff * dtype.itemsize)
  bits = np.frombuffer(raw, f"uint{8 * dtype.itemsize}").reshape(tokens, d_ff)
  if draw(st.booleans()):
    # Clears the exponent: zeros and subnormal numbers.
    bits = bits & ~unsigned(np.array(np.inf, dtype))
  # About half of the bits drawn are active.
  densities = np.array([0.0, 1.0, 2 * width / d_ff, 1.0])
  density = rng.choice(densities[: draw(st.integers(1, 4))], size=(tokens, 1))
  negative_zero = unsigned(np.array(-0.0, dtype))
  bits = np.where(rng.random(bits.shape) < density, bits, negative_zero)
  return bits.view(dtype), {"width": width, "dense_rows": dense_rows}


@given(activations())
def test_pack_and_back(example):
  dense, sizes = example
  check_pack(dense, **sizes)


@pytest.mark.parametrize(
  ("width", "dense_rows"), [(1, 0), (8, 1), (1, 9), (16, 0), (3, 4)]
)
@pytest.mark.parametrize("active", ["nothing", "everything", "one row", "some"])
def test_adversarial(width, dense_rows, active):
  dense = np.full((9, 16), -1, np.float32)
  if active == "everything":
    dense[:] = np.arange(1, 17)
  elif active == "one row":
    dense[8] = 3
  elif active == "some":
    dense[::2, :5] = 2
    dense[1, 15] = np.nan
  check_pack(dense, width=width, dense_rows=dense_rows)


@pytest.mark.parametrize("count", [7, 8, 9])
def test_a_token_at_the_edge_of_the_width(count):
  dense = np.zeros((9, 16), np.float32)
  dense[4, :count] = 1
  matrix = check_pack(dense, width=8, dense_rows=1)
  assert matrix.rows.tokens.tolist() == [4 if count == 9 else -1]


@pytest.mark.parametrize("tokens", [0, 70_000])
def test_any_number_of_tokens(tokens):
  dense = -np.ones((tokens, 3), np.float32)
  if tokens:
    dense[-4:] = [[0, 1, 0], [1, 2, 3], [0, 0, 4], [4, 5, 6]]
  dense_rows = min(tokens, 2)
  matrix = check_pack(dense, width=2, dense_rows=dense_rows)
  assert matrix.rows.tokens.tolist() == [69_997, 69_999][:dense_rows]


def test_a_row_wider_than_16_bits():
  dense = np.zeros((3, 2**16 + 3), np.float32)
  dense[0, [1, 2**16, 2**16 + 2]] = 1, 2, 3
  dense[1, [0, 2**16 - 1, 2**16, 2**16 + 1]] = 4, 5, 6, 7
  dense[2, : 2**16] = 8
  check_pack(dense, width=3, dense_rows=2)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])  # op by op, fused
@pytest.mark.parametrize("width", [1, 256])
def test_keeps_every_bit(transform, width):
  # All 16-bit floats, all in dense rows or all in ELL.
  dense = np.arange(2**16).astype(np.uint16).view(jnp.bfloat16)
  dense = dense.reshape(256, 256)
  # Apart, since what XLA fuses depends on what else is in a program.
  pack_only = functools.partial(HybridMatrix.pack, width=width, dense_rows=256)
  matrix = transform(pack_only)(jnp.asarray(dense))
  back = transform(HybridMatrix.to_dense)(matrix)
  kept = np.where(is_active(dense), unsigned(dense), 0)
  np.testing.assert_array_equal(unsigned(back), kept)


def test_float64():
  dense = np.array([[5e-324, -1.0, np.nan, 1 / 3, 0.0], [0, 0, 0, 0, 5e-324]])
  with jax.enable_x64(True):
    check_pack(dense, width=2, dense_rows=1)


EXAMPLE = np.array(
  [[0, 5, 0, 7, 0, 0], [1, 2, 3, 4, 0, 9], [0, 0, 0, 6, 0, 0], [4] * 6],
  np.float32,
)


def test_docstring_example():
  matrix = pack(jnp.asarray(EXAMPLE), width=3, dense_rows=1)
  assert matrix.ell.values.tolist() == [
    [5, 7, 0],
    [0, 0, 0],
    [6, 0, 0],
    [0, 0, 0],
  ]
  assert matrix.ell.columns.tolist() == [
    [1, 3, 0],
    [0, 0, 0],
    [3, 0, 0],
    [0, 0, 0],
  ]
  assert matrix.counts.tolist() == [2, 5, 1, 6]
  assert matrix.rows.slots.tolist() == [-1, 0, -1, -1]
  assert matrix.rows.tokens.tolist() == [1]
  assert matrix.overflow.tolist() == [False, False, False, True]
  assert matrix.dense.tolist() == [[1, 2, 3, 4, 0, 9]]
  assert_packed(matrix, EXAMPLE, width=3, dense_rows=1)


def test_docstring_sizes():
  shape = jax.ShapeDtypeStruct((16384, 5632), jnp.bfloat16)
  packing = functools.partial(HybridMatrix.pack, width=128, dense_rows=2048)
  matrix = jax.eval_shape(packing, shape)
  ell_bytes = sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(matrix.ell)
  )
  assert round(ell_bytes / 1e6, 1) == 12.7
  assert round(matrix.dense.size * 2 / 1e6, 1) == 23.1
  assert 35.7e6 < matrix.nbytes < 35.9e6


@functools.partial(jax.jit, static_argnames="dense_rows")
def by_tiles(dense, *, dense_rows):
  matrix = TwellMatrix.pack(dense, tile_width=16, slots=3)
  return HybridMatrix.from_twell(
    matrix, lambda rows: rows.take(dense), width=8, dense_rows=dense_rows
  )


@given(
  st.integers(0, 2**32 - 1),
  st.sampled_from([0.05, 0.3]),
  st.sampled_from([0, 2, 6]),
)
def test_from_twell_makes_up_for_overflowed_tiles(seed, share, dense_rows):
  rng = np.random.default_rng(seed)
  dense = np.where(rng.random((6, 50)) < share, rng.random((6, 50)), -1)
  dense = dense.astype(np.float32)
  hybrid = by_tiles(jnp.asarray(dense), dense_rows=dense_rows)
  tiles = np.pad(dense > 0, ((0, 0), (0, 14))).reshape(6, 4, 16).sum(axis=2)
  lost = (tiles > 3).any(axis=1)
  assert_packed(hybrid, dense, width=8, dense_rows=dense_rows, lost=lost)


def test_from_twell_by_a_product_of_the_chosen_tokens():
  rng = np.random.default_rng(0)
  # Small integers, whose products are exact in any order.
  x = rng.integers(-3, 4, size=(20, 8)).astype(np.float32)
  gate = rng.integers(-3, 4, size=(30, 8)).astype(np.float32)
  asked = []

  @jax.jit
  def make(x, gate):
    def gate_rows(rows):
      asked.append(rows.tokens.shape[0])
      return rows.take(x) @ gate.T

    twell = TwellMatrix.pack(x @ gate.T, tile_width=8, slots=5)
    return HybridMatrix.from_twell(twell, gate_rows, width=20, dense_rows=3)

  hybrid = make(x, gate)
  assert asked == [3]
  back = np.asarray(hybrid.to_dense())
  stays = ~np.asarray(hybrid.overflow)
  assert 3 < np.sum(hybrid.ell.overflow) < 20
  np.testing.assert_array_equal(back[stays], np.maximum(x @ gate.T, 0)[stays])


@functools.cache
def example_ell():
  return pack(jnp.asarray(EXAMPLE), width=3, dense_rows=0).ell


def test_dense_rows_are_what_they_say_they_hold():
  # Computed in another order, an entry at the edge may be active or not.
  other = np.array([[-1, -0.0, 1e-45, np.nan, -np.inf, 5]], np.float32)
  hybrid = HybridMatrix.from_ell(
    example_ell(), lambda rows: jnp.asarray(other), dense_rows=1
  )
  expected = np.array([0, 0, 1e-45, np.nan, 0, 5], np.float32)
  np.testing.assert_array_equal(unsigned(hybrid.dense[0]), unsigned(expected))
  assert hybrid.counts.tolist() == [2, 3, 1, 6]
  np.testing.assert_array_equal(
    unsigned(hybrid.to_dense()[1]), unsigned(expected)
  )


def test_unused_dense_rows_are_zero_whatever_is_computed_for_them():
  hybrid = HybridMatrix.from_ell(
    example_ell(), lambda rows: jnp.full((4, 6), jnp.nan), dense_rows=4
  )
  assert hybrid.rows.tokens.tolist() == [1, 3, -1, -1]
  assert not np.any(unsigned(hybrid.dense[2:]))
  assert np.all(np.isnan(hybrid.dense[:2]))


def test_no_dense_rows_compute_nothing():
  def gate_rows(rows):
    raise AssertionError("called")

  hybrid = HybridMatrix.from_ell(example_ell(), gate_rows, dense_rows=0)
  assert_packed(hybrid, EXAMPLE, width=3, dense_rows=0)


def test_scan_stacks_and_carries_matrices():
  rng = np.random.default_rng(5)
  layers = rng.normal(size=(3, 5, 20)).astype(np.float32)
  packed = functools.partial(pack, width=9, dense_rows=2)

  @jax.jit
  def stacked_and_last(layers):
    def step(carry, layer):
      matrix = packed(layer)
      return matrix, (matrix, carry.to_dense())

    return jax.lax.scan(step, packed(jnp.zeros((5, 20))), layers)

  last, (stack, before) = stacked_and_last(layers)
  assert (stack.width, stack.dense_rows, stack.d_ff) == (9, 2, 20)
  assert stack.nbytes == 3 * last.nbytes
  expected = [packed(layer) for layer in layers]
  for index, one in enumerate(expected):
    layer = jax.tree.map(lambda array, index=index: array[index], stack)
    jax.tree.map(np.testing.assert_array_equal, layer, one)
    np.testing.assert_array_equal(stack.overflow[index], one.overflow)
    np.testing.assert_array_equal(stack.counts[index], one.counts)
    np.testing.assert_array_equal(stack.rows.used[index], one.rows.used)
  jax.tree.map(np.testing.assert_array_equal, last, expected[-1])
  assert not np.any(before[0])
  np.testing.assert_array_equal(before[2], expected[1].to_dense())

  # As residuals are read, one layer after the other.
  _, unpacked = jax.lax.scan(
    lambda _, matrix: (None, matrix.to_dense()), None, stack, reverse=True
  )
  for back, one in zip(unpacked, expected):
    np.testing.assert_array_equal(back, one.to_dense())


def test_is_a_pytree_with_static_sizes():
  matrix = pack(jnp.asarray(EXAMPLE), width=3, dense_rows=1)
  assert matrix.nbytes == (
    4 * 3 * (4 + 4) + 4 * 4 + 4  # ELL: values, columns; counts; overflow
    + 6 * 4  # the dense row
    + 4 + 4 * 4  # the maps
  )  # fmt: skip
  shapes = jax.eval_shape(lambda matrix: matrix, matrix)
  assert (shapes.width, shapes.dense_rows, shapes.d_ff) == (3, 1, 6)
  other = dataclasses.replace(matrix.ell, d_ff=9)
  with pytest.raises(ValueError, match=r"metadata|pytree"):
    jax.tree.map(lambda a, b: a, matrix, dataclasses.replace(matrix, ell=other))


def test_packing_does_not_sort():
  packing = functools.partial(HybridMatrix.pack, width=8, dense_rows=2)
  text = jax.jit(packing).lower(jnp.zeros((8, 64))).compile().as_text()
  assert text is not None
  assert "scatter" in text
  assert " sort(" not in text


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"width": 0}, r"width=0 must be in 1\.\.6, the d_ff"),
    ({"width": 7}, r"width=7 must be in 1\.\.6, the d_ff"),
    ({"dense_rows": -1}, r"dense_rows=-1 must be in 0\.\.4, the number of"),
    ({"dense_rows": 5}, r"dense_rows=5 must be in 0\.\.4, the number of"),
  ],
)
def test_refuses_sizes_out_of_bounds(sizes, message):
  with pytest.raises(ValueError, match=message) as error:
    HybridMatrix.pack(
      jnp.asarray(EXAMPLE), **{"width": 3, "dense_rows": 1, **sizes}
    )
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "activation",
  [jnp.ones(()), jnp.ones(4), jnp.ones((2, 0)), jnp.ones((2, 3, 4))],
)
def test_refuses_what_is_no_activation(activation):
  with pytest.raises(ValueError, match=r"must be \[tokens, d_ff\]"):
    HybridMatrix.pack(activation, width=1, dense_rows=0)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    (jnp.ones((1, 5)), r"float32\[1, 5\] but must give float32\[1, 6\]"),
    (
      jnp.ones((1, 6), jnp.bfloat16),
      r"gave bfloat16\[1, 6\] but must give float32\[1, 6\], the values",
    ),
  ],
)
def test_refuses_dense_rows_that_do_not_fit(values, message):
  with pytest.raises(ValueError, match=message) as error:
    HybridMatrix.from_ell(example_ell(), lambda rows: values, dense_rows=1)
  assert "\n" not in str(error.value)
