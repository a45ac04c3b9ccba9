"""The instructions of a lane program.

Pallas writes a kernel in terms of whole arrays. An epilogue that packs what is
active needs more: per-thread control flow, shuffles, addressed stores. Such a
piece is written as a lane program, a plain function of a `Lanes`:

    def double_the_odd(lanes):
      odd = lanes.nonzero(lanes.and_(lanes.thread, 1))
      value = lanes.load_half(lanes.address("input"))
      ...

Its values are "lane values", one number in each of the 128 threads ("lanes") of
a warpgroup. The program is written once and has two backends:

    NumpyLanes (lanes_numpy.py)  a lane value is an array [128]; runs at once,
                                 in interpret mode through a callback
    MlirLanes (lanes_mlir.py)    a lane value is an MLIR value; emits the
                                 device's instructions, one for each method
                                 unless the method says otherwise

So interpret mode runs the same program that the device does, and a program's
instructions can be counted. What remains, that the emitted instructions mean
what numpy computes, is tested by interpreting the emitted MLIR.

A warpgroup's accumulator of a 64-row wgmma is spread over its lanes so: warp w
holds rows 16w to 16w + 15; its lane l holds, of rows 16w + l/4 ("half" 0) and
16w + 8 + l/4 ("half" 1), the columns 8g + 2(l%4) and the next one, for every
group g of 8 columns. The four lanes with the same l/4 are called a quad.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

LANES = 128
WARP = 32

# The backend's representation of one number per lane: a 32-bit integer (Word)
# or a truth value (Flag). Where a Word is taken, a Python int does as well.
Word = Any
Flag = Any


class Lanes(abc.ABC):
  """What a lane program may do.

  Arithmetic is that of 32-bit unsigned integers and wraps around. Inside a
  loop only the lanes take part whose condition holds; shuffles, matrix stores
  and `sync_warp` are for all lanes together and must stay outside of loops.

  Attributes:
    thread: The lane's number in the warpgroup, 0..127.
  """

  thread: Word

  @abc.abstractmethod
  def rounded_pair(self, *, half: int, group: int) -> Word:
    """The lane's two accumulators of a row half and column group, in bfloat16.

    The even column is in the low 16 bits. Rounded to nearest, ties to even;
    subnormals are kept, what is too large becomes infinite, every NaN 0x7FFF.
    """

  @abc.abstractmethod
  def add(self, a: Word, b: Word) -> Word:
    """Wrapping sum."""

  @abc.abstractmethod
  def multiply_add(self, a: Word, b: Word, c: Word) -> Word:
    """The low 32 bits of a·b + c."""

  @abc.abstractmethod
  def and_(self, a: Word, b: Word) -> Word:
    """Bits in both."""

  @abc.abstractmethod
  def shift_left(self, a: Word, bits: int) -> Word:
    """Towards the high bits, by 0..31."""

  @abc.abstractmethod
  def shift_right(self, a: Word, bits: int) -> Word:
    """Towards the low bits, by 0..31, zeros entering."""

  @abc.abstractmethod
  def rotate_left(self, a: Word, bits: Word) -> Word:
    """Towards the high bits, by 0..31; what leaves enters at the low end."""

  @abc.abstractmethod
  def blend(self, a: Word, b: Word, mask: Word) -> Word:
    """Bits of a where the mask's are set, bits of b elsewhere."""

  @abc.abstractmethod
  def xor_and(self, a: Word, b: Word, mask: Word) -> Word:
    """Bits of the mask in which a and b differ."""

  @abc.abstractmethod
  def xor(self, a: Word, b: Word) -> Word:
    """Bits set in exactly one."""

  @abc.abstractmethod
  def xor3(self, a: Word, b: Word, c: Word) -> Word:
    """Bits set in an odd number of the three."""

  @abc.abstractmethod
  def permute_bytes(self, a: Word, b: Word, selector: int) -> Word:
    """Four of the eight bytes of a (0 to 3, lowest first) and b (4 to 7).

    Hexadecimal digit i of the selector, lowest first, names byte i's source.
    """

  @abc.abstractmethod
  def positive_halves(self, a: Word) -> Word:
    """For each 16-bit half: 1 if it is positive as a signed integer, else 0.

    Of two bfloat16 these are the active ones, if their NaNs have no sign: +0,
    -0 and negatives are no positive integers.
    """

  @abc.abstractmethod
  def count_ones(self, a: Word) -> Word:
    """The number of bits set."""

  @abc.abstractmethod
  def lowest_one(self, a: Word) -> Word:
    """The position of the lowest bit set, a not being 0. Two instructions."""

  @abc.abstractmethod
  def nonzero(self, a: Word) -> Flag:
    """Whether a is not 0."""

  @abc.abstractmethod
  def less(self, a: Word, b: Word) -> Flag:
    """Whether a < b, unsigned."""

  @abc.abstractmethod
  def both(self, a: Flag, b: Flag) -> Flag:
    """Whether both hold."""

  @abc.abstractmethod
  def select(self, flag: Flag, a: Word, b: Word) -> Word:
    """The value a where the flag holds, b elsewhere."""

  @abc.abstractmethod
  def shuffle_xor(self, a: Word, distance: int) -> Word:
    """The value that lane `thread ^ distance` has in a; distance below 32."""

  @abc.abstractmethod
  def address(self, buffer: str) -> Word:
    """Where a buffer begins in shared memory, in bytes; no instruction."""

  @abc.abstractmethod
  def load_half(self, address: Word) -> Word:
    """The 16 bits at an even address, zero-extended."""

  @abc.abstractmethod
  def store_word(
    self, address: Word, value: Word, *, only: Flag | None = None
  ) -> None:
    """Stores 32 bits at a multiple of 4, in the lanes where `only` holds."""

  @abc.abstractmethod
  def store_zeros(self, address: Word, *, offset: int) -> None:
    """Stores 16 zero bytes at address + offset, a multiple of 16."""

  @abc.abstractmethod
  def store_matrices(self, address: Word, values: Sequence[Word]) -> None:
    """Stores four 8 x 8 matrices of 16-bit elements, in each warp.

    Element (l/4, 2(l%4)) of matrix k and its right neighbour are in lane l of
    values[k]. Lane 8k + r says where row r of matrix k goes: 16 bytes at a
    multiple of 16.
    """

  @abc.abstractmethod
  def sync_warp(self) -> None:
    """Waits for the warp's lanes and makes their stores visible to them."""

  @abc.abstractmethod
  def loop(
    self,
    condition: Callable[..., Flag],
    body: Callable[..., tuple[Word, ...]],
    *state: Word,
  ) -> None:
    """Repeats `state = body(*state)` while `condition(*state)`, in each lane.

    A warp goes on until the condition holds in none of its lanes. Each trip
    and the check that ends the loop take a branch besides.
    """
