"""Activity patterns as bit words: which neurons are active, and the n-th one.

The pattern of R rows with C columns is kept as uint32 words [R, ceil(C / 32)]
and the running count of active columns after each word. Rank → column is then a
binary search over the running counts and a five-step select inside one word: no
sort, no `nonzero`, no capacity, ascending columns.

    row    0 1 0 0 1 … (32 columns) | 1 0 … | …      one bit per column
    words  0b…10010                 | 0b…01 | …
    running count   2               |   3   | …      rank 2 → word 1, bit 0

`rows_pattern` reads an activation along its rows (column = 32·word + bit).
`columns_pattern` makes the pattern of its columns of those words, for the
transposed products; there bit b of word w is row b·words + w, so that all bits
of a word come from the same place of whole rows.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt, UInt32

# Indices made here are in range by construction.
_TRUSTED = "promise_in_bounds"


def is_active(z: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
  """True where a gate pre-activation lets its neuron work: z > 0 or NaN.

  NaN is active so that it reaches the output as in the dense layer. The test
  reads bits, because XLA:CPU takes subnormal numbers for zero in comparisons: a
  positive subnormal z is active on every platform, and −0.0 is not.
  """
  float_bits = jnp.finfo(z.dtype).bits
  bits = lax.bitcast_convert_type(z, jnp.dtype(f"int{float_bits}"))
  infinity = lax.bitcast_convert_type(jnp.array(jnp.inf, z.dtype), bits.dtype)
  magnitude = bits & jnp.array(jnp.iinfo(bits.dtype).max, bits.dtype)
  return (bits > 0) | (magnitude > infinity)


class Pattern(NamedTuple):
  """Bit words of R rows and the running count of active columns after each.

  A row's running count never decreases and ends with the row's total.
  """

  words: UInt32[Array, "rows words"]
  running: Int32[Array, "rows words"]

  @property
  def counts(self) -> Int32[Array, "rows"]:
    """Active columns of each row."""
    return self.running[:, -1]


def make_pattern(words: UInt32[Array, "rows words"]) -> Pattern:
  """The pattern that has these words."""
  ones = lax.population_count(words).astype(jnp.int32)
  return Pattern(words, jnp.cumsum(ones, axis=1))


def pack(active: Bool[Array, "rows columns"]) -> UInt32[Array, "rows words"]:
  """A bit for each column: column = 32·word + bit, unused bits 0."""
  rows, columns = active.shape
  num_words = -(-columns // 32)
  padded = jnp.pad(active, ((0, 0), (0, 32 * num_words - columns)))
  bits = jnp.left_shift(jnp.uint32(1), jnp.arange(32, dtype=jnp.uint32))
  spread = padded.reshape(rows, num_words, 32)
  words = jnp.where(spread, bits[None, None], jnp.uint32(0))
  return jnp.sum(words, axis=-1, dtype=jnp.uint32)


def rows_pattern(active: Bool[Array, "rows columns"]) -> Pattern:
  """Pattern of the rows; column = 32·word + bit."""
  return make_pattern(pack(active))


def unpack(
  words: UInt32[Array, "rows words"], columns: int
) -> Bool[Array, "rows columns"]:
  """What was packed, of so many columns."""
  bit = jnp.arange(32, dtype=jnp.uint32)[None, None]
  spread = (words[:, :, None] >> bit) & jnp.uint32(1)
  return spread.reshape(words.shape[0], -1)[:, :columns] != 0


def without_first(
  words: UInt32[Array, "rows words"], columns: int
) -> UInt32[Array, "rows words"]:
  """The words with the bits of the first so many columns cleared."""
  if columns == 0:
    return words
  kept = np.arange(32 * words.shape[1]).reshape(-1, 32) >= columns
  mask = np.packbits(kept, axis=1, bitorder="little").view("<u4")
  return words & jnp.asarray(mask.reshape(1, -1), jnp.uint32)


def columns_pattern(
  words: UInt32[Array, "rows words"], columns: int
) -> Pattern:
  """Pattern of the columns: one row of words for each of so many columns.

  Row r of what was packed is bit r // num_words of word r % num_words.
  """
  rows, row_words = words.shape
  num_words = -(-rows // 32)
  padded = jnp.pad(words, ((0, 32 * num_words - rows), (0, 0)))
  slabs = padded.reshape(32, num_words, row_words)
  column_bit = jnp.arange(32, dtype=jnp.uint32)[None, None]
  by_column = jnp.zeros((num_words, row_words, 32), jnp.uint32)
  for bit in range(32):
    ones = (slabs[bit][:, :, None] >> column_bit) & jnp.uint32(1)
    by_column |= ones << jnp.uint32(bit)
  by_column = by_column.reshape(num_words, -1)[:, :columns]
  # Without the barrier XLA:CPU computes the words again for each element of
  # the transposed array.
  return make_pattern(lax.optimization_barrier(by_column).T)


def nth_active(
  pattern: Pattern,
  rank: Int32[Array, "rows ranks"],
  *,
  word_stride: int = 32,
  bit_stride: int = 1,
) -> Int32[Array, "rows ranks"]:
  """Columns of the given ranks (0 is the first active one) in each row.

  Args:
    pattern: The rows' pattern.
    rank: Ranks wanted in each row; the answer is 0 where the row has fewer.
    word_stride: Columns between the same bit of two neighbouring words.
    bit_stride: Columns between two neighbouring bits of one word.
  """
  words, running = pattern
  num_words = words.shape[1]
  index = jnp.zeros(rank.shape, jnp.int32)
  step = 1 << (num_words.bit_length() - 1)
  while step:
    after = index + step
    total = jnp.take_along_axis(
      running, jnp.minimum(after, num_words) - 1, axis=1, mode=_TRUSTED
    )
    index = jnp.where((after <= num_words) & (total <= rank), after, index)
    step >>= 1
  index = jnp.minimum(index, num_words - 1)
  word = jnp.take_along_axis(words, index, axis=1, mode=_TRUSTED)
  before = jnp.take_along_axis(
    running, index, axis=1, mode=_TRUSTED
  ) - lax.population_count(word).astype(jnp.int32)
  column = index * word_stride + _nth_set_bit(word, rank - before) * bit_stride
  return jnp.where(rank < pattern.counts[:, None], column, 0)


def rank_of(
  pattern: Pattern,
  row: Int32[Array, "*shape"],
  column: Int32[Array, "*shape"],
) -> Int32[Array, "*shape"]:
  """Active columns before `column` in `row`, of a pattern of `rows_pattern`.

  The inverse of `nth_active`: the rank of an active column.
  """
  word, bit = column // 32, (column % 32).astype(jnp.uint32)
  bits = pattern.words.at[row, word].get(mode=_TRUSTED)
  not_before = lax.population_count(bits >> bit).astype(jnp.int32)
  return pattern.running.at[row, word].get(mode=_TRUSTED) - not_before


def _nth_set_bit(
  word: UInt32[Array, "*shape"], rank: Int32[Array, "*shape"]
) -> Int32[Array, "*shape"]:
  """Position of the set bit of that rank: halves of the word, by popcount."""
  position = jnp.zeros(word.shape, jnp.int32)
  for width in (16, 8, 4, 2, 1):
    low = word & jnp.uint32((1 << width) - 1)
    ones = lax.population_count(low).astype(jnp.int32)
    above = rank >= ones
    rank = jnp.where(above, rank - ones, rank)
    word = jnp.where(above, word >> width, word)
    position = jnp.where(above, position + width, position)
  return position


def unsigned_dtype(dtype: np.dtype) -> np.dtype:
  """The unsigned integers of the size of a float."""
  return np.dtype(f"uint{jnp.finfo(dtype).bits}")


def to_bits(values: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
  """The bits of floats, for moving them.

  Where XLA:CPU selects among 16-bit floats, it may convert them to float32 and
  back, which flushes subnormal numbers.
  """
  return lax.bitcast_convert_type(values, unsigned_dtype(values.dtype))


def to_floats(
  bits: UInt[Array, "*shape"], dtype: np.dtype
) -> Float[Array, "*shape"]:
  """The floats of these bits."""
  # Without the barrier LLVM folds the bitcasts at both ends of a fusion, and
  # what is between them works on floats again.
  return lax.bitcast_convert_type(lax.optimization_barrier(bits), dtype)


def chosen_entries(
  chosen: Bool[Array, "#*shape"], values: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """The chosen values, bit for bit, and +0 elsewhere."""
  bits = to_bits(values)
  return to_floats(jnp.where(chosen, bits, jnp.zeros_like(bits)), values.dtype)
