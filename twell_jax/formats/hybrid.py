"""Hybrid: ELL for the many tokens with few active neurons, rows for the few.

Activations have long tails: the most active token has ten or twenty times the
mean. An ELL row as wide as that would be mostly empty, so the rows are of a
moderate width, and tokens that do not fit have a whole row of their own:

    width = 3, dense_rows = 1, d_ff = 6

               activation       ELL values  columns   counts   slot of token
    token 0    0 5 0 7 0 0      5 7 ·       1 3 ·     2        -1
    token 1    1 2 3 4 0 9      · · ·       · · ·     5         0
    token 2    0 0 0 6 0 0      6 · ·       3 · ·     1        -1
    token 3    4 4 4 4 4 4      · · ·       · · ·     6        -1, overflow

               dense                                           token of slot
    slot 0     1 2 3 4 0 9                                     1

Tokens get the dense rows in their order. One for which none is left (token 3)
has lost its entries; `overflow` says so, and who uses the matrix computes it
again, in blocks of a bounded size (`RowMap.choose`).

A dense row holds the token's active values and +0 elsewhere, bit for bit. It is
made from the values themselves, never from a packed form that has lost some.
Unused dense rows are +0. So one activation has one hybrid form, and a product
over all rows needs no masks.

At 16384 tokens, a width of 128, 2048 dense rows and d_ff = 5632 in bfloat16
that is 12.7 + 23.1 MB, where the dense activation takes 184.5. `capacities`
chooses both sizes from measured activity.

Bits are moved, so no gradient passes through these functions: they are made for
the inside of a custom_vjp.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from twell_jax.formats.bits import (
  chosen_entries,
  is_active,
  to_bits,
  to_floats,
)
from twell_jax.formats.ell import EllMatrix
from twell_jax.formats.twell import TwellMatrix

# A tile of TwELL has at most that many columns.
_MAX_TILE_WIDTH = 2**16


class RowMap(NamedTuple):
  """Which token has which slot, of a number of slots for a few of the tokens.

  Attributes:
    tokens: The token of each slot, ascending; -1 in unused slots, which come
      last.
    slots: The slot of each token; -1 if it has none.
  """

  tokens: Int32[Array, "*stack slots"]
  slots: Int32[Array, "*stack tokens"]

  @classmethod
  def choose(
    cls,
    wanted: Bool[Array, "tokens"],
    *,
    capacity: int,
    first: int | Int32[Array, ""] = 0,
  ) -> "RowMap":
    """Gives the wanted tokens slots, in their order, from the `first` one on.

    Any number of wanted tokens is served in bounded memory by a loop whose step
    i takes first = i · capacity, on device.

    Args:
      wanted: Tokens that want a slot.
      capacity: Slots that there are.
      first: How many of the wanted tokens to pass over.

    Raises:
      ValueError: A negative capacity.
    """
    if capacity < 0:
      raise ValueError(f"{capacity=} must be at least 0, the number of slots")
    tokens = wanted.shape[0]
    # Wanted tokens before this one, less those passed over.
    slot = jnp.cumsum(wanted, dtype=jnp.int32) - 1 - first
    served = wanted & (slot >= 0) & (slot < capacity)
    token = jnp.arange(tokens, dtype=jnp.int32)
    # Distinct places beyond the end for the others, which are dropped.
    place = jnp.where(served, slot, capacity + token)
    slots = jnp.full((capacity,), -1, jnp.int32)
    return cls(
      tokens=slots.at[place].set(token, mode="drop", unique_indices=True),
      slots=jnp.where(served, slot, -1),
    )

  @property
  def used(self) -> Bool[Array, "*stack slots"]:
    """Slots that have a token."""
    return self.tokens >= 0

  def take(
    self, array: Shaped[Array, "tokens *rest"]
  ) -> Shaped[Array, "slots *rest"]:
    """What the array has for the token of each slot; 0 in unused slots.

    Raises:
      ValueError: The array is not of that many tokens.
    """
    self._check_tokens(array)

    def move(array):
      return array.at[self._places()].get(mode="fill", fill_value=0)

    return _by_bits(move, array)

  def put(
    self,
    array: Shaped[Array, "tokens *rest"],
    values: Shaped[Array, "slots *rest"],
  ) -> Shaped[Array, "tokens *rest"]:
    """The array with the values of the slots at their tokens.

    Raises:
      ValueError: A shape or dtype does not fit.
    """
    self._check_tokens(array)
    expected = (self.tokens.shape[0], *array.shape[1:])
    if values.shape != expected or values.dtype != array.dtype:
      raise ValueError(
        f"values is {values.dtype}{list(values.shape)} but must be"
        f" {array.dtype}{list(expected)}, a row of the array for each slot"
      )

    def move(array, values):
      place = self._places()
      return array.at[place].set(values, mode="drop", unique_indices=True)

    return _by_bits(move, array, values)

  def _places(self) -> Int32[Array, "slots"]:
    """The tokens; distinct ones beyond the last for unused slots."""
    # Not -1, which an index would count from the end.
    slot = jnp.arange(self.tokens.shape[0], dtype=jnp.int32)
    return jnp.where(self.used, self.tokens, self.slots.shape[0] + slot)

  def _check_tokens(self, array: Array) -> None:
    tokens = self.slots.shape[0]
    if array.ndim == 0 or array.shape[0] != tokens:
      raise ValueError(
        f"the array has shape {array.shape} but must be of {tokens} tokens, the"
        " first axis: give the array of the tokens that were chosen from"
      )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HybridMatrix:
  """A [tokens, d_ff] activation in hybrid form, drawn in the docstring above.

  A pytree of arrays. Stacked by scan they get leading axes, and the properties
  hold for them too.

  Attributes:
    ell: The tokens that fit. `ell.overflow` is true for all others, and
      `ell.counts` is that of every token.
    dense: Active values of tokens that do not; +0 elsewhere.
    rows: Which token has which dense row.
  """

  ell: EllMatrix
  dense: Float[Array, "*stack dense_rows d_ff"]
  rows: RowMap

  @classmethod
  def pack(
    cls, activation: Float[Array, "tokens d_ff"], *, width: int, dense_rows: int
  ) -> "HybridMatrix":
    """Packs the active entries (`is_active`: positive or NaN), bit for bit.

    Args:
      activation: An activation, or the pre-activation z of a ReLU gate.
      width: Entries kept per token in ELL, at most d_ff, which never overflows.
      dense_rows: Tokens with more that are kept, at most all.

    Raises:
      ValueError: An argument out of its bounds.
    """
    d_ff = activation.shape[-1] if activation.ndim else 0
    # One tile, or so wide ones that none overflows where the row does not. A
    # width out of bounds is refused below, with the right name.
    tile_width = max(1, min(d_ff, _MAX_TILE_WIDTH))
    slots = max(1, min(width, tile_width))
    matrix = TwellMatrix.pack(activation, tile_width=tile_width, slots=slots)
    return cls.from_twell(
      matrix,
      lambda rows: rows.take(activation),
      width=width,
      dense_rows=dense_rows,
    )

  @classmethod
  def from_twell(
    cls,
    matrix: TwellMatrix,
    gate_rows: Callable[[RowMap], Float[Array, "dense_rows d_ff"]],
    *,
    width: int,
    dense_rows: int,
  ) -> "HybridMatrix":
    """Compacts a TwELL matrix, and fills dense rows where it has lost entries.

    Args:
      matrix: A matrix that is not stacked.
      gate_rows: As for `from_ell`.
      width: Entries kept per token in ELL.
      dense_rows: Tokens that are kept besides.

    Raises:
      ValueError: An argument out of its bounds.
    """
    ell = EllMatrix.from_twell(matrix, width=width)
    return cls.from_ell(ell, gate_rows, dense_rows=dense_rows)

  @classmethod
  def from_ell(
    cls,
    ell: EllMatrix,
    gate_rows: Callable[[RowMap], Float[Array, "dense_rows d_ff"]],
    *,
    dense_rows: int,
  ) -> "HybridMatrix":
    """Adds dense rows to an ELL matrix, for the tokens with overflow.

    Args:
      ell: A matrix that is not stacked.
      gate_rows: Gives the values of the chosen tokens, exact and of the dtype
        of the matrix: `lambda rows: rows.take(z)`, or, where z is not at hand,
        `lambda rows: rows.take(x) @ gate.T`. What is not active does not
        matter, nor what is in unused slots. Not called for 0 dense rows.
      dense_rows: Tokens that dense rows are kept for, at most all.

    Raises:
      ValueError: An argument out of its bounds, or gate_rows gives something
        of another shape or dtype.
    """
    tokens = ell.counts.shape[0]
    if not 0 <= dense_rows <= tokens:
      raise ValueError(
        f"{dense_rows=} must be in 0..{tokens}, the number of tokens"
      )
    rows = RowMap.choose(ell.overflow, capacity=dense_rows)
    if dense_rows == 0:
      dense = jnp.zeros((0, ell.d_ff), ell.values.dtype)
      return cls(ell=ell, dense=dense, rows=rows)
    values = gate_rows(rows)
    expected = (dense_rows, ell.d_ff)
    if values.shape != expected or values.dtype != ell.values.dtype:
      raise ValueError(
        f"gate_rows gave {values.dtype}{list(values.shape)} but must give"
        f" {ell.values.dtype}{list(expected)}, the values of the chosen tokens"
      )
    active = is_active(values) & rows.used[:, None]
    # Counted again: computed in another order, z may round to another sign.
    counts = jnp.sum(active, axis=1, dtype=jnp.int32)
    return cls(
      ell=dataclasses.replace(ell, counts=rows.put(ell.counts, counts)),
      dense=chosen_entries(active, values),
      rows=rows,
    )

  @property
  def d_ff(self) -> int:
    """Columns of the dense activation."""
    return self.ell.d_ff

  @property
  def width(self) -> int:
    """Entries kept per token in ELL."""
    return self.ell.width

  @property
  def dense_rows(self) -> int:
    """Dense rows that there are, used or not."""
    return self.dense.shape[-2]

  @property
  def counts(self) -> Int32[Array, "*stack tokens"]:
    """Active entries of each token, true also where they are not stored."""
    return self.ell.counts

  @property
  def overflow(self) -> Bool[Array, "*stack tokens"]:
    """True for a token that has lost entries: no ELL row, and no dense one."""
    return self.ell.overflow & (self.rows.slots < 0)

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self))

  def to_dense(self) -> Float[Array, "tokens d_ff"]:
    """The dense activation, with +0 elsewhere; NaN in rows with overflow."""
    return self.rows.put(self.ell.to_dense(), self.dense)


def active_entries(z: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """The active entries of z, bit for bit, and +0 elsewhere."""
  return chosen_entries(is_active(z), z)


def _by_bits(move: Callable[..., Array], *arrays: Array) -> Array:
  """What `move` makes of arrays of one dtype, bits of floats kept."""
  dtype = arrays[0].dtype
  if not jnp.issubdtype(dtype, jnp.floating):
    return move(*arrays)
  return to_floats(move(*map(to_bits, arrays)), dtype)
