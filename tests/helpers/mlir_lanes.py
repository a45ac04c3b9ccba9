"""Runs the MLIR that a lane program emits, on 128 numpy lanes.

Instructions mean here what the PTX manual says, written without a look at the
numpy backend. More than the device does, it refuses what the device would do
something undefined for: shuffles, matrix stores and barriers inside divergent
loops, addresses misaligned or outside of the buffers, conflicting stores, and
lanes that exchange data through memory without waiting for each other.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallas_kernels.lanes_mlir import EmittedFunction

LANES = 128
Word = np.ndarray

_NOBODY = -1
_SEVERAL = -2


class UndefinedError(Exception):
  """The program does what has no defined result."""


class SharedMemory:
  """Bytes, and who touched each since the last barrier of its warp."""

  def __init__(self, sizes: Mapping[str, int]) -> None:
    self.bases = {}
    end = 4096
    for name, size in sizes.items():
      self.bases[name] = end
      end += -(-size // 1024) * 1024 + 4096
    self._sizes = dict(sizes)
    self._bytes = np.full(end, 0xEE, np.uint8)
    self._is_allocated = np.zeros(end, bool)
    for name, base in self.bases.items():
      self._is_allocated[base : base + sizes[name]] = True
    self._warp = np.full(end, _NOBODY)
    self.sync_warps()

  def words(self, name: str) -> np.ndarray:
    base = self.bases[name]
    return self._bytes[base : base + self._sizes[name]].view(np.int32)

  def sync_warps(self) -> None:
    self._writer = np.full(self._bytes.size, _NOBODY)
    self._reader = np.full(self._bytes.size, _NOBODY)

  def load(self, addresses: Word, size: int, lanes: Word) -> Word:
    """Bytes [lanes, size]."""
    places = self._places(addresses, size, lanes)
    self._refuse_others(self._writer, places, lanes)
    reader = self._reader[places]
    alone = (reader == _NOBODY) | (reader == lanes[:, None])
    self._reader[places] = np.where(alone, lanes[:, None], _SEVERAL)
    read, times = np.unique(places, return_counts=True)
    self._reader[read[times > 1]] = _SEVERAL
    return self._bytes[places]

  def store(self, addresses: Word, values: Word, lanes: Word) -> None:
    """Stores bytes [lanes, size]; lanes of 128 and more are whole warps."""
    places = self._places(addresses, values.shape[1], lanes)
    if np.unique(places).size != places.size:
      raise UndefinedError("two lanes store to the same place")
    self._refuse_others(self._writer, places, lanes)
    self._refuse_others(self._reader, places, lanes)
    self._bytes[places] = values
    self._writer[places] = lanes[:, None]

  def _places(self, addresses: Word, size: int, lanes: Word) -> np.ndarray:
    addresses = addresses.astype(np.int64)
    if (addresses % size).any():
      raise UndefinedError(f"an address is no multiple of {size}")
    places = addresses[:, None] + np.arange(size)
    inside = places < self._bytes.size
    if not (inside.all() and self._is_allocated[places].all()):
      raise UndefinedError("an address is outside of the buffers")
    warps = np.where(lanes < LANES, lanes // 32, lanes - LANES)[:, None]
    before = self._warp[places]
    if not ((before == _NOBODY) | (before == warps)).all():
      raise UndefinedError("two warps meet in memory")
    self._warp[places] = warps
    return places

  @staticmethod
  def _refuse_others(who: np.ndarray, places: np.ndarray, lanes: Word) -> None:
    there = who[places]
    if not ((there == _NOBODY) | (there == lanes[:, None])).all():
      raise UndefinedError("lanes exchange data without a barrier between")


def run_emitted(
  emitted: EmittedFunction,
  accumulator: np.ndarray,
  buffer_bytes: Mapping[str, int],
) -> dict[str, np.ndarray]:
  """The buffers, int32, that an emitted lane program leaves.

  Args:
    emitted: Of `lanes_mlir.emit_function`.
    accumulator: float32 [64, columns].
    buffer_bytes: The size of each buffer by name.

  Raises:
    UndefinedError: See the module.
  """
  memory = SharedMemory(buffer_bytes)
  machine = _Machine(memory)
  for (group, half), argument in np.ndenumerate(emitted.accumulator):
    thread = np.arange(LANES)
    rows = thread // 32 * 16 + 8 * half + thread % 32 // 4
    columns = 8 * group + thread % 4 * 2
    machine.values[argument] = np.stack(
      [accumulator[rows, columns], accumulator[rows, columns + 1]], axis=1
    )
  for name, argument in emitted.addresses.items():
    machine.values[argument] = _constant(memory.bases[name])
  with np.errstate(over="ignore"):
    machine.run(emitted.function.entry_block)
  return {name: memory.words(name).copy() for name in buffer_bytes}


def _constant(value: int) -> Word:
  return np.full(LANES, value & 0xFFFFFFFF, np.uint32)


# The machine's instructions by name, of MLIR and of PTX. Those of PTX take
# their operands as written: registers, then immediates.
_BINARY: dict[str, Callable[[Word, Word], Word]] = {
  "arith.addi": np.add,
  "arith.andi": np.bitwise_and,
  "arith.xori": np.bitwise_xor,
  "arith.shli": np.left_shift,
  "arith.shrui": np.right_shift,
}
# Of arith.cmpi, by the number of the predicate.
_COMPARISONS: dict[int, Callable[[Word, Word], Word]] = {
  0: np.equal,
  1: np.not_equal,
  6: np.less,
  7: np.less_equal,
  9: np.greater_equal,
}


class _Machine:
  """Values of all lanes by MLIR value; the lanes that take part."""

  def __init__(self, memory: SharedMemory) -> None:
    self.values: dict[ir.Value, Any] = {}
    self._memory = memory
    self._active = np.ones(LANES, bool)

  def run(self, block: ir.Block) -> list[Any]:
    """Runs a block; gives the operands of its terminator."""
    for operation in block.operations:
      operands = [self.values[value] for value in operation.operands]
      name = operation.operation.name
      if name in ("func.return", "scf.yield", "scf.condition"):
        return operands
      results = self._results(name, operation.operation, operands)
      for value, result in zip(operation.results, results, strict=True):
        self.values[value] = result
    raise ValueError("a block without an end")

  def _results(
    self, name: str, operation: ir.Operation, operands: list[Any]
  ) -> list[Any]:
    attributes = operation.attributes
    if name in _BINARY:
      if name in ("arith.shli", "arith.shrui") and (operands[1] > 31).any():
        raise UndefinedError("a shift by 32 or more")
      return [_BINARY[name](*operands)]
    match name:
      case "arith.constant":
        return [_constant(ir.IntegerAttr(attributes["value"]).value)]
      case "arith.cmpi":
        predicate = ir.IntegerAttr(attributes["predicate"]).value
        return [_COMPARISONS[predicate](*operands)]
      case "arith.select":
        return [np.where(*operands)]
      case "math.ctpop":
        return [np.bitwise_count(operands[0]).astype(np.uint32)]
      case "math.cttz":
        return [_trailing_zeros(operands[0])]
      case "vector.extract":
        position = ir.DenseI64ArrayAttr(attributes["static_position"])[0]
        return [operands[0][:, position]]
      case "nvvm.read.ptx.sreg.tid.x":
        # Of the second warpgroup, for one.
        return [np.arange(LANES, 2 * LANES, dtype=np.uint32)]
      case "nvvm.shfl.sync":
        return [self._shuffle(str(attributes["kind"]), *operands)]
      case "nvvm.bar.warp.sync":
        self._converged(name)
        if (operands[0] != 0xFFFFFFFF).any():
          raise UndefinedError("a barrier without some lanes")
        self._memory.sync_warps()
        return []
      case "llvm.inline_asm":
        text = ir.StringAttr(attributes["asm_string"]).value
        has_result = str(operation.results[0].type) != "!llvm.void"
        return [self._ptx(text, operands, has_result)]
      case "scf.while":
        return self._loop(operation, operands)
    raise NotImplementedError(f"{name}: teach it to this interpreter")

  def _converged(self, name: str) -> None:
    if not self._active.all():
      raise UndefinedError(f"{name} where lanes have diverged")

  def _shuffle(
    self, kind: str, mask: Word, value: Word, distance: Word, clamp: Word
  ) -> Word:
    self._converged("a shuffle")
    if "bfly" not in kind or (mask != 0xFFFFFFFF).any() or (clamp != 31).any():
      raise NotImplementedError("only the butterfly shuffle of whole warps")
    if (distance > 31).any():
      raise UndefinedError("a shuffle across warps")
    return value[np.arange(LANES, dtype=np.uint32) ^ distance]

  def _loop(self, operation: ir.Operation, state: list[Any]) -> list[Any]:
    check, trip = (region.blocks[0] for region in operation.regions)
    outside = self._active
    while True:
      self.values.update(zip(check.arguments, state, strict=True))
      goes_on, *state = self.run(check)
      self._active = self._active & goes_on
      if not self._active.any():
        break
      self.values.update(zip(trip.arguments, state, strict=True))
      after = self.run(trip)
      state = [
        np.where(self._active, new, old)
        for new, old in zip(after, state, strict=True)
      ]
    self._active = outside
    return state

  def _ptx(
    self, text: str, operands: list[Any], has_result: bool
  ) -> Word | None:
    """One PTX instruction: `@p name destination, source, ...;`."""
    found = re.fullmatch(r"(?:@\$(\d+) )?([\w.:]+) (.*);", text)
    if not found:
      raise NotImplementedError(f"PTX {text!r}")
    predicate, name, rest = found.groups()

    def value(token: str) -> Word:
      if token.startswith("$"):
        return operands[int(token[1:]) - has_result]
      return _constant(int(token, 0))

    def address(token: str) -> Word:
      base, _, offset = token.strip("[]").partition("+")
      return value(base) + (_constant(int(offset)) if offset else _constant(0))

    tokens = re.findall(r"\[[^]]*\]|[^\s,{}]+", rest)
    active = self._active
    if predicate is not None:
      active = active & operands[int(predicate) - has_result]
    lanes = np.flatnonzero(active)
    match name:
      case "ld.shared.u16":
        halves = np.zeros((LANES, 2), np.uint8)
        halves[lanes] = self._memory.load(address(tokens[1])[lanes], 2, lanes)
        return halves.view(np.uint16)[:, 0].astype(np.uint32)
      case "st.shared.b32" | "st.shared.v4.b32":
        words = np.stack([value(token) for token in tokens[1:]], axis=1)
        stored = np.ascontiguousarray(words).view(np.uint8)[lanes]
        self._memory.store(address(tokens[0])[lanes], stored, lanes)
        return None
      case "stmatrix.sync.aligned.m8n8.x4.shared.b16":
        self._converged(name)
        for warp in range(4):
          for matrix, token in enumerate(tokens[1:]):
            rows = slice(32 * warp + 8 * matrix, 32 * warp + 8 * matrix + 8)
            words = value(token)[32 * warp : 32 * warp + 32].reshape(8, 4)
            self._memory.store(
              address(tokens[0])[rows],
              np.ascontiguousarray(words).view(np.uint8),
              np.full(8, LANES + warp),
            )
        return None
    return _ARITHMETIC[name](*(value(token) for token in tokens[1:]))


def _trailing_zeros(a: Word) -> Word:
  bits = a[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
  return np.where(a == 0, 32, bits.argmax(axis=1)).astype(np.uint32)


def _convert(high: Word, low: Word) -> Word:
  def bits(values):
    with np.errstate(invalid="ignore", over="ignore"):
      rounded = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint32)

  return bits(high) << np.uint32(16) | bits(low)


def _funnel_left(low: Word, high: Word, bits: Word) -> Word:
  both = high.astype(np.uint64) << np.uint64(32) | low
  return (both << (bits & np.uint32(31)) >> np.uint64(32)).astype(np.uint32)


def _lop3(a: Word, b: Word, c: Word, table: Word) -> Word:
  result = np.zeros(LANES, np.uint32)
  for row in range(8):
    if table[0] >> row & 1:
      chosen = (
        word if row & weight else ~word
        for word, weight in ((a, 4), (b, 2), (c, 1))
      )
      first, second, third = chosen
      result |= first & second & third
  return result


def _prmt(a: Word, b: Word, selector: Word) -> Word:
  source = b.astype(np.uint64) << np.uint64(32) | a
  result = np.zeros(LANES, np.uint32)
  for i in range(4):
    digit = selector[0] >> 4 * i & 15
    if digit > 7:
      raise NotImplementedError("prmt with a replicated sign")
    byte = source >> np.uint64(8 * digit) & np.uint64(255)
    result |= byte.astype(np.uint32) << np.uint32(8 * i)
  return result


def _min_relu(a: Word, b: Word) -> Word:
  low = np.minimum(a.view(np.int16), b.view(np.int16))
  return np.maximum(low, 0).astype(np.int16).view(np.uint32)


_ARITHMETIC: dict[str, Callable[..., Word]] = {
  "cvt.rn.bf16x2.f32": _convert,
  "mad.lo.u32": lambda a, b, c: a * b + c,
  "shf.l.wrap.b32": _funnel_left,
  "lop3.b32": _lop3,
  "prmt.b32": _prmt,
  "min.relu.s16x2": _min_relu,
}
