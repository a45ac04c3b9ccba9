"""The packing lane program: exact, and the same on the device's lanes."""

import re

import numpy as np
import pytest
from jaxlib.mlir import ir

from pallas_kernels import lanes_mlir, pack_program
from pallas_kernels.pack_program import PackShape
from tests.helpers.mlir_lanes import UndefinedError, run_emitted
from tests.helpers.packing import Words, pack_words

SHAPES = pytest.mark.parametrize(
  "shape",
  [
    PackShape(64, 64, 8),
    PackShape(64, 64, 64),
    PackShape(128, 64, 16),
    PackShape(128, 128, 16),
    PackShape(192, 192, 24),
    PackShape(256, 256, 32),
  ],
  ids=lambda shape: "/".join(map(str, shape)),
)


def random_z(shape, *, mean, seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(mean, 1, (64, shape.columns)).astype(np.float32)


def z_with_counts(shape, seed=0):
  """Rows with 0, 1, S, S + 1 and all columns active, anywhere in a tile."""
  rng = np.random.default_rng(seed)
  z = -np.abs(random_z(shape, mean=0, seed=seed)) - 1
  slots, width = shape.slots, shape.tile_width
  for row, count in enumerate([0, 1, slots, min(slots + 1, width), width] * 12):
    for tile in range(shape.tiles):
      columns = rng.permutation(width)[:count] + tile * width
      z[row, columns] *= -1
  # In the last rows one tile is full and its neighbours are empty.
  z[60:] = -1
  z[60:, :width] = 1
  return z


def z_with_special_values(shape):
  z = random_z(shape, mean=-1)
  # In this order: NaNs of both signs, infinities, zeros, the least and the
  # greatest subnormal of either sign, what rounds to zero, to infinity.
  bits = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7F800000]
  bits += [0xFF800000, 0, 0x80000000, 0x00010000, 0x80010000, 0x007F0000]
  bits += [0x807F0000, 0x00008000, 0x00008001, 0x80008001, 0x7F7FFFFF]
  special = np.array(bits, np.uint32).view(np.float32)
  z[3, :16] = z[12, -16:] = z[63, 24:40] = special
  z[40] = np.nan
  z[41] = -0.0
  return z


INPUTS = {
  "sparse": lambda shape: random_z(shape, mean=-2.5),
  "half": lambda shape: random_z(shape, mean=0),
  "all positive": lambda shape: np.abs(random_z(shape, mean=1)) + 1,
  "none positive": lambda shape: -np.abs(random_z(shape, mean=1)),
  "counts": z_with_counts,
  "special values": z_with_special_values,
}


def in_numpy(z, shape):
  return Words(*pack_program.pack_in_numpy(z, shape))


def emit(shape):
  return lanes_mlir.emit_function(
    lambda lanes: pack_program.pack(lanes, shape),
    columns=shape.columns,
    buffers=tuple(shape.buffer_bytes),
  )


def on_lanes(function, z, shape):
  buffers = run_emitted(function, z, shape.buffer_bytes)
  return Words(
    buffers["words"].reshape(64, shape.row_slots),
    buffers["counts"].reshape(shape.tiles, 64),
  )


def same(a, b):
  return np.array_equal(a.words, b.words) and np.array_equal(a.counts, b.counts)


@SHAPES
@pytest.mark.parametrize("name", INPUTS)
def test_numpy_backend_packs(shape, name):
  z = INPUTS[name](shape)
  expected = pack_words(z, tile_width=shape.tile_width, slots=shape.slots)
  assert same(in_numpy(z, shape), expected)


def test_inputs_are_what_they_are_named():
  shape = PackShape(64, 64, 8)
  packed = {
    name: pack_words(z(shape), tile_width=64, slots=8)
    for name, z in INPUTS.items()
  }
  assert set(packed["counts"].counts[0]) == {0, 1, 8, 9, 64}
  assert (packed["all positive"].counts == 64).all()
  assert (packed["none positive"].counts == 0).all()
  special = packed["special values"]
  assert special.counts[0, 40] == 64
  assert special.counts[0, 41] == 0
  stored = special.words[3].view(np.uint32) >> 16
  assert stored.tolist() == [
    *[0x7FFF] * 4, 0x7F80, 0x0001, 0x007F, 0x0001
  ]  # fmt: skip


@SHAPES
def test_emitted_program_does_what_numpy_does(shape):
  with emit(shape) as emitted:
    for z in INPUTS.values():
      found = on_lanes(emitted, z(shape), shape)
      assert same(found, in_numpy(z(shape), shape))


