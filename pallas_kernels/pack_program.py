"""The lane program that packs a warpgroup's accumulator as TwELL.

It takes 64 rows of z = x·gateᵀ from the registers of a wgmma and leaves, in
shared memory, for each row and TwELL tile the words of its active columns,
ascending, zeros in the slots that are left, and their true count. A word is a
bfloat16 value in the high 16 bits over the column's offset inside the tile.

Active are few of the columns, 1.4 of 256 at 30 of 5632, so what is done for all
of them is kept to three instructions and a quarter for two columns, and only
active ones cost more. The tile is taken in blocks of 64 columns:

 1. Each lane rounds its 16 pairs of the block (8 groups, 2 rows) to bfloat16
    and stores them row by row in the `stage`, where they can be addressed.
 2. It turns each pair into two bits, "active", and gathers the 32 bits of the
    block in one word, bit 16·(odd) + 8·(g & 1) + 4·(g >> 2) + 2·(half)
    + (g >> 1 & 1) for column group g. (Two bits of one instruction are 16
    apart; the rest of the order is chosen so that 3 and 4 come out right.)
 3. The quad has the block of two rows, 128 columns, scattered over its four
    lanes. Two exchanges, with the neighbour and with the next pair of lanes,
    give each lane 32 consecutive columns of one row: lane 2·s + h of a quad
    gets columns 32s to 32s + 31 of its row in half h. An exchange swaps a bit
    of the lane number with a bit of the position in the word.
 4. Swapping the bit for "odd" with the lowest bit of the position sorts the
    word by column.
 5. Counts of ones, exchanged with the other lane of the row, say where in the
    row's slots each lane begins. It then walks the ones of its word: value from
    the stage, word to the row's slots, until it or the slots are at an end.

A row never leaves its quad, so all of it needs the warp's lanes to wait for
each other, never the warpgroup.
"""

from typing import NamedTuple

import numpy as np

from pallas_kernels.lanes import WARP, Flag, Lanes, Word
from pallas_kernels.lanes_numpy import NumpyLanes

# Rows of a warpgroup's accumulator.
ROWS = 64
BLOCK = 64
# The stage: a row of the block after the other, of eight units of 16 bytes.
# Unit u of row r is at place u ^ r % 8, so that the eight rows of a matrix, one
# unit each, are stored to different banks.
_PITCH = 2 * BLOCK
STAGE_BYTES = ROWS * _PITCH


class PackShape(NamedTuple):
  """What is packed, in columns and slots.

  Attributes:
    columns: Of the accumulator, a multiple of tile_width.
    tile_width: Of a TwELL tile, a multiple of 64.
    slots: Of each row and tile, a multiple of 8.
  """

  columns: int
  tile_width: int
  slots: int

  @property
  def tiles(self) -> int:
    """TwELL tiles."""
    return self.columns // self.tile_width

  @property
  def row_slots(self) -> int:
    """Slots of a row, over all tiles."""
    return self.tiles * self.slots

  @property
  def buffer_bytes(self) -> dict[str, int]:
    """Shared memory of a warpgroup, by buffer.

    words: i32 [64, tiles, slots]; counts: i32 [tiles, 64]; stage: bfloat16
    [64, 64], units permuted.
    """
    return {
      "words": ROWS * self.row_slots * 4,
      "counts": self.tiles * ROWS * 4,
      "stage": STAGE_BYTES,
    }


class Packed(NamedTuple):
  """What a warpgroup packs.

  Attributes:
    words: int32 [64, tiles · slots].
    counts: int32 [tiles, 64].
  """

  words: np.ndarray
  counts: np.ndarray


def pack(lanes: Lanes, shape: PackShape) -> None:
  """The lane program; reads the accumulator, fills the buffers of the shape."""
  place = _place(lanes)
  first_word = lanes.multiply_add(
    place.row, shape.row_slots * 4, lanes.address("words")
  )
  first_count = lanes.multiply_add(place.row, 4, lanes.address("counts"))
  _clear_words(lanes, shape)
  for tile in range(shape.tiles):
    count: Word = 0
    slots = lanes.add(first_word, tile * shape.slots * 4)
    end_of_slots = lanes.add(slots, shape.slots * 4)
    for column in range(0, shape.tile_width, BLOCK):
      group = (tile * shape.tile_width + column) // 8
      if group:
        # The stage's last block may still be read.
        lanes.sync_warp()
      mask = _stage_and_find_active(lanes, place, first_group=group)
      # The stage can be read, and the words have been cleared.
      lanes.sync_warp()
      own = lanes.count_ones(mask)
      others = lanes.shuffle_xor(own, 2)
      before = lanes.add(count, lanes.select(place.is_first_part, 0, others))
      count = lanes.add(count, lanes.add(own, others))
      _walk(
        lanes,
        mask,
        column=lanes.add(place.column, column),
        stage=place.load,
        slot=lanes.multiply_add(before, 4, slots),
        end_of_slots=end_of_slots,
      )
    lanes.store_word(
      lanes.add(first_count, tile * ROWS * 4), count, only=place.is_first_part
    )


def pack_in_numpy(accumulator: np.ndarray, shape: PackShape) -> Packed:
  """Runs the lane program on a float32 [64, columns] accumulator."""
  lanes = NumpyLanes(np.asarray(accumulator), shape.buffer_bytes)
  pack(lanes, shape)
  return Packed(
    lanes.buffer("words").reshape(ROWS, shape.row_slots),
    lanes.buffer("counts").reshape(shape.tiles, ROWS),
  )


