"""Lane programs: both backends compute the same, and refuse the undefined."""

import jax.experimental.mosaic.gpu as mgpu
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import lanes_mlir, lanes_numpy
from tests.helpers.mlir_lanes import UndefinedError, run_emitted

COLUMNS = 8
OUT = {"out": 128 * 4}
NOTHING = np.zeros((64, COLUMNS), np.float32)


def in_numpy(program, *, buffers=None, accumulator=NOTHING):
  lanes = lanes_numpy.NumpyLanes(accumulator, buffers or OUT)
  program(lanes)
  return lanes.buffer("out").view(np.uint32)


def emitted(program, *, buffers=None, accumulator=NOTHING):
  buffers = buffers or OUT
  with lanes_mlir.emit_function(
    program, columns=accumulator.shape[1], buffers=tuple(buffers)
  ) as function:
    return run_emitted(function, accumulator, buffers)["out"].view(np.uint32)


BACKENDS = pytest.mark.parametrize("run", [in_numpy, emitted])


def out_of_lane(lanes):
  return lanes.multiply_add(lanes.thread, 4, lanes.address("out"))


def random_word(lanes, seed):
  """Some number in each lane, 0 and all ones among them."""
  word = lanes.multiply_add(lanes.thread, 0x9E3779B1, seed)
  word = lanes.xor(word, lanes.shift_right(word, 15))
  word = lanes.multiply_add(word, 0x85EBCA77, seed)
  word = lanes.select(lanes.less(lanes.thread, 2), 0, word)
  return lanes.select(lanes.less(lanes.thread, 1), 0xFFFFFFFF, word)


def words(seed):
  """random_word, by itself."""
  lanes = lanes_numpy.NumpyLanes(NOTHING, OUT)
  return random_word(lanes, seed)


A, B, C = words(1), words(2), words(3)
THREADS = np.arange(128)

# What a method gives of the words A, B, C, and what it should give.
OPERATIONS = {
  "add": (lambda o, a, b, c: o.add(a, b), A + B),
  "add a constant": (lambda o, a, b, c: o.add(a, -1), A - np.uint32(1)),
  "multiply_add": (lambda o, a, b, c: o.multiply_add(a, b, c), A * B + C),
  "and": (lambda o, a, b, c: o.and_(a, b), A & B),
  "xor": (lambda o, a, b, c: o.xor(a, b), A ^ B),
  "xor3": (lambda o, a, b, c: o.xor3(a, b, c), A ^ B ^ C),
  "xor_and": (lambda o, a, b, c: o.xor_and(a, b, c), (A ^ B) & C),
  "blend": (lambda o, a, b, c: o.blend(a, b, c), A & C | B & ~C),
  "shift_left": (lambda o, a, b, c: o.shift_left(a, 7), A << np.uint32(7)),
  "shift_right": (lambda o, a, b, c: o.shift_right(a, 31), A >> np.uint32(31)),
  "rotate_left": (
    lambda o, a, b, c: o.rotate_left(a, o.and_(b, 31)),
    [
      int(f"{a:032b}"[n:] + f"{a:032b}"[:n], 2)
      for a, n in zip(A.tolist(), (B & 31).tolist())
    ],
  ),
  "permute_bytes": (
    lambda o, a, b, c: o.permute_bytes(a, b, 0x7041),
    [
      int.from_bytes(bytes([both[1], both[4], both[0], both[7]]), "little")
      for both in np.stack([A, B], axis=1).view(np.uint8).tolist()
    ],
  ),
  "positive_halves": (
    lambda o, a, b, c: o.positive_halves(a),
    (A.view(np.int16) > 0).astype(np.uint16).view(np.uint32),
  ),
  "count_ones": (
    lambda o, a, b, c: o.count_ones(a),
    [a.bit_count() for a in A.tolist()],
  ),
  "lowest_one": (
    lambda o, a, b, c: o.lowest_one(o.select(o.nonzero(a), a, 8)),
    [(a & -a).bit_length() - 1 if a else 3 for a in A.tolist()],
  ),
  "nonzero": (
    lambda o, a, b, c: o.select(o.nonzero(a), b, c),
    np.where(A != 0, B, C),
  ),
  "less": (lambda o, a, b, c: o.select(o.less(a, b), 1, 0), A < B),
  "both": (
    lambda o, a, b, c: o.select(o.both(o.less(a, b), o.less(b, c)), 1, 0),
    (A < B) & (B < C),
  ),
  "shuffle_xor": (lambda o, a, b, c: o.shuffle_xor(a, 9), A[THREADS ^ 9]),
}