def operations(block):
  """All operations, those of loops included, in order."""
  for operation in block.operations:
    yield operation.operation
    for region in operation.operation.regions:
      for inner in region.blocks:
        yield from operations(inner)


def change_ptx(pattern, replacement, occurrence=0):
  """Rewrites one PTX instruction, of those in which the pattern occurs."""

  def mutate(block):
    found = [
      (operation, ir.StringAttr(operation.attributes["asm_string"]).value)
      for operation in operations(block)
      if operation.name == "llvm.inline_asm"
    ]
    found = [(o, text) for o, text in found if re.search(pattern, text)]
    operation, text = found[occurrence]
    changed = re.sub(pattern, replacement, text)
    assert changed != text
    operation.attributes["asm_string"] = ir.StringAttr.get(changed)

  return mutate


def change_constant(name, old, new, occurrence=0):
  """Changes a constant operand of one operation of that name."""

  def mutate(block):
    found = [
      operand.owner
      for operation in operations(block)
      if operation.name == name
      for operand in operation.operands
      if isinstance(operand.owner, ir.Operation | ir.OpView)
      and operand.owner.name == "arith.constant"
      and ir.IntegerAttr(operand.owner.attributes["value"]).value == old
    ]
    attributes = found[occurrence].attributes
    attributes["value"] = ir.IntegerAttr.get(attributes["value"].type, new)

  return mutate


def change_comparison(old, new, occurrence):
  def mutate(block):
    found = [
      operation
      for operation in operations(block)
      if operation.name == "arith.cmpi"
      and ir.IntegerAttr(operation.attributes["predicate"]).value == old
    ]
    attribute = found[occurrence].attributes["predicate"]
    found[occurrence].attributes["predicate"] = ir.IntegerAttr.get(
      attribute.type, new
    )

  return mutate


def remove_barrier(occurrence):
  def mutate(block):
    found = [
      operation
      for operation in operations(block)
      if operation.name == "nvvm.bar.warp.sync"
    ]
    found[occurrence].erase()

  return mutate


MUTATIONS = {
  "rounding swaps a pair": change_ptx(r"^cvt(.*) \$1, \$2", r"cvt\1 $2, $1", 5),
  "activity of even columns only": change_constant(
    "llvm.inline_asm", 0x00010001, 0x00000001, 3
  ),
  "a bit of the mask elsewhere": change_ptx("0x800,", "0x1000,"),
  "an exchange with another lane": change_constant("nvvm.shfl.sync", 1, 2),
  "counts from another lane": change_constant("nvvm.shfl.sync", 2, 1, 1),
  "a rotation by one more": change_constant("arith.select", 30, 31),
  "other bits kept": change_constant("arith.select", 0x33333333, 0x55555555),
  "a blend the other way round": change_ptx("0xe4;", "0xd8;", 1),
  "other bits swapped": change_ptx("0xaaaa", "0x5555"),
  "a swap over one less": change_constant("arith.shrui", 15, 14),
  "matrices in another order": change_ptx(
    r"\$1, \$2, \$3, \$4", "$2, $1, $3, $4", 6
  ),
  "a matrix stored elsewhere": change_constant("arith.xori", 96, 64),
  "zeros stored elsewhere": change_ptx(r"\+512\]", "+0]"),
  "words not cleared": change_ptx(r"\+0\]", "+512]"),
  "a word's halves swapped": change_ptx("0x5410", "0x1054", 1),
  "one slot too many": change_comparison(6, 7, 1),
  "no end at the last slot": change_comparison(6, 1, 2),
  "a column's bit not taken away": change_constant("arith.addi", -1, -2, 1),
  "a column further": change_constant("arith.addi", 64, 65),
  "a count in the other lane": change_comparison(6, 9, 0),
  "a value beside the column": change_constant("arith.shli", 1, 2),
  "no wait for the stage": remove_barrier(0),
  "no wait for its readers": remove_barrier(1),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_changed_program_is_found_out(name):
  """The check of the emitted program sees a change of one operation."""
  shape = PackShape(128, 128, 16)
  z = np.where(
    np.arange(64)[:, None] % 2,
    *(INPUTS[name](shape) for name in ("counts", "half")),
  )
  expected = in_numpy(z, shape)
  with emit(shape) as emitted:
    assert same(on_lanes(emitted, z, shape), expected)
    MUTATIONS[name](emitted.function.entry_block)
    try:
      found = on_lanes(emitted, z, shape)
    except UndefinedError:
      return
    assert not same(found, expected)
