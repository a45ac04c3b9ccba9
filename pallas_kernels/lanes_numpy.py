"""Lane programs in numpy: each method computes at once, for all lanes."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pallas_kernels.lanes import LANES, Flag, Lanes, Word


class NumpyLanes(Lanes):
  """Runs a lane program at once, on arrays [128]; refuses what is undefined.

  Shared memory begins as garbage. An address outside of the buffers, a
  misaligned one, or two lanes that store to the same place raise.
  """

  def __init__(
    self, accumulator: np.ndarray, buffer_bytes: Mapping[str, int]
  ) -> None:
    """Gives a warpgroup its accumulator and its shared memory.

    Args:
      accumulator: float32 [64, columns], the columns a multiple of 8.
      buffer_bytes: The size of each buffer by name, multiples of 16.
    """
    rows, columns = accumulator.shape
    if rows != 64 or columns % 8:
      raise ValueError(
        f"{accumulator.shape=} must be 64 rows and a multiple of 8 columns"
      )
    self.thread = np.arange(LANES, dtype=np.uint32)
    self._pairs = (
      round_to_bfloat16(accumulator)
      .reshape(4, 2, 8, columns // 8, 4, 2)
      .astype(np.uint32)
    )
    self._bases: dict[str, int] = {}
    end = 0
    allocated = []
    for name, size in buffer_bytes.items():
      if size % 16:
        raise ValueError(f"buffer {name!r} has {size} bytes: round up to 16")
      # Gaps between the buffers, so that a stray address meets none of them.
      self._bases[name] = end + 1024
      allocated.append((end + 1024, size))
      end += 2048 + size
    self._memory = np.full(end // 2, 0xA5A5, np.uint16)
    self._is_allocated = np.zeros(end // 2, bool)
    for base, size in allocated:
      self._is_allocated[base // 2 : (base + size) // 2] = True
    self._sizes = dict(buffer_bytes)
    self._active = np.ones(LANES, bool)

  def buffer(self, name: str) -> np.ndarray:
    """A buffer's contents, as int32 [words]."""
    base = self._bases[name] // 2
    return self._memory[base : base + self._sizes[name] // 2].view(np.int32)

  def rounded_pair(self, *, half: int, group: int) -> Word:
    """See Lanes."""
    pair = self._pairs[:, half, :, group].reshape(LANES, 2)
    return pair[:, 0] | pair[:, 1] << np.uint32(16)

  def add(self, a: Word, b: Word) -> Word:
    """See Lanes."""
    return _word(a) + _word(b)

  def multiply_add(self, a: Word, b: Word, c: Word) -> Word:
    """See Lanes."""
    return _word(a) * _word(b) + _word(c)

  def and_(self, a: Word, b: Word) -> Word:
    """See Lanes."""
    return _word(a) & _word(b)

  def shift_left(self, a: Word, bits: int) -> Word:
    """See Lanes."""
    return _word(a) << np.uint32(bits)

  def shift_right(self, a: Word, bits: int) -> Word:
    """See Lanes."""
    return _word(a) >> np.uint32(bits)

  def rotate_left(self, a: Word, bits: Word) -> Word:
    """See Lanes."""
    wide = _word(a).astype(np.uint64) << _word(bits).astype(np.uint64)
    return (wide | wide >> np.uint64(32)).astype(np.uint32)

  def blend(self, a: Word, b: Word, mask: Word) -> Word:
    """See Lanes."""
    return _word(a) & _word(mask) | _word(b) & ~_word(mask)

  def xor_and(self, a: Word, b: Word, mask: Word) -> Word:
    """See Lanes."""
    return (_word(a) ^ _word(b)) & _word(mask)

  def xor(self, a: Word, b: Word) -> Word:
    """See Lanes."""
    return _word(a) ^ _word(b)

  def xor3(self, a: Word, b: Word, c: Word) -> Word:
    """See Lanes."""
    return _word(a) ^ _word(b) ^ _word(c)

  def permute_bytes(self, a: Word, b: Word, selector: int) -> Word:
    """See Lanes."""
    both = np.stack([_word(a), _word(b)], axis=1).view(np.uint8)
    digits = [selector >> 4 * i & 7 for i in range(4)]
    return np.ascontiguousarray(both[:, digits]).view(np.uint32)[:, 0]

  def positive_halves(self, a: Word) -> Word:
    """See Lanes."""
    positive = _word(a).view(np.int16).reshape(LANES, 2) > 0
    return positive.astype(np.uint16).view(np.uint32)[:, 0]

  def count_ones(self, a: Word) -> Word:
    """See Lanes."""
    return np.bitwise_count(_word(a)).astype(np.uint32)

  def lowest_one(self, a: Word) -> Word:
    """See Lanes."""
    a = _word(a)
    return np.bitwise_count(~a & (a - np.uint32(1))).astype(np.uint32)

  def nonzero(self, a: Word) -> Flag:
    """See Lanes."""
    return _word(a) != 0

  def less(self, a: Word, b: Word) -> Flag:
    """See Lanes."""
    return _word(a) < _word(b)

  def both(self, a: Flag, b: Flag) -> Flag:
    """See Lanes."""
    return a & b

  def select(self, flag: Flag, a: Word, b: Word) -> Word:
    """See Lanes."""
    return np.where(flag, _word(a), _word(b))

  def shuffle_xor(self, a: Word, distance: int) -> Word:
    """See Lanes."""
    self._check_converged("shuffle_xor")
    return _word(a)[self.thread ^ np.uint32(distance)]

  def address(self, buffer: str) -> Word:
    """See Lanes."""
    return _word(self._bases[buffer])

  def load_half(self, address: Word) -> Word:
    """See Lanes."""
    # Lanes out of the loop read the first allocated place, to no effect.
    idle = np.uint32(next(iter(self._bases.values())))
    places = self._places(np.where(self._active, address, idle), halves=1)
    return self._memory[places[:, 0]].astype(np.uint32)

  def store_word(
    self, address: Word, value: Word, *, only: Flag | None = None
  ) -> None:
    """See Lanes."""
    storing = self._active if only is None else self._active & only
    places = self._places(_word(address)[storing], halves=2)
    halves = np.ascontiguousarray(_word(value)[storing]).view(np.uint16)
    self._store(places, halves.reshape(-1, 2))

  def store_zeros(self, address: Word, *, offset: int) -> None:
    """See Lanes."""
    address = self.add(address, offset)[self._active]
    places = self._places(address, halves=8)
    self._store(places, np.zeros(places.shape, np.uint16))

  def store_matrices(self, address: Word, values: Sequence[Word]) -> None:
    """See Lanes."""
    self._check_converged("store_matrices")
    places = self._places(address, halves=8)
    # [warp, row and quarter, matrix] -> one row of 16 bytes per address
    rows = np.stack([_word(value) for value in values]).reshape(4, 4, 32)
    rows = np.ascontiguousarray(rows.transpose(1, 0, 2))
    self._store(places, rows.view(np.uint16).reshape(LANES, 8))

  def sync_warp(self) -> None:
    """See Lanes."""
    self._check_converged("sync_warp")

  def loop(
    self,
    condition: Callable[..., Flag],
    body: Callable[..., tuple[Word, ...]],
    *state: Word,
  ) -> None:
    """See Lanes."""
    self._check_converged("loop")
    while True:
      self._active = self._active & condition(*state)
      if not self._active.any():
        break
      after = body(*state)
      state = tuple(
        np.where(self._active, new, old) for new, old in zip(after, state)
      )
    self._active = np.ones(LANES, bool)

  def _check_converged(self, name: str) -> None:
    if not self._active.all():
      raise RuntimeError(f"{name} inside a loop: move it out")

  def _places(self, address: Word, *, halves: int) -> np.ndarray:
    """Indices [lanes, halves] into the memory of as many 16-bit units."""
    if (address % np.uint32(2 * halves)).any():
      raise RuntimeError(f"an address is no multiple of {2 * halves}")
    places = address.astype(np.int64)[:, None] // 2 + np.arange(halves)
    inside = places < self._is_allocated.size
    if not (inside.all() and self._is_allocated[places].all()):
      raise RuntimeError("an address is outside of every buffer")
    return places

  def _store(self, places: np.ndarray, halves: np.ndarray) -> None:
    if np.unique(places).size != places.size:
      raise RuntimeError("two lanes store to the same place")
    self._memory[places] = halves


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
  """The bits of float32 values in bfloat16, as the device rounds them (uint16).

  To nearest, ties to even; NaN becomes 0x7FFF. The device's conversion is
  `cvt.rn.bf16x2.f32` of the PTX instruction set.
  """
  bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
  nearest = bits.astype(np.uint64) + 0x7FFF + (bits >> np.uint32(16) & 1)
  is_nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000
  return np.where(is_nan, 0x7FFF, nearest >> np.uint64(16)).astype(np.uint16)


def _word(value: Word) -> np.ndarray:
  """A Word as an array [128]."""
  if isinstance(value, int):
    return np.full(LANES, value & 0xFFFFFFFF, np.uint32)
  return value
