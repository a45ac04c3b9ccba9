"""The transposed pattern of an ELL matrix: for each neuron, its tokens.

A weight's gradient sums over the tokens of a neuron, where the forward pass
sums over the neurons of a token. Entries stay where they are in ELL; listed are
their flat slots, token · width + slot, by neuron, tokens ascending:

    width = 2     columns     flat slots
    token 0       1 3         0 1
    token 1       2 ·         2 ·
    token 2       1 2         4 5

    d_ff = 4, align = 2       neuron    0     1     2     3
                              slots           0 4 | 2 5 | 1 · | · ·
                              starts    0     0     2     4
                              counts    0     2     2     1

A kernel that takes several entries a step wants every list to start at a
multiple of their number, `align`; what is between the lists is unused (·).

The obvious way is a stable sort of all slots by neuron. But an entry's place in
its list is the number of earlier tokens of its neuron, which is a popcount:

    bits [d_ff, tokens / 32]   each entry adds its token's bit
    running                    tokens of the neuron up to each word, a cumsum
    rank                       those before the word, and those below the bit
    slots[start + rank] = flat slot    one scatter, to distinct places

The bits of a neuron are distinct powers of two, so that their sum does not
depend on the order of the additions. There is no sort, no sum of floats and
nothing that the host must know, shapes are static, and a neuron may have any
number of tokens. The same matrix gives the same lists.

The bits take d_ff / 8 bytes a token. They are made for a chunk of tokens at a
time, to which the counts of the chunks before are added: in bounded memory, and
on CPU faster for staying in its cache.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from twell_jax.formats.bits import Pattern, rank_of, to_bits, to_floats
from twell_jax.formats.ell import EllMatrix

# Bits that are held at a time, unless the caller says for how many tokens. With
# their running counts, which are as many, they fit the caches of a CPU core and
# the L2 of a GPU.
_CHUNK_BYTES = 2**22

_MAX_INDEX = 2**31 - 1


class NeuronLists(NamedTuple):
  """The entries of an ELL matrix by neuron, drawn in the module's docstring.

  The list of neuron n is slots[starts[n] : starts[n] + counts[n]].

  Attributes:
    slots: Flat slots in ELL, ascending in each list; tokens · width, one past
      the last, where unused. Their number is a multiple of `align`.
    starts: First place of each neuron's list, a multiple of `align`.
    counts: Tokens of each neuron.
    places: The inverse: where in `slots` each slot of ELL is; their number, one
      past the last, for slots without an entry.
  """

  slots: Int32[Array, "places"]
  starts: Int32[Array, "d_ff"]
  counts: Int32[Array, "d_ff"]
  places: Int32[Array, "tokens width"]

  @property
  def used(self) -> Bool[Array, "places"]:
    """Places that have an entry."""
    return self.slots < self.places.size

  @property
  def tokens(self) -> Int32[Array, "places"]:
    """The token of each place; 0, which may be read, in unused places."""
    width = self.places.shape[1]
    return jnp.where(self.used, self.slots // width, 0)

  def from_ell(
    self, values: Float[Array, "tokens width"]
  ) -> Float[Array, "places"]:
    """Values of ELL slots in the order of the lists; 0 in unused places.

    Bits are moved, so no gradient passes.

    Raises:
      ValueError: A shape other than that of the matrix.
    """
    if values.shape != self.places.shape:
      raise ValueError(
        f"values has shape {values.shape} but must be {self.places.shape}, a"
        " value for each slot of the matrix that was transposed"
      )
    return _take(values.reshape(-1), self.slots)

  def to_ell(
    self, values: Float[Array, "places"]
  ) -> Float[Array, "tokens width"]:
    """Values in the order of the lists, in ELL; 0 in slots without an entry.

    Bits are moved, so no gradient passes.

    Raises:
      ValueError: A shape other than that of `slots`.
    """
    if values.shape != self.slots.shape:
      raise ValueError(
        f"values has shape {values.shape} but must be {self.slots.shape}, a"
        " value for each place of the lists"
      )
    return _take(values, self.places)


def transpose_ell(
  matrix: EllMatrix, *, align: int = 1, chunk_tokens: int | None = None
) -> NeuronLists:
  """Lists the entries of each neuron.

  Args:
    matrix: A matrix that is not stacked, with distinct columns in each token.
      Tokens with overflow have no entries.
    align: What the starts of the lists are multiples of.
    chunk_tokens: Tokens whose bits are held at a time, which changes nothing
      but the memory; by default such that they take about 4 MiB.

  Raises:
    ValueError: A stack, an argument out of its bounds, or more slots than 32
      bits can index.
  """
  if matrix.columns.ndim != 2:
    raise ValueError(
      f"columns has shape {matrix.columns.shape} but must be [tokens, width]:"
      " transpose the matrices of a stack one by one"
    )
  tokens, width = matrix.columns.shape
  total = tokens * width
  for name, value in (("align", align), ("chunk_tokens", chunk_tokens)):
    if value is not None and value < 1:
      raise ValueError(f"{name}={value} must be at least 1")
  # At most align - 1 places are left after each list that is not empty, and all
  # lists together fill a multiple of align.
  num_places = total + min(total, matrix.d_ff) * (align - 1)
  num_places -= num_places % align
  if total + num_places > _MAX_INDEX:
    raise ValueError(
      f"{tokens} tokens of width {width} at {align=} need indices up to"
      f" {total + num_places} but the limit is {_MAX_INDEX}: transpose fewer"
      " tokens at a time, or a narrower matrix"
    )
  slot = jnp.arange(width, dtype=jnp.int32)[None]
  used = slot < matrix.stored[:, None]
  neuron = jnp.where(used, matrix.columns, 0)
  chunk_tokens = chunk_tokens or _default_chunk(matrix.d_ff)
  # Chunks are of equal size, so that few tokens are padded.
  chunks = max(1, -(-tokens // chunk_tokens))
  size = max(1, -(-tokens // chunks))
  ranks, chunk_counts = _ranks(neuron, used, matrix.d_ff, size)
  counts = jnp.sum(chunk_counts, axis=0, dtype=jnp.int32)
  room = (counts + (align - 1)) // align * align
  starts = jnp.cumsum(room, dtype=jnp.int32) - room

  # Where the list of each neuron goes on with the tokens of each chunk.
  before = jnp.cumsum(chunk_counts, axis=0, dtype=jnp.int32) - chunk_counts
  first = starts[None] + before
  chunk = jnp.arange(tokens, dtype=jnp.int32)[:, None] // size
  chunk = jnp.broadcast_to(chunk, neuron.shape)
  place = first.at[chunk, neuron].get(mode="promise_in_bounds") + ranks
  flat = jnp.arange(total, dtype=jnp.int32).reshape(tokens, width)
  # Slots without an entry are dropped, each from a place of its own.
  slots = jnp.full((num_places,), total, jnp.int32)
  slots = slots.at[jnp.where(used, place, num_places + flat)].set(
    flat, mode="drop", unique_indices=True
  )
  places = jnp.where(used, place, num_places)
  return NeuronLists(slots, starts, counts, places)


def _default_chunk(d_ff: int) -> int:
  """Tokens whose bits take no more than a chunk may."""
  return 32 * max(1, _CHUNK_BYTES // 4 // d_ff)


class _Ranks(NamedTuple):
  """Where entries are in the lists, those of one chunk beginning at 0."""

  ranks: Int32[Array, "*chunks tokens width"]
  counts: Int32[Array, "*chunks d_ff"]


def _ranks(
  neuron: Int32[Array, "tokens width"],
  used: Bool[Array, "tokens width"],
  d_ff: int,
  size: int,
) -> _Ranks:
  """Ranks of all entries inside their chunk of that size, and its counts."""
  tokens, width = neuron.shape
  chunks = max(1, -(-tokens // size))
  padded = chunks * size

  def cut(array):
    array = jnp.pad(array, ((0, padded - tokens), (0, 0)))
    return array.reshape(chunks, size, width)

  def chunk_ranks(chunk):
    chunk_neuron, chunk_used = chunk
    return _chunk_ranks(chunk_neuron, chunk_used, d_ff)

  # One after the other, in the memory of one.
  ranks, counts = lax.map(chunk_ranks, (cut(neuron), cut(used)))
  return _Ranks(ranks.reshape(padded, width)[:tokens], counts)


def _chunk_ranks(
  neuron: Int32[Array, "tokens width"],
  used: Bool[Array, "tokens width"],
  d_ff: int,
) -> _Ranks:
  """The ranks among these tokens."""
  token = jnp.arange(neuron.shape[0], dtype=jnp.int32)[:, None]
  token = jnp.broadcast_to(token, neuron.shape)
  bit = jnp.left_shift(jnp.uint32(1), (token % 32).astype(jnp.uint32))
  words = jnp.zeros((d_ff, max(1, -(-neuron.shape[0] // 32))), jnp.uint32)
  words = words.at[jnp.where(used, neuron, d_ff), token // 32].add(
    bit, mode="drop"
  )
  ones = lax.population_count(words).astype(jnp.int32)
  pattern = Pattern(words, jnp.cumsum(ones, axis=1, dtype=jnp.int32))
  return _Ranks(rank_of(pattern, neuron, token), pattern.counts)


def _take(
  values: Float[Array, "values"], index: Int32[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Values at the index, bit for bit; 0 where it is beyond the last."""
  bits = to_bits(values).at[index].get(mode="fill", fill_value=0)
  return to_floats(bits, values.dtype)
