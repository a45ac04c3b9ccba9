"""The gathered kernels of the layer, interpreted against NumPy."""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import gathered, work_list
from pallas_kernels.gather_config import GatherConfig
from tests.helpers import kernels

N = 24
WIDTH = 16
BOTH = pytest.mark.parametrize("matrices", [1, 2], ids=["down", "up_down"])


class Case(NamedTuple):
  """Matrices and an ELL pattern whose unused slots hold garbage."""

  x: jax.Array
  up: jax.Array
  down: jax.Array
  y0: jax.Array
  columns: jax.Array  # [m, WIDTH]
  values: jax.Array
  counts: jax.Array


def make_case(count, k, seed=0):
  rng = np.random.default_rng(seed)
  m = len(count)
  columns = rng.integers(0, N, (m, WIDTH))
  values = np.full((m, WIDTH), np.nan)
  unused = np.arange(WIDTH) >= np.array(count)[:, None]
  columns[unused] = rng.choice([-5, N, 10**6, 0, 7], unused.sum())
  for row, slots in enumerate(count):
    chosen = np.sort(rng.permutation(N)[:slots])
    columns[row, :slots] = chosen
    values[row, :slots] = rng.normal(size=slots)

  def bf16(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  return Case(
    x=bf16(m, k),
    up=bf16(N, k),
    down=bf16(N, k),
    y0=bf16(m, k),
    columns=jnp.asarray(columns, jnp.int32),
    values=jnp.asarray(values, jnp.float32),
    counts=jnp.asarray(count, jnp.int32),
  )


def make_work(count, length, spare=0):
  m = count.shape[0]
  return work_list.segments(
    jnp.arange(m, dtype=jnp.int32) * WIDTH,
    count,
    length=length,
    capacity=spare + work_list.max_segments(m, width=WIDTH, length=length),
    part_capacity=work_list.max_parts(m, width=WIDTH, length=length),
  )


@functools.partial(
  jax.jit, static_argnames=("matrices", "config", "with_y0", "spare")
)
def run(case, *, matrices, config, with_y0, spare=0):
  """Interpreted: y, l1 of segments (None where not gated), the work list."""
  work = make_work(case.counts, config.segment_length, spare)
  options = {
    "columns": case.columns.reshape(-1),
    "values": case.values.reshape(-1),
    "work": work,
    "config": config,
    "y0": case.y0 if with_y0 else None,
    "interpret": kernels.interpret_params(),
  }
  if matrices == 1:
    m = case.counts.shape[0]
    return gathered.gathered_down(case.down, m=m, **options), None, work
  result = gathered.gathered_up_down(case.x, case.up, case.down, **options)
  return result.y, result.l1, work


class Expected(NamedTuple):
  y: np.ndarray
  bound: np.ndarray
  h: np.ndarray  # [m, WIDTH], 0 where unused


def expect(case, *, matrices, with_y0):
  """The result in float64, and how far off bfloat16 and float32 may be."""
  x, up, down, y0, values = (
    np.asarray(array, np.float64)
    for array in (case.x, case.up, case.down, case.y0, case.values)
  )
  m, k = y0.shape
  y = y0.copy() if with_y0 else np.zeros((m, k))
  h = np.zeros((m, WIDTH))
  magnitude = np.abs(y)
  for row in range(m):
    for slot in range(int(case.counts[row])):
      column = int(case.columns[row, slot])
      value = values[row, slot]
      size = np.abs(value)
      if matrices == 2:
        size *= np.abs(x[row]) @ np.abs(up[column])
        value *= x[row] @ up[column]
      h[row, slot] = value
      y[row] += value * down[column]
      magnitude[row] += size * np.abs(down[column])
  # One rounding to 8 bits, and sums of 24 bits of at most k + WIDTH terms.
  bound = np.abs(y) * 2.0**-8 + magnitude * (k + WIDTH) * 2.0**-24
  return Expected(y, bound, h)


def assert_exact(case, *, matrices, config, with_y0, spare=0):
  options = {"matrices": matrices, "with_y0": with_y0}
  with kernels.no_races():
    y, l1, work = jax.block_until_ready(
      run(case, config=config, spare=spare, **options)
    )
  assert y.dtype == jnp.bfloat16
  expected = expect(case, **options)
  error = np.abs(np.asarray(y, np.float64) - expected.y)
  assert np.all(error <= expected.bound), np.max(error - expected.bound)
  if matrices == 2:
    assert l1.dtype == jnp.float32
    for (row, place, length, _), sum_ in zip(np.asarray(work.segments), l1):
      begin = place - row * WIDTH
      true = np.sum(np.abs(expected.h[row, begin : begin + length]))
      assert row >= 0 or sum_ == 0
      assert abs(float(sum_) - true) <= 1e-5 * true
    assert not spare or np.any(work.segments[:, 0] < 0)
  return y


@BOTH
@pytest.mark.parametrize(
  ("rows_per_step", "length", "with_y0"),
  [
    (1, WIDTH, False),
    (2, 3, True),
    (4, WIDTH, True),
    (4, 3, False),
    (8, WIDTH, False),
    (8, 7, True),
  ],
)
def test_counts_around_a_step(matrices, rows_per_step, length, with_y0):
  around = [max(0, rows_per_step - 1), rows_per_step, rows_per_step + 1]
  case = make_case([0, 1, *around, WIDTH], 256)
  config = GatherConfig(rows_per_step=rows_per_step, segment_length=length)
  assert_exact(case, matrices=matrices, config=config, with_y0=with_y0, spare=2)


@BOTH
@pytest.mark.parametrize("k", [512, 768, 2048])
def test_widths(matrices, k):
  # A chunk of two words a thread, three of one, two of four.
  case = make_case([5, 0, 9], k)
  config = GatherConfig(rows_per_step=4, segment_length=6)
  assert_exact(case, matrices=matrices, config=config, with_y0=True, spare=1)


@BOTH
@pytest.mark.parametrize("count", [0, 1, WIDTH])
def test_one_token(matrices, count):
  case = make_case([count], 256)
  config = GatherConfig(rows_per_step=4, segment_length=1)
  assert_exact(case, matrices=matrices, config=config, with_y0=False, spare=1)


@BOTH
def test_many_parts_are_added_in_order(matrices):
  # 16 parts, where 8 are loaded at a time, of ascending and falling size: the
  # order shows in the last bits of the float32 sum, hence in a tie of bfloat16.
  case = make_case([WIDTH], 256)
  ones = jnp.ones_like(case.up).at[:, 1:].set(0)
  down = jnp.ones_like(case.down)
  values = jnp.full((1, WIDTH), 2.0**-24).at[0, 0].set(1).at[0, -1].set(2.0**-8)
  case = case._replace(
    x=jnp.ones_like(case.x), up=ones, down=down, values=values
  )
  config = GatherConfig(rows_per_step=1, segment_length=1)
  y = assert_exact(
    case, matrices=matrices, config=config, with_y0=False, spare=0
  )
  # In order, every small part is lost beside 1, and 1 + 2⁻⁸ is a tie that goes
  # to 1; together first, they would make it 1 + 2⁻⁷.
  np.testing.assert_array_equal(np.asarray(y, np.float32), 1.0)


@BOTH
@pytest.mark.parametrize("length", [WIDTH, 1], ids=["whole", "split"])
@pytest.mark.parametrize(
  ("y0", "first"), [(jnp.bfloat16(256), 1), (jnp.float32(257), 0)]
)
def test_y0_is_rounded_with_the_sum(matrices, length, y0, first):
  # 257 + 2⁻⁹ rounds to 258. Were a part of it rounded before, 257 would be a
  # tie that goes to 256, and so would it were the terms added one by one.
  case = make_case([4], 256)
  ones = jnp.ones_like(case.up)
  values = jnp.zeros((1, WIDTH)).at[0, :2].set(jnp.array([first, 2.0**-9]))
  case = case._replace(
    x=jnp.zeros_like(case.x).at[:, 0].set(1),
    up=ones,
    down=ones,
    y0=jnp.full(case.y0.shape, y0),
    values=values,
  )
  config = GatherConfig(rows_per_step=4, segment_length=length)
  y = assert_exact(case, matrices=matrices, config=config, with_y0=True)
  np.testing.assert_array_equal(np.asarray(y, np.float32), 258)


@BOTH
@pytest.mark.parametrize("length", [WIDTH, 2], ids=["whole", "split"])
def test_same_bits_twice(matrices, length):
  case = make_case([3, 0, WIDTH, 7], 256, seed=1)
  config = GatherConfig(rows_per_step=4, segment_length=length)
  options = {"matrices": matrices, "config": config, "with_y0": True}
  first, second = (run(case, **options)[0] for _ in range(2))
  np.testing.assert_array_equal(
    np.asarray(first).view(np.uint16), np.asarray(second).view(np.uint16)
  )


@BOTH
def test_not_finite_stays_with_its_row(matrices):
  case = make_case([2, 5, 3, 0], 256)
  values = case.values.at[1, 4].set(jnp.inf).at[2, 1].set(jnp.nan)
  case = case._replace(values=values)
  config = GatherConfig(rows_per_step=4, segment_length=2)
  y, _, _ = run(case, matrices=matrices, config=config, with_y0=False)
  finite = np.isfinite(np.asarray(y, np.float32))
  assert finite[0].all()
  assert not finite[1].any()
  assert not finite[2].any()
  assert finite[3].all()


def test_the_context_interprets():
  case = make_case([3, 1], 256)
  config = GatherConfig(rows_per_step=2, segment_length=WIDTH)

  @jax.jit
  def in_context(case):
    return gathered.gathered_down(
      case.down,
      m=2,
      columns=case.columns.reshape(-1),
      values=case.values.reshape(-1),
      work=make_work(case.counts, WIDTH),
      config=config,
    )

  with plgpu.force_gpu_interpret_mode(kernels.interpret_params()):
    y = in_context(case)
  assert_same_numbers(y, run(case, matrices=1, config=config, with_y0=False)[0])


def assert_same_numbers(first, second):
  np.testing.assert_array_equal(
    np.asarray(first, np.float32), np.asarray(second, np.float32)
  )


# The second pass writes into the results of the first through a reference,
# which transformations must not lose.
SPLIT = {
  "matrices": 2,
  "config": GatherConfig(rows_per_step=2, segment_length=3),
  "with_y0": True,
}


def stacked_cases():
  cases = [make_case([7, 0, 1], 256, seed=seed) for seed in range(2)]
  expected = [run(case, **SPLIT)[0] for case in cases]
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases), expected