@BACKENDS
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(run, name):
  operation, expected = OPERATIONS[name]

  def program(lanes):
    operands = (random_word(lanes, seed) for seed in (1, 2, 3))
    lanes.store_word(out_of_lane(lanes), operation(lanes, *operands))

  np.testing.assert_array_equal(run(program), np.array(expected, np.uint32))


@BACKENDS
def test_rounding_and_the_accumulator_s_layout(run):
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 2**32, (64, COLUMNS), dtype=np.uint32)
  # Ties, both ways; carries into the exponent and infinity; subnormals; zeros;
  # infinities and NaNs, one of which has its ones in the discarded bits only.
  bits[0] = [0x3F808000, 0x3F818000, 0x3FFF8000, 0x7F7FFFFF, *[1 << 15] * 4]
  bits[1] = [0, 1, 0x8000, 0x8001, 0x18000, 0x80000000, 0x80000001, 0x8001FFFF]
  bits[2] = [0x7F800000, 0xFF800000, 0x7F800001, 0xFF800001, *[0xFFFFFFFF] * 4]
  values = bits.view(np.float32)
  with np.errstate(invalid="ignore", over="ignore"):
    rounded = values.astype(ml_dtypes.bfloat16).view(np.uint16)
  rounded = np.where(np.isnan(values), 0x7FFF, rounded)

  def program(lanes):
    for half in (0, 1):
      lanes.store_word(
        lanes.add(out_of_lane(lanes), 512 * half),
        lanes.rounded_pair(half=half, group=0),
      )

  pairs = run(program, buffers={"out": 1024}, accumulator=values)
  # [half, warp, row of half, pair of columns, column of pair]
  pairs = pairs.view(np.uint16).reshape(2, 4, 8, 4, 2)
  found = pairs.transpose(1, 0, 2, 3, 4).reshape(64, COLUMNS)
  np.testing.assert_array_equal(found, rounded)


@BACKENDS
def test_matrices_are_stored_by_rows_and_halves_loaded(run):
  def program(lanes):
    # Warp w stores to its 512 bytes; lane 8k + r has row r of matrix k.
    lane = lanes.and_(lanes.thread, 31)
    warp = lanes.shift_right(lanes.thread, 5)
    region = lanes.multiply_add(warp, 512, lanes.address("matrices"))
    values = [lanes.add(lanes.shift_left(lanes.thread, 8), k) for k in range(4)]
    lanes.store_matrices(lanes.multiply_add(lane, 16, region), values)
    lanes.sync_warp()
    # The lane loads the halves 2·lane and 2·lane + 1 of matrix 2.
    half = lanes.multiply_add(lane, 4, lanes.add(region, 256))
    low, high = lanes.load_half(half), lanes.load_half(lanes.add(half, 2))
    lanes.store_word(out_of_lane(lanes), lanes.permute_bytes(low, high, 0x5410))

  found = run(program, buffers={"out": 512, "matrices": 2048})
  np.testing.assert_array_equal(found, (THREADS << 8) + 2)


@BACKENDS
def test_zeros_and_a_store_in_some_lanes_only(run):
  def program(lanes):
    quarter = lanes.less(lanes.and_(lanes.thread, 3), 1)
    for offset in (0, 1024):
      lanes.store_zeros(
        lanes.multiply_add(lanes.thread, 16, lanes.address("out")),
        offset=2 * offset,
      )
    lanes.sync_warp()
    place = lanes.multiply_add(lanes.thread, 16, lanes.address("out"))
    lanes.store_word(place, lanes.thread, only=quarter)

  found = run(program, buffers={"out": 4096})
  expected = np.zeros(1024, np.uint32)
  expected[0:512:16] = np.arange(0, 128, 4)
  np.testing.assert_array_equal(found, expected)


