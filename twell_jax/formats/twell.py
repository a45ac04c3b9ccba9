"""TwELL, tile-wise ELLPACK: a sparse activation, packed per token and tile.

The d_ff neurons are cut into tiles of `tile_width`; the last may be ragged.
Each (token, tile) has `slots` slots for its active entries, and their count:

    d_ff = 10, tile_width = 4, slots = 3

               tile 0        tile 1        tile 2 (2 wide)
    token 0    0  5  0  7    0  0  0  0    0  9
    token 1    1  2  3  4    0  0  6  0    0  0

             values                 columns                counts
    token 0  5 7 · | · · · | 9 · ·  1 3 · | · · · | 1 · ·  2 | 0 | 1
    token 1  1 2 3 | 6 · · | · · ·  0 1 2 | 2 · · | · · ·  4 | 1 | 0

A column is the offset inside its tile, so that 16 bits do for any d_ff.
Columns ascend, and an unused slot (·) holds the value +0 and the column 0: one
activation has one packed form. A count is true also where it exceeds the slots:
token 1 has overflowed in tile 0, and its entry 4 is not stored.

Values and columns are [tokens, tiles, slots], counts [tokens, tiles]. A (token,
tile) takes slots · (2 + bytes of a value) + 4 bytes: at the default sizes (256
wide, 32 slots) 132 bytes in bfloat16, where the dense tile takes 512.

The layout is that of arXiv 2603.23198, with the count in an array of its own.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt16

from twell_jax.formats.bits import (
  is_active,
  nth_active,
  rows_pattern,
  to_bits,
  to_floats,
  unsigned_dtype,
)

_DTYPES = ("bfloat16", "float16", "float32", "float64")

# Columns are kept in 16 bits.
_MAX_TILE_WIDTH = 2**16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TwellMatrix:
  """A [tokens, d_ff] activation in TwELL, drawn in the module's docstring.

  A pytree of three arrays. Stacked by vmap or scan they get leading axes, and
  the properties hold for them too.

  Attributes:
    values: Active entries, ascending by column; +0 in unused slots.
    columns: Their offsets inside the tile; 0 in unused slots.
    counts: Active entries of each (token, tile), those not stored included.
    d_ff: Columns of the dense activation.
    tile_width: Columns of a tile.
  """

  values: Float[Array, "*stack tokens tiles slots"]
  columns: UInt16[Array, "*stack tokens tiles slots"]
  counts: Int32[Array, "*stack tokens tiles"]
  d_ff: int = dataclasses.field(metadata={"static": True})
  tile_width: int = dataclasses.field(metadata={"static": True})

  @classmethod
  def pack(
    cls,
    activation: Float[Array, "tokens d_ff"],
    *,
    tile_width: int = 256,
    slots: int = 32,
  ) -> "TwellMatrix":
    """Packs the active entries (`is_active`: positive or NaN), bit for bit.

    Args:
      activation: An activation, or the pre-activation z of a ReLU gate.
      tile_width: Columns of a tile, at most 65536.
      slots: Entries kept per (token, tile), at most tile_width, which never
        overflows.

    Raises:
      ValueError: An argument out of its bounds.
    """
    _check_activation(activation)
    _check_sizes(tile_width, slots)
    tokens, d_ff = activation.shape
    tiles = -(-d_ff // tile_width)
    bits = to_bits(activation)
    padding = ((0, 0), (0, tiles * tile_width - d_ff))
    tiled = (tokens * tiles, tile_width)
    active = jnp.pad(is_active(activation), padding).reshape(tiled)
    bits = jnp.pad(bits, padding).reshape(tiled)

    pattern = rows_pattern(active)
    rank = jnp.arange(slots, dtype=jnp.int32)[None]
    columns = nth_active(
      pattern, jnp.broadcast_to(rank, (tokens * tiles, slots))
    )
    values = jnp.take_along_axis(
      bits, columns, axis=1, mode="promise_in_bounds"
    )
    used = rank < pattern.counts[:, None]
    values = jnp.where(used, values, jnp.zeros_like(values))
    values = to_floats(values, activation.dtype)
    shape = (tokens, tiles, slots)
    return cls(
      values=values.reshape(shape),
      columns=columns.astype(jnp.uint16).reshape(shape),
      counts=pattern.counts.reshape(shape[:2]),
      d_ff=d_ff,
      tile_width=tile_width,
    )

  @property
  def slots(self) -> int:
    """Entries kept per (token, tile)."""
    return self.values.shape[-1]

  @property
  def overflow(self) -> Bool[Array, "*stack tokens tiles"]:
    """True where a (token, tile) has more active entries than slots."""
    return self.counts > self.slots

  @property
  def active(self) -> Int32[Array, "*stack tokens"]:
    """Active entries of each token, those not stored included."""
    return jnp.sum(self.counts, axis=-1, dtype=jnp.int32)

  @property
  def nbytes(self) -> int:
    """Bytes of the three arrays."""
    arrays = (self.values, self.columns, self.counts)
    return sum(array.size * array.dtype.itemsize for array in arrays)

  def to_dense(self) -> Float[Array, "tokens d_ff"]:
    """The dense activation: stored entries bit for bit, +0 elsewhere.

    A (token, tile) that overflowed has lost entries, so all of its columns are
    NaN in the token's row; `overflow` says where, and `validate` raises.
    """
    tokens, tiles, slots = self.values.shape
    rows = tokens * tiles
    bits = to_bits(self.values).reshape(rows, slots)
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    # Unused slots point past the tile, to different columns, and are dropped.
    columns = jnp.where(
      slot < self.counts.reshape(rows, 1),
      self.columns.astype(jnp.int32).reshape(rows, slots),
      self.tile_width + slot,
    )
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    dense = jnp.zeros((rows, self.tile_width), bits.dtype)
    dense = dense.at[row, columns].set(bits, mode="drop", unique_indices=True)
    nan = to_bits(jnp.array(jnp.nan, self.values.dtype))
    dense = jnp.where(self.overflow.reshape(rows, 1), nan, dense)
    dense = dense.reshape(tokens, tiles * self.tile_width)[:, : self.d_ff]
    return to_floats(dense, self.values.dtype)

  def validate(self) -> None:
    """Checks on the host that this is what `pack` makes, without overflow.

    Raises:
      ValueError: The first thing that does not hold, and where.
    """
    _check_sizes(self.tile_width, self.slots)
    _check_arrays(self)
    _check_contents(_on_host(self))


def _check_activation(activation: Array) -> None:
  if activation.ndim != 2 or activation.shape[1] == 0:
    raise ValueError(
      f"activation has shape {activation.shape} but must be [tokens, d_ff] with"
      " d_ff of at least 1: reshape leading axes to one"
    )
  if activation.dtype.name not in _DTYPES:
    raise ValueError(
      f"activation is {activation.dtype} but must be one of"
      f" {', '.join(_DTYPES)}: cast it"
    )


def _check_sizes(tile_width: int, slots: int) -> None:
  if not 1 <= tile_width <= _MAX_TILE_WIDTH:
    raise ValueError(
      f"{tile_width=} must be in 1..{_MAX_TILE_WIDTH}: columns are 16-bit"
      " offsets inside a tile"
    )
  if not 1 <= slots <= tile_width:
    raise ValueError(
      f"{slots=} must be in 1..{tile_width}, the width of a tile"
    )


def _check_arrays(matrix: TwellMatrix) -> None:
  """Shapes and dtypes."""
  if matrix.values.ndim != 3:
    raise ValueError(
      f"values has shape {matrix.values.shape} but must be [tokens, tiles,"
      " slots]: validate the matrices of a stack one by one"
    )
  tokens, tiles, slots = matrix.values.shape
  if matrix.d_ff < 1 or tiles != -(-matrix.d_ff // matrix.tile_width):
    raise ValueError(
      f"values has {tiles} tiles of {matrix.tile_width} columns, which do not"
      f" make d_ff={matrix.d_ff}: give d_ff and tile_width as they were packed"
    )
  for name, expected_shape, dtypes in (
    ("values", (tokens, tiles, slots), _DTYPES),
    ("columns", (tokens, tiles, slots), ("uint16",)),
    ("counts", (tokens, tiles), ("int32",)),
  ):
    array = getattr(matrix, name)
    if array.shape != expected_shape or array.dtype.name not in dtypes:
      raise ValueError(
        f"{name} is {array.dtype}{list(array.shape)} but must be"
        f" {' or '.join(dtypes)}{list(expected_shape)}: pack again"
      )


class _HostArrays(NamedTuple):
  """The contents on the host, with what all checks need of them."""

  bits: np.ndarray  # of the values
  columns: np.ndarray
  counts: np.ndarray
  used: np.ndarray  # bool, which slots hold an entry
  active: np.ndarray  # bool, which values are active
  widths: np.ndarray  # columns of each tile


def _on_host(matrix: TwellMatrix) -> _HostArrays:
  values, counts = np.asarray(matrix.values), np.asarray(matrix.counts)
  starts = np.arange(values.shape[1]) * matrix.tile_width
  return _HostArrays(
    bits=values.view(unsigned_dtype(values.dtype)),
    columns=np.asarray(matrix.columns).astype(np.int32),
    counts=counts,
    used=np.arange(matrix.slots) < counts[..., None],
    active=np.asarray(is_active(matrix.values)),
    widths=np.minimum(matrix.tile_width, matrix.d_ff - starts),
  )


def _check_contents(host: _HostArrays) -> None:
  widths = np.broadcast_to(host.widths, host.counts.shape)
  _check_everywhere(
    (host.counts >= 0) & (host.counts <= widths),
    "counts is {} but must be in 0..{}, the width of the tile",
    host.counts,
    widths,
  )
  _check_everywhere(
    ~host.used | (host.columns < widths[..., None]),
    "column {} is outside the tile, which is {} wide",
    host.columns,
    np.broadcast_to(widths[..., None], host.columns.shape),
  )
  before = np.pad(host.columns, ((0, 0), (0, 0), (1, 0)), constant_values=-1)
  before = before[..., :-1]
  _check_everywhere(
    ~host.used | (host.columns > before),
    "column {} does not ascend, after {} in the slot before",
    host.columns,
    before,
  )
  _check_everywhere(
    ~host.used | host.active,
    "the value of bits {:#x} is not active, neither positive nor NaN",
    host.bits,
  )
  _check_everywhere(
    host.used | ((host.columns == 0) & (host.bits == 0)),
    "the slot is unused but holds column {} and the value of bits {:#x}, not"
    " zeros",
    host.columns,
    host.bits,
  )
  slots = host.bits.shape[-1]
  overflowing = int(np.sum(host.counts > slots))
  if overflowing:
    raise ValueError(
      f"{overflowing} of {host.counts.size} tiles overflow {slots=} and have"
      f" lost entries: pack with slots={host.counts.max()}"
    )


def _check_everywhere(
  holds: np.ndarray, message: str, *shown: np.ndarray
) -> None:
  """Raises for the first place where it does not hold, with what is there."""
  if holds.all():
    return
  place = np.unravel_index(np.argmin(holds), holds.shape)
  where = ", ".join(
    f"{name} {index}" for name, index in zip(("token", "tile", "slot"), place)
  )
  found = message.format(*(array[place] for array in shown))
  raise ValueError(f"at {where}: {found}; pack again")