def test_scan():
  stack, expected = stacked_cases()

  def step(carry, case):
    return carry, run(case, **SPLIT)[0]

  assert_same_numbers(jax.lax.scan(step, 0, stack)[1], jnp.stack(expected))


def test_vmap():
  stack, expected = stacked_cases()
  y = jax.vmap(lambda case: run(case, **SPLIT)[0])(stack)
  assert_same_numbers(y, jnp.stack(expected))


def test_shard_map():
  stack, expected = stacked_cases()
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("data",), axis_types=auto)
  spec = PartitionSpec("data")

  def one(case):
    case = jax.tree.map(lambda leaf: leaf[0], case)
    return run(case, **SPLIT)[0][None]

  sharded = jax.shard_map(
    one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )
  assert_same_numbers(jax.jit(sharded)(stack), jnp.stack(expected))


# Errors.


def arguments(matrices):
  case = make_case([3, 1], 256)
  given = {
    "columns": case.columns.reshape(-1),
    "values": case.values.reshape(-1),
    "work": make_work(case.counts, 2),
    "config": GatherConfig(rows_per_step=2, segment_length=2),
    "y0": case.y0,
    "down": case.down,
  }
  more = {"m": 2} if matrices == 1 else {"x": case.x, "up": case.up}
  return given | more