@BACKENDS
def test_loop_ends_in_each_lane_by_itself(run):
  def program(lanes):
    place = out_of_lane(lanes)
    lanes.store_word(place, 7)

    def step(left, sum_):
      lanes.store_word(place, lanes.add(sum_, left))
      return lanes.add(left, -1), lanes.add(sum_, left)

    lanes.loop(
      lambda left, sum_: lanes.nonzero(left),
      step,
      lanes.and_(lanes.thread, 15),
      lanes.add(lanes.and_(lanes.thread, 0), 0),
    )

  n = THREADS % 16
  np.testing.assert_array_equal(run(program), np.where(n, n * (n + 1) // 2, 7))


def store_to(address):
  def program(lanes):
    lanes.store_word(address(lanes), 0)

  return program


def shuffle_in_a_loop(lanes):
  lanes.loop(
    lambda n: lanes.nonzero(n),
    lambda n: (lanes.and_(lanes.shuffle_xor(n, 1), 0),),
    lanes.and_(lanes.thread, 1),
  )


UNDEFINED = {
  "no multiple of 4": store_to(lambda o: o.add(out_of_lane(o), 2)),
  "outside": store_to(lambda o: o.add(out_of_lane(o), 4)),
  "the same place": store_to(lambda o: o.address("out")),
  "loop|diverged": shuffle_in_a_loop,
}


@pytest.mark.parametrize("message", UNDEFINED)
@pytest.mark.parametrize(
  ("run", "error"), [(in_numpy, RuntimeError), (emitted, UndefinedError)]
)
def test_undefined_is_refused(run, error, message):
  with pytest.raises(error, match=message):
    run(UNDEFINED[message])


@pytest.mark.parametrize("waits", ["before", "never"])
@pytest.mark.parametrize("distance", [1, 32])
def test_exchange_through_memory(waits, distance):
  """Lanes of a warp must wait for each other, and warps cannot."""

  def program(lanes):
    lanes.store_word(out_of_lane(lanes), lanes.thread)
    if waits == "before":
      lanes.sync_warp()
    other = lanes.xor(lanes.thread, distance)
    lanes.load_half(lanes.multiply_add(other, 4, lanes.address("out")))

  if waits == "before" and distance < 32:
    np.testing.assert_array_equal(emitted(program), THREADS)
  else:
    with pytest.raises(UndefinedError, match=r"barrier|warps"):
      emitted(program)


def test_instructions_are_counted():
  def program(lanes):  # masking the thread number makes 2
    place = out_of_lane(lanes)  # 1
    bit = lanes.lowest_one(lanes.add(lanes.thread, 1))  # 1 + 2
    lanes.rounded_pair(half=0, group=0)  # 1
    lanes.loop(  # 1 + branch, 2 + branch
      lambda n: lanes.nonzero(n),
      lambda n: (lanes.and_(n, lanes.add(n, -1)),),
      bit,
    )
    lanes.store_word(place, bit)  # 1

  count = lanes_mlir.count_instructions(
    program, columns=COLUMNS, buffers=("out",)
  )
  assert count == lanes_mlir.InstructionCount(
    straight=8, loops=(lanes_mlir.LoopCount(check=2, trip=3),)
  )


@pytest.mark.parametrize("shape", [(64, 12), (32, 8)])
def test_accumulator_of_another_shape(shape):
  with pytest.raises(ValueError, match="64 rows"):
    lanes_numpy.NumpyLanes(np.zeros(shape, np.float32), OUT)


def test_buffer_that_is_no_whole_number_of_units():
  with pytest.raises(ValueError, match="round up to 16"):
    lanes_numpy.NumpyLanes(NOTHING, {"out": 24})


@pytest.mark.parametrize(("rows", "fits"), [(64, True), (128, False)])
def test_accumulator_of_mosaic(rows, fits):
  with lanes_mlir.emit_function(
    lambda lanes: None, columns=COLUMNS, buffers=()
  ) as function:
    shape = mgpu.WGMMA_LAYOUT.registers_shape((rows, COLUMNS))
    first, second = function.accumulator[0]
    registers = np.array([first, second] * (rows // 64), object).reshape(shape)
    accumulator = mgpu.FragmentedArray(
      _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
    )
    if fits:
      found = lanes_mlir.accumulator_registers(accumulator)
      assert (found[0] == [first, second]).all()
    else:
      with pytest.raises(ValueError, match="not 64 rows in wgmma's"):
        lanes_mlir.accumulator_registers(accumulator)
