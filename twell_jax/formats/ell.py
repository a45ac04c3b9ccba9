"""ELL: the active entries of each token in one row, made from TwELL.

The products that read rows of a matrix want the neurons of a token one after
the other, not tile by tile with gaps between. Compaction moves them there, and
makes their columns global:

    TwELL, tile_width = 4, slots = 2, tiles = 2          ELL, width = 4

    values  a b | c ·     columns  1 3 | 2 ·     ──►     values   a b c ·
    counts  2 | 1                                        columns  1 3 6 ·
                                                         counts   3

Every output slot finds its entry by itself: its tile is the number of tiles
that end at or before it. That is a gather without a scan over the slots, a
sort, or a scatter, and it needs no memory beyond its result.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from twell_jax.formats.bits import to_bits, to_floats
from twell_jax.formats.twell import TwellMatrix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EllMatrix:
  """A [tokens, d_ff] activation in ELL, drawn in the module's docstring.

  Attributes:
    values: Active entries, ascending by column; +0 in unused slots.
    columns: Their columns; 0 in unused slots.
    counts: Active entries of each token, true also where they are not stored.
    overflow: True for a token that has lost entries, because it has more than
      `width` or because a tile of the TwELL matrix had overflowed.
    d_ff: Columns of the dense activation.
  """

  values: Float[Array, "tokens width"]
  columns: Int32[Array, "tokens width"]
  counts: Int32[Array, "tokens"]
  overflow: Bool[Array, "tokens"]
  d_ff: int = dataclasses.field(metadata={"static": True})

  @classmethod
  def from_twell(cls, matrix: TwellMatrix, *, width: int) -> "EllMatrix":
    """Compacts a TwELL matrix; a token with overflow keeps no entry.

    Args:
      matrix: A matrix that is not stacked.
      width: Entries kept per token, at most d_ff, which never overflows.

    Raises:
      ValueError: A width out of its bounds.
    """
    if not 1 <= width <= matrix.d_ff:
      raise ValueError(
        f"{width=} must be in 1..{matrix.d_ff}, the d_ff of the matrix"
      )
    tokens, tiles, slots = matrix.values.shape
    ends = jnp.cumsum(matrix.counts, axis=1, dtype=jnp.int32)
    counts = ends[:, -1]
    overflow = jnp.any(matrix.overflow, axis=1) | (counts > width)

    rank = jnp.arange(width, dtype=jnp.int32)[None]
    # Small and static, so that the comparisons fuse into the gather: a table
    # of [tokens, width, tiles] is never made.
    tile = jnp.zeros((tokens, width), jnp.int32)
    for t in range(tiles - 1):
      tile += (ends[:, t, None] <= rank).astype(jnp.int32)
    starts = jnp.take_along_axis(
      ends - matrix.counts, tile, axis=1, mode="promise_in_bounds"
    )
    # Clipped where there is no entry: in unused slots and rows with overflow.
    slot = tile * slots + jnp.clip(rank - starts, 0, slots - 1)

    def take(array):
      flat = array.reshape(tokens, tiles * slots)
      return jnp.take_along_axis(flat, slot, axis=1, mode="promise_in_bounds")

    used = (rank < counts[:, None]) & ~overflow[:, None]
    bits = take(to_bits(matrix.values))
    values = jnp.where(used, bits, jnp.zeros_like(bits))
    columns = take(matrix.columns).astype(jnp.int32) + tile * matrix.tile_width
    return cls(
      values=to_floats(values, matrix.values.dtype),
      columns=jnp.where(used, columns, 0),
      counts=counts,
      overflow=overflow,
      d_ff=matrix.d_ff,
    )

  @property
  def width(self) -> int:
    """Entries kept per token."""
    return self.values.shape[-1]

  @property
  def stored(self) -> Int32[Array, "tokens"]:
    """Entries that each token has here: its count, or 0 if it overflowed."""
    return jnp.where(self.overflow, 0, self.counts)

  def to_dense(self) -> Float[Array, "tokens d_ff"]:
    """The dense activation, with +0 elsewhere; NaN in rows with overflow."""
    tokens, width = self.values.shape
    slot = jnp.arange(width, dtype=jnp.int32)[None]
    # Unused slots point past the row, to different columns, and are dropped.
    used = slot < self.stored[:, None]
    columns = jnp.where(used, self.columns, self.d_ff + slot)
    row = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    bits = to_bits(self.values)
    dense = jnp.zeros((tokens, self.d_ff), bits.dtype)
    dense = dense.at[row, columns].set(bits, mode="drop", unique_indices=True)
    nan = to_bits(jnp.array(jnp.nan, self.values.dtype))
    dense = jnp.where(self.overflow[:, None], nan, dense)
    return to_floats(dense, self.values.dtype)