def call(matrices, given):
  if matrices == 1:
    return gathered.gathered_down(given.pop("down"), **given)
  x, up, down = (given.pop(name) for name in ("x", "up", "down"))
  return gathered.gathered_up_down(x, up, down, **given)


@BOTH
@pytest.mark.parametrize(
  ("name", "array", "message"),
  [
    ("down", jnp.zeros((N, 384), jnp.bfloat16), "384 wide but must be a mult"),
    ("down", jnp.zeros((1, 8448), jnp.bfloat16), "multiple of 256 up to 8192"),
    ("down", jnp.zeros((N, 256), jnp.float32), r"down is float32\[24, 256\]"),
    ("down", jnp.zeros((0, 256), jnp.bfloat16), "at least one row"),
    (
      "y0",
      jnp.zeros((3, 256), jnp.bfloat16),
      r"y0=\(3, 256\) and y=\(2, 256\)",
    ),
    (
      "y0",
      jnp.zeros((2, 256), jnp.float16),
      "y0 is float16 but must be bfloat16 or",
    ),
    ("columns", jnp.zeros(32, jnp.uint32), r"columns is uint32\[32\] but must"),
    ("values", jnp.zeros(32, jnp.bfloat16), "flat float32 array"),
    ("values", jnp.zeros((2, 16), jnp.float32), "flatten it"),
    ("values", jnp.zeros(31, jnp.float32), r"values=\(31,\) must be the same"),
  ],
)
def test_what_does_not_fit_is_refused(matrices, name, array, message):
  with pytest.raises(ValueError, match=message):
    call(matrices, arguments(matrices) | {name: array})


@pytest.mark.parametrize(
  ("name", "shape", "message"),
  [
    ("up", (N + 1, 256), r"up=\(25, 256\) and down=\(24, 256\)"),
    ("x", (2, 512), "width_of_x=512 and width_of_up=256 must be the same"),
  ],
)
def test_matrices_that_do_not_match_are_refused(name, shape, message):
  array = jnp.zeros(shape, jnp.bfloat16)
  with pytest.raises(ValueError, match=message):
    call(2, arguments(2) | {name: array})
