"""Lane programs on the device: each method emits one instruction as MLIR.

Instructions that LLVM has no name for are written in PTX. Constants become
immediate operands. `emit_function` puts a program in a function of its own, for
counting its instructions and for interpreting them in tests.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import (
  arith,
  func,
  llvm,
  math,
  nvvm,
  scf,
  vector,
)

from pallas_kernels.lanes import LANES, Flag, Lanes, Word

# Truth tables of lop3's operands a, b, c: a bitwise expression of the three
# gives the table of the function it stands for.
_A, _B, _C = 0xF0, 0xCC, 0xAA
_BLEND = _A & _C | _B & ~_C & 0xFF
_XOR_AND = (_A ^ _B) & _C
_XOR3 = _A ^ _B ^ _C


class MlirLanes(Lanes):
  """Emits a lane program at MLIR's insertion point, in a warpgroup's code."""

  def __init__(
    self, accumulator: np.ndarray, addresses: Mapping[str, ir.Value]
  ) -> None:
    """Gives the program its accumulator and shared memory.

    Args:
      accumulator: vector<2xf32> values [groups, halves], the registers of a
        64-row accumulator in wgmma's layout (`accumulator_registers`).
      addresses: Of each buffer by name, 32-bit integers.
    """
    self._accumulator = accumulator
    self._addresses = dict(addresses)
    self._i32 = ir.IntegerType.get_signless(32)
    thread = nvvm.read_ptx_sreg_tid_x(results=[self._i32])
    self.thread = self.and_(thread, LANES - 1)

  def rounded_pair(self, *, half: int, group: int) -> Word:
    """See Lanes."""
    pair = self._accumulator[group, half]
    even, odd = (
      vector.extract(
        pair,
        dynamic_position=[],
        static_position=ir.DenseI64ArrayAttr.get([position]),
      )
      for position in range(2)
    )
    return self._ptx("cvt.rn.bf16x2.f32 $0, {}, {};", odd, even)

  def add(self, a: Word, b: Word) -> Word:
    """See Lanes."""
    return arith.addi(self._value(a), self._value(b))

  def multiply_add(self, a: Word, b: Word, c: Word) -> Word:
    """See Lanes."""
    return self._ptx("mad.lo.u32 $0, {}, {}, {};", a, b, c)

  def and_(self, a: Word, b: Word) -> Word:
    """See Lanes."""
    return arith.andi(self._value(a), self._value(b))

  def shift_left(self, a: Word, bits: int) -> Word:
    """See Lanes."""
    return arith.shli(self._value(a), self._value(bits))

  def shift_right(self, a: Word, bits: int) -> Word:
    """See Lanes."""
    return arith.shrui(self._value(a), self._value(bits))

  def rotate_left(self, a: Word, bits: Word) -> Word:
    """See Lanes."""
    return self._ptx("shf.l.wrap.b32 $0, {}, {}, {};", a, a, bits)

  def blend(self, a: Word, b: Word, mask: Word) -> Word:
    """See Lanes."""
    return self._lop3(a, b, mask, _BLEND)

  def xor_and(self, a: Word, b: Word, mask: Word) -> Word:
    """See Lanes."""
    return self._lop3(a, b, mask, _XOR_AND)

  def xor(self, a: Word, b: Word) -> Word:
    """See Lanes."""
    return arith.xori(self._value(a), self._value(b))

  def xor3(self, a: Word, b: Word, c: Word) -> Word:
    """See Lanes."""
    return self._lop3(a, b, c, _XOR3)

  def permute_bytes(self, a: Word, b: Word, selector: int) -> Word:
    """See Lanes."""
    return self._ptx("prmt.b32 $0, {}, {}, {};", a, b, selector)

  def positive_halves(self, a: Word) -> Word:
    """See Lanes."""
    # relu raises what is negative to 0. There are no immediates of this type.
    ones = self._value(0x00010001)
    return self._ptx("min.relu.s16x2 $0, {}, {};", a, ones)

  def count_ones(self, a: Word) -> Word:
    """See Lanes."""
    return math.ctpop(a)

  def lowest_one(self, a: Word) -> Word:
    """See Lanes."""
    return math.cttz(a)

  def nonzero(self, a: Word) -> Flag:
    """See Lanes."""
    return arith.cmpi(arith.CmpIPredicate.ne, a, self._value(0))

  def less(self, a: Word, b: Word) -> Flag:
    """See Lanes."""
    less = arith.CmpIPredicate.ult
    return arith.cmpi(less, self._value(a), self._value(b))

  def both(self, a: Flag, b: Flag) -> Flag:
    """See Lanes."""
    return arith.andi(a, b)

  def select(self, flag: Flag, a: Word, b: Word) -> Word:
    """See Lanes."""
    return arith.select(flag, self._value(a), self._value(b))

  def shuffle_xor(self, a: Word, distance: int) -> Word:
    """See Lanes."""
    return utils.shfl_bfly(a, distance)

  def address(self, buffer: str) -> Word:
    """See Lanes."""
    return self._addresses[buffer]

  def load_half(self, address: Word) -> Word:
    """See Lanes."""
    # A destination wider than what is loaded gets zeros in its high bits.
    return self._ptx("ld.shared.u16 $0, [{}];", address, has_side_effects=True)

  def store_word(
    self, address: Word, value: Word, *, only: Flag | None = None
  ) -> None:
    """See Lanes."""
    utils.inline_ptx(
      "st.shared.b32 [$0], $1;", address, self._value(value), predicate=only
    )

  def store_zeros(self, address: Word, *, offset: int) -> None:
    """See Lanes."""
    ptx = f"st.shared.v4.b32 [$0+{offset}], {{$1, $1, $1, $1}};"
    utils.inline_ptx(ptx, address, self._value(0))

  def store_matrices(self, address: Word, values: Sequence[Word]) -> None:
    """See Lanes."""
    utils.inline_ptx(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
      address,
      *values,
      convergent=True,
    )

  def sync_warp(self) -> None:
    """See Lanes."""
    utils.warp_barrier()

  def loop(
    self,
    condition: Callable[..., Flag],
    body: Callable[..., tuple[Word, ...]],
    *state: Word,
  ) -> None:
    """See Lanes."""
    types = [value.type for value in state]
    loop = scf.WhileOp(types, list(state))
    check = loop.before.blocks.append(*types)
    with ir.InsertionPoint(check):
      arguments = list(check.arguments)
      scf.ConditionOp(condition(*arguments), arguments)
    trip = loop.after.blocks.append(*types)
    with ir.InsertionPoint(trip):
      scf.YieldOp(list(body(*trip.arguments)))

  def _value(self, word: Word) -> ir.Value:
    if isinstance(word, int):
      signed = (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
      return utils.c(signed, self._i32)
    return word

  def _lop3(self, a: Word, b: Word, c: Word, table: int) -> ir.Value:
    return self._ptx("lop3.b32 $0, {}, {}, {}, {};", a, b, c, table)

  def _ptx(
    self, template: str, *operands: Word, has_side_effects: bool = False
  ) -> ir.Value:
    """Emits a PTX instruction with one result, ints as immediate operands."""
    values = []
    texts = []
    for operand in operands:
      if isinstance(operand, int):
        texts.append(hex(operand))
      else:
        values.append(operand)
        texts.append(f"${len(values)}")
    return utils.inline_ptx(
      template.format(*texts),
      *values,
      result_types=self._i32,
      has_side_effects=has_side_effects,
    )


def accumulator_registers(accumulator: mgpu.FragmentedArray) -> np.ndarray:
  """A 64-row wgmma accumulator as MlirLanes takes it."""
  if accumulator.layout != mgpu.WGMMA_LAYOUT or accumulator.shape[0] != 64:
    raise ValueError(
      f"an accumulator of shape {accumulator.shape} and layout"
      f" {accumulator.layout}, not 64 rows in wgmma's: cast its layout"
    )
  # Of the layout's dimensions only column groups and row halves, in this
  # order, are not spread over lanes.
  return accumulator.registers.reshape(accumulator.shape[1] // 8, 2)


def address(memory: ir.Value) -> ir.Value:
  """The 32-bit address of an array in shared memory, as MlirLanes takes it."""
  pointer = utils.memref_ptr(memory)
  return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)


class EmittedFunction(NamedTuple):
  """A lane program as a function, valid inside `emit_function`.

  Attributes:
    function: Its operation.
    accumulator: Its arguments vector<2xf32> [groups, halves].
    addresses: Its arguments for the buffers, i32.
  """

  function: func.FuncOp
  accumulator: np.ndarray
  addresses: Mapping[str, ir.Value]


@contextlib.contextmanager
def emit_function(
  program: Callable[[Lanes], None], *, columns: int, buffers: Sequence[str]
) -> Iterator[EmittedFunction]:
  """Emits a lane program into a module of its own, open to changes.

  Args:
    program: The program.
    columns: Of the accumulator, a multiple of 8.
    buffers: Names of the shared memory that the program uses.
  """
  with jax_mlir.make_ir_context() as context, ir.Location.unknown():
    mgpu.dialect.register_dialect(context)
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    registers = columns // 8 * 2
    arguments = [pair] * registers + [i32] * len(buffers)
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
      function = func.FuncOp("program", ir.FunctionType.get(arguments, []))
      entry = function.add_entry_block()
    accumulator = np.array(entry.arguments[:registers], object).reshape(-1, 2)
    addresses = dict(zip(buffers, entry.arguments[registers:]))
    with ir.InsertionPoint(entry):
      program(MlirLanes(accumulator, addresses))
      func.ReturnOp([])
    if not module.operation.verify():
      raise ValueError(f"{program} emits MLIR that does not verify")
    yield EmittedFunction(function, accumulator, addresses)


class LoopCount(NamedTuple):
  """Instructions of a loop: of each check of its condition, and each trip."""

  check: int
  trip: int


class InstructionCount(NamedTuple):
  """Instructions that a lane issues: outside of loops, and in each loop."""

  straight: int
  loops: tuple[LoopCount, ...]


# What becomes no instruction: constants are immediate, and the parts of the
# accumulator are registers already. Returning is the kernel's business.
_FREE = {"arith.constant", "vector.extract", "func.return"}
_INSTRUCTIONS = {"math.cttz": 2}


def count_instructions(
  program: Callable[[Lanes], None], *, columns: int, buffers: Sequence[str]
) -> InstructionCount:
  """Counts the instructions that a lane program emits.

  What the assembler makes of them may differ by a few: it moves constants into
  registers, and marks where divergent lanes meet again.
  """
  with emit_function(program, columns=columns, buffers=buffers) as emitted:
    loops: list[LoopCount] = []
    straight = 0
    for operation in emitted.function.entry_block.operations:
      if operation.operation.name == "scf.while":
        check, trip = (
          _count_block(region.blocks[0])
          for region in operation.operation.regions
        )
        loops.append(LoopCount(check, trip))
      else:
        straight += _count_operation(operation)
  return InstructionCount(straight, tuple(loops))


def _count_block(block: Any) -> int:
  # scf.condition and scf.yield count as the branches that they become.
  return sum(_count_operation(operation) for operation in block.operations)


def _count_operation(operation: Any) -> int:
  name = operation.operation.name
  return 0 if name in _FREE else _INSTRUCTIONS.get(name, 1)
