import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_jax.formats import EllMatrix, HybridMatrix, transpose_ell

# tokens, width, d_ff. Few, since each compiles: whole words of bits and not,
# one token, one slot, one neuron.
SIZES = [(70, 5, 9), (64, 3, 40), (1, 4, 4), (33, 1, 1)]

pack = jax.jit(HybridMatrix.pack, static_argnames=("width", "dense_rows"))
lists_of = jax.jit(transpose_ell, static_argnames=("align", "chunk_tokens"))


def ell(columns, counts, *, d_ff, overflow=None, values=None):
  """An ELL matrix of numpy arrays."""
  if values is None:
    values = np.ones(columns.shape, np.float32)
  if overflow is None:
    overflow = np.zeros(counts.shape, bool)
  return EllMatrix(
    values=jnp.asarray(values),
    columns=jnp.asarray(columns, jnp.int32),
    counts=jnp.asarray(counts, jnp.int32),
    overflow=jnp.asarray(overflow),
    d_ff=d_ff,
  )


def check(matrix, *, align=1, chunk_tokens=None):
  """The lists by a stable sort."""
  lists = lists_of(matrix, align=align, chunk_tokens=chunk_tokens)
  tokens, width = matrix.columns.shape
  total = tokens * width
  stored = np.where(matrix.overflow, 0, matrix.counts)
  used = (np.arange(width) < stored[:, None]).reshape(-1)
  slots = np.flatnonzero(used)
  neurons = np.asarray(matrix.columns).reshape(-1)[slots]
  slots = slots[np.argsort(neurons, kind="stable")]
  counts = np.bincount(neurons, minlength=matrix.d_ff)
  room = -(-counts // align) * align
  starts = np.cumsum(room) - room
  num_places = (total + min(total, matrix.d_ff) * (align - 1)) // align * align

  expected = np.full(num_places, total)
  for start, own in zip(starts, np.split(slots, np.cumsum(counts)[:-1])):
    expected[start : start + own.size] = own
  places = np.full(total, num_places)
  places[expected[expected < total]] = np.flatnonzero(expected < total)

  np.testing.assert_array_equal(lists.slots, expected)
  np.testing.assert_array_equal(lists.starts, starts)
  np.testing.assert_array_equal(lists.counts, counts)
  np.testing.assert_array_equal(lists.places, places.reshape(tokens, width))
  np.testing.assert_array_equal(lists.used, expected < total)
  np.testing.assert_array_equal(
    lists.tokens, np.where(expected < total, expected // width, 0)
  )
  for array in lists:
    assert array.dtype == jnp.int32
  return lists


@st.composite
def matrices(draw):
  """Rows of any counts; columns of unused slots are anything at all."""
  tokens, width, d_ff = draw(st.sampled_from(SIZES))
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  # Some neurons much more often than others.
  rates = rng.random(d_ff) ** draw(st.sampled_from([0.0, 1.0, 30.0]))
  order = np.argsort(-rates * rng.random((tokens, d_ff)), axis=1)
  fit = min(width, d_ff)
  most = draw(st.sampled_from([0, 1, fit]))
  counts = rng.integers(0, most, endpoint=True, size=tokens)
  columns = rng.integers(-(2**31), 2**31, size=(tokens, width))
  for token, count in enumerate(counts):
    columns[token, :count] = np.sort(order[token, :count])
  overflow = rng.random(tokens) < draw(st.sampled_from([0.0, 0.3]))
  # True counts of rows with overflow are beyond the width.
  counts = np.where(overflow, counts + width, counts)
  return ell(columns, counts, d_ff=d_ff, overflow=overflow)


@given(
  matrices(),
  st.sampled_from([{}, {"align": 4}, {"chunk_tokens": 32}]),
)
def test_equals_a_stable_sort(matrix, options):
  check(matrix, **options)


@pytest.mark.parametrize("chunk_tokens", [1, 31, 32, 69, 1000])
def test_chunks_change_nothing(chunk_tokens):
  rng = np.random.default_rng(chunk_tokens)
  columns = np.sort(rng.permuted(np.tile(np.arange(9), (70, 1)), axis=1)[:, :5])
  matrix = ell(columns, rng.integers(0, 6, size=70), d_ff=9)
  lists = check(matrix, align=3, chunk_tokens=chunk_tokens)
  jax.tree.map(np.testing.assert_array_equal, lists, lists_of(matrix, align=3))


# Columns and counts of 40 tokens, 8 slots wide, of 8 neurons: one shape, since
# each compiles.
ADVERSARIAL = {
  "nothing": (np.zeros((40, 8)), np.zeros(40)),
  "everything": (np.tile(np.arange(8), (40, 1)), np.full(40, 8)),
  "one neuron on every token": (np.full((40, 8), 7), np.ones(40)),
  "the last neuron at the last token": (
    np.full((40, 8), 7),
    np.arange(40) == 39,
  ),
  "one token alone": (
    np.tile(np.arange(8), (40, 1)),
    np.where(np.arange(40) == 32, 8, 0),
  ),
  "neurons in turn": (np.tile(np.arange(40)[:, None] % 8, 8), np.ones(40)),
  "neurons backwards": (
    7 - np.tile(np.arange(40)[:, None] % 8, 8),
    np.ones(40),
  ),
  "the last bit of a word": (np.full((40, 8), 3), np.arange(40) == 31),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize(
  "options", [{}, {"align": 8, "chunk_tokens": 33}], ids=str
)
def test_adversarial(name, options):
  columns, counts = ADVERSARIAL[name]
  check(ell(columns, counts, d_ff=8), **options)


def test_no_tokens():
  lists = check(ell(np.zeros((0, 4)), np.zeros(0), d_ff=8), align=4)
  assert lists.slots.shape == (0,)


def test_more_tokens_than_16_bits_count():
  tokens = 70_000
  # A token has neuron 2 alone, or neuron 0 or 1 before it.
  kind = np.random.default_rng(0).integers(0, 3, size=tokens)
  columns = np.stack([kind, np.full(tokens, 2)], axis=1)
  matrix = ell(columns, np.where(kind == 2, 1, 2), d_ff=3)
  lists = check(matrix, chunk_tokens=40_000)
  assert lists.counts[2] == tokens
  assert np.max(lists.tokens) == tokens - 1


def test_docstring_example():
  matrix = ell(np.array([[1, 3], [2, 0], [1, 2]]), np.array([2, 1, 2]), d_ff=4)
  lists = check(matrix, align=2)
  assert lists.slots.tolist() == [0, 4, 2, 5, 1, 6, 6, 6, 6, 6]
  assert lists.starts.tolist() == [0, 0, 2, 4]
  assert lists.counts.tolist() == [0, 2, 2, 1]
  assert check(matrix).slots.tolist() == [0, 4, 2, 5, 1, 6]


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_moves_values_there_and_back(dtype, align):
  rng = np.random.default_rng(1)
  # Any bits in all slots, used or not: subnormals and NaN among them.
  size = np.dtype(dtype).itemsize
  raw = rng.bytes(300 * 7 * size)
  bits = np.frombuffer(raw, f"uint{8 * size}").reshape(300, 7)
  bits = np.where(rng.random(bits.shape) < 0.5, bits, bits & 0x7F)
  columns = np.sort(rng.permuted(np.tile(np.arange(9), (300, 1)), axis=1))
  counts = rng.integers(0, 8, size=300)
  matrix = ell(
    columns[:, :7], counts, d_ff=9, values=bits.view(np.dtype(dtype))
  )
  lists = lists_of(matrix, align=align)
  used = np.arange(7) < counts[:, None]

  listed = jax.jit(type(lists).from_ell)(lists, matrix.values)
  assert listed.dtype == dtype
  flat = np.append(bits.reshape(-1), bits.dtype.type(0))
  np.testing.assert_array_equal(
    np.asarray(listed).view(bits.dtype), flat[lists.slots]
  )
  # What is in unused places does not come back.
  poison = bits.dtype.type(np.iinfo(bits.dtype).max)
  poisoned = np.where(lists.used, np.asarray(listed).view(bits.dtype), poison)
  back = jax.jit(type(lists).to_ell)(
    lists, jnp.asarray(poisoned.view(np.dtype(dtype)))
  )
  np.testing.assert_array_equal(
    np.asarray(back).view(bits.dtype), np.where(used, bits, 0)
  )


def test_a_product_of_the_transposed_matrix():
  rng = np.random.default_rng(2)
  dense = rng.normal(size=(50, 12)).astype(np.float32)
  x = rng.normal(size=(50, 6))
  matrix = pack(jnp.asarray(dense), width=8, dense_rows=0).ell
  lists = check(matrix)
  values = np.asarray(lists.from_ell(matrix.values), np.float64)
  gradient = np.zeros((12, 6))
  for neuron, (start, count) in enumerate(zip(lists.starts, lists.counts)):
    own = slice(int(start), int(start + count))
    gradient[neuron] = values[own] @ x[lists.tokens[own]]
  kept = np.nan_to_num(np.asarray(matrix.to_dense()))
  np.testing.assert_allclose(gradient, kept.T @ x, rtol=1e-6, atol=1e-12)
  assert np.any(gradient)


def stack_of(count):
  rng = np.random.default_rng(3)
  dense = rng.normal(size=(count, 40, 12)).astype(np.float32) - 1
  return [pack(jnp.asarray(d), width=12, dense_rows=0).ell for d in dense]


def test_scan():
  matrices = stack_of(3)
  stack = jax.tree.map(lambda *arrays: jnp.stack(arrays), *matrices)
  _, stacked = jax.lax.scan(
    lambda _, matrix: (None, transpose_ell(matrix, align=2)), None, stack
  )
  for index, matrix in enumerate(matrices):
    one = jax.tree.map(lambda array, index=index: array[index], stacked)
    jax.tree.map(np.testing.assert_array_equal, one, check(matrix, align=2))
  with pytest.raises(ValueError, match="matrices of a stack one by one"):
    transpose_ell(stack)


def test_each_device_transposes_its_tokens():
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
  matrices = stack_of(4)
  whole = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *matrices)
  spec = jax.sharding.PartitionSpec("data")
  # In two chunks on each device, and with the check of what varies.
  sharded = jax.jit(
    jax.shard_map(
      functools.partial(transpose_ell, chunk_tokens=32),
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
    )
  )(whole)
  expected = [check(matrix) for matrix in matrices]
  together = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *expected)
  jax.tree.map(np.testing.assert_array_equal, sharded, together)


def shapes_of(*, tokens, width, d_ff):
  return jax.eval_shape(
    lambda: EllMatrix(
      values=jnp.zeros((tokens, width), jnp.bfloat16),
      columns=jnp.zeros((tokens, width), jnp.int32),
      counts=jnp.zeros((tokens,), jnp.int32),
      overflow=jnp.zeros((tokens,), bool),
      d_ff=d_ff,
    )
  )


@functools.cache
def compiled(tokens, chunk_tokens=None):
  shapes = shapes_of(tokens=tokens, width=8, d_ff=5632)
  return lists_of.lower(shapes, chunk_tokens=chunk_tokens).compile()


def hlo_of(program):
  text = program.as_text()
  assert text is not None
  return text


def test_neither_sorts_nor_asks_the_host():
  x = jnp.ones(9)
  names = r"\b(sort|infeed|outfeed|send|recv|custom-call)\("
  assert not re.search(names, hlo_of(compiled(2**18)))
  assert re.search(names, hlo_of(jax.jit(jnp.argsort).lower(x).compile()))


def test_holds_the_bits_of_a_chunk_only():
  tokens = 2**18
  all_bits = 5632 * tokens // 8
  slots = 4 * tokens * 8

  def temporary(chunk_tokens):
    memory = compiled(tokens, chunk_tokens).memory_analysis()
    return memory.temp_size_in_bytes

  assert temporary(None) < 8 * slots < all_bits < temporary(tokens)


@pytest.mark.parametrize(
  ("sizes", "options", "message"),
  [
    ({}, {"align": 0}, "align=0 must be at least 1"),
    ({}, {"chunk_tokens": 0}, "chunk_tokens=0 must be at least 1"),
    (
      {"tokens": 2**24},
      {},
      "16777216 tokens of width 64 at align=1 need indices up to 2147483648 but"
      " the limit is 2147483647: transpose fewer tokens",
    ),
    ({"tokens": 2**23}, {"align": 2**28}, "at align=268435456 need indices"),
  ],
)
def test_refuses(sizes, options, message):
  shapes = shapes_of(**{"tokens": 8, "width": 64, "d_ff": 16} | sizes)
  with pytest.raises(ValueError, match=message) as error:
    jax.eval_shape(functools.partial(transpose_ell, **options), shapes)
  assert "\n" not in str(error.value)


def test_as_many_slots_as_32_bits_index():
  shapes = shapes_of(tokens=2**24 - 1, width=64, d_ff=16)
  lists = jax.eval_shape(transpose_ell, shapes)
  assert lists.slots.shape == (64 * (2**24 - 1),)


def test_refuses_values_of_another_shape():
  lists = transpose_ell(ell(np.zeros((3, 2)), np.ones(3), d_ff=4))
  with pytest.raises(ValueError, match=r"\(3, 3\) but must be \(3, 2\), a"):
    lists.from_ell(jnp.zeros((3, 3)))
  with pytest.raises(ValueError, match=r"\(5,\) but must be \(6,\), a value"):
    lists.to_ell(jnp.zeros(5))