class _Exchange(NamedTuple):
  """How a lane swaps half of its bits for half of another lane's.

  Attributes:
    distance: The other lane is `lane ^ distance`.
    rotation: Takes the other lane's bits to where they go.
    kept: The bits that the lane keeps.
  """

  distance: int
  rotation: Word
  kept: Word


class _Place(NamedTuple):
  """What depends only on which lane it is.

  Attributes:
    row: The row that it walks, 0..63.
    column: The first of its columns in a block, 0 or 32.
    is_first_part: Whether that is 0.
    store: Where in the stage store_matrices puts its row, of the first two
      column groups.
    load: Where in the stage its columns begin. The stage being aligned to its
      rows of 128 bytes, further columns and units follow by exclusive or.
    exchanges: Of step 3.
  """

  row: Word
  column: Word
  is_first_part: Flag
  store: Word
  load: Word
  exchanges: tuple[_Exchange, _Exchange]


def _place(lanes: Lanes) -> _Place:
  thread = lanes.thread
  half, part = lanes.and_(thread, 1), lanes.and_(thread, 2)
  first_row = lanes.shift_right(lanes.and_(thread, 96), 1)  # 16 a warp
  row_of_half = lanes.and_(lanes.shift_right(thread, 2), 7)
  row = lanes.multiply_add(half, 8, lanes.add(first_row, row_of_half))
  column = lanes.shift_left(part, 4)
  stage = lanes.address("stage")
  # Lane 8k + r of a warp has the row r of matrix k. The four matrices are two
  # column groups, each of both halves.
  stored_row = lanes.add(first_row, lanes.and_(thread, 15))
  stored_group = lanes.shift_right(lanes.and_(thread, 16), 4)
  is_second_row, is_second_part = lanes.nonzero(half), lanes.nonzero(part)

  def unit_address(row, unit):
    permuted = lanes.xor(lanes.and_(row, 7), unit)
    return lanes.multiply_add(
      permuted, 16, lanes.multiply_add(row, _PITCH, stage)
    )

  def exchange(distance, is_second, bit):
    low = 0xFFFFFFFF // (2**bit + 1)  # the positions without this bit
    return _Exchange(
      distance,
      rotation=lanes.select(is_second, 32 - bit, bit),
      kept=lanes.select(is_second, low << bit, low),
    )

  return _Place(
    row=row,
    column=column,
    is_first_part=lanes.less(part, 2),
    store=unit_address(stored_row, stored_group),
    load=unit_address(row, lanes.shift_right(column, 3)),
    exchanges=(
      exchange(1, is_second_row, 2),
      exchange(2, is_second_part, 4),
    ),
  )


def _clear_words(lanes: Lanes, shape: PackShape) -> None:
  """Zeroes the words of the warp's 16 rows, which lie together."""
  warp = lanes.shift_right(lanes.thread, 5)
  lane = lanes.and_(lanes.thread, 31)
  warp_bytes = 16 * shape.row_slots * 4
  first = lanes.multiply_add(warp, warp_bytes, lanes.address("words"))
  first = lanes.multiply_add(lane, 16, first)
  for offset in range(0, warp_bytes, WARP * 16):
    lanes.store_zeros(first, offset=offset)


def _stage_and_find_active(
  lanes: Lanes, place: _Place, *, first_group: int
) -> Word:
  """Steps 1 to 4: the mask of the lane's active columns in a block."""
  mask: Word = 0
  for group in range(0, BLOCK // 8, 2):
    pairs = [
      lanes.rounded_pair(half=half, group=first_group + group + odd)
      for odd in (0, 1)
      for half in (0, 1)
    ]
    lanes.store_matrices(lanes.xor(place.store, 16 * group), pairs)
    for matrix, pair in enumerate(pairs):
      odd, half = divmod(matrix, 2)
      position = 8 * odd + 4 * (group >> 2) + 2 * half + (group >> 1 & 1)
      active = lanes.positive_halves(pair)
      mask = lanes.multiply_add(active, 1 << position, mask)
  for exchange in place.exchanges:
    others = lanes.shuffle_xor(mask, exchange.distance)
    others = lanes.rotate_left(others, exchange.rotation)
    mask = lanes.blend(mask, others, exchange.kept)
  # Bits whose positions differ in weights 1 and 16, 15 apart, change places.
  swapped = lanes.xor_and(mask, lanes.shift_right(mask, 15), 0x0000AAAA)
  return lanes.xor3(mask, swapped, lanes.shift_left(swapped, 15))


def _walk(
  lanes: Lanes,
  mask: Word,
  *,
  column: Word,
  stage: Word,
  slot: Word,
  end_of_slots: Word,
) -> None:
  """Step 5: a word for each one of the mask, as long as there are slots.

  Args:
    lanes: The backend.
    mask: Active columns, the lane's first in the lowest bit.
    column: The lane's first column inside its TwELL tile.
    stage: The address of its value; see _Place.load.
    slot: The address of the first word.
    end_of_slots: The address after the last word of the row and tile.
  """

  def is_unfinished(mask, slot):
    return lanes.both(lanes.nonzero(mask), lanes.less(slot, end_of_slots))

  def step(mask, slot):
    bit = lanes.lowest_one(mask)
    value = lanes.load_half(lanes.xor(stage, lanes.shift_left(bit, 1)))
    word = lanes.permute_bytes(lanes.add(column, bit), value, 0x5410)
    lanes.store_word(slot, word)
    rest = lanes.and_(mask, lanes.add(mask, -1))
    return rest, lanes.add(slot, 4)

  lanes.loop(is_unfinished, step, mask, slot)
