"""Dot products at a pattern: interpreted against NumPy, lowered, compiled."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels import gradient_config, rows, sddmm
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.gradient_config import Product
from tests.helpers import gathered_cases, kernels
from tests.helpers.gathered_cases import N, Shape, make_case, make_work

BOTH = pytest.mark.parametrize("product", ["sddmm", "sddmm_spmm"])


def call(
  product, case, work, config, *, y0=None, dtype=jnp.bfloat16, **options
):
  """(dots,) or (dots, y)."""
  options |= {"columns": case.columns, "work": work, "config": config}
  if product == "sddmm":
    return (sddmm.sddmm(case.a, case.b, **options),)
  return sddmm.sddmm_spmm(
    case.a, case.b, values=case.v, y0=y0, dtype=dtype, **options
  )


@functools.partial(
  jax.jit, static_argnames=("product", "config", "with_y0", "dtype", "spare")
)
def run(case, *, product, config, with_y0=False, dtype=jnp.bfloat16, spare=0):
  return call(
    product,
    case,
    make_work(case, config.segment_length, spare=spare),
    config,
    y0=case.y0.astype(dtype) if with_y0 else None,
    dtype=dtype,
    interpret=kernels.interpret_params(),
  )


def check(case, *, with_y0=False, **options):
  with kernels.no_races():
    results = jax.block_until_ready(run(case, with_y0=with_y0, **options))
  dots, *sums = results
  gathered_cases.check_dots(dots, gathered_cases.expected_dots(case))
  for y in sums:
    assert y.dtype == options.get("dtype", jnp.bfloat16)
    y0 = case.y0 if with_y0 else None
    expected = gathered_cases.expected_sum(case, [(case.v, case.b)], y0)
    gathered_cases.check_sum(y, expected)
  return results


@BOTH
@pytest.mark.parametrize(
  ("rows_per_step", "length"), [(1, N), (2, 3), (4, N), (4, 3), (8, 7)]
)
def test_counts_around_a_step_and_a_segment(product, rows_per_step, length):
  around = [
    max(0, size + change)
    for size in (rows_per_step, length)
    for change in (-1, 0, 1)
  ]
  # The last list is of a neuron that fires on every token.
  case = make_case([0, *(min(N, size) for size in around), N], 256)
  config = GatherConfig(rows_per_step=rows_per_step, segment_length=length)
  check(case, product=product, config=config, with_y0=length < N, spare=2)


@BOTH
@pytest.mark.parametrize(
  ("k", "dtype"),
  [(512, jnp.float32), (768, jnp.float32), (2048, jnp.bfloat16)],
  ids=str,
)
def test_widths(product, k, dtype):
  # A chunk of two words a thread, three of one, two of four.
  case = make_case([5, 0, 9], k)
  config = GatherConfig(rows_per_step=4, segment_length=6)
  check(case, product=product, config=config, with_y0=True, dtype=dtype)


@BOTH
@settings(max_examples=10)
@given(
  counts=st.lists(st.integers(0, N), min_size=4, max_size=4),
  seed=st.integers(0, 2**32 - 1),
)
def test_any_lists(product, counts, seed):
  case = make_case(counts, 256, slots=4 * (N + 4), seed=seed)
  config = GatherConfig(rows_per_step=4, segment_length=9)
  check(case, product=product, config=config)


@BOTH
def test_no_entries(product):
  case = make_case([0, 0], 256)
  config = GatherConfig(rows_per_step=4, segment_length=N)
  dots, *sums = check(case, product=product, config=config, spare=1)
  assert not np.any(gathered_cases.bits(dots))
  for y in sums:
    assert not np.any(gathered_cases.bits(y))


@BOTH
@pytest.mark.parametrize("length", [N, 2], ids=["whole", "split"])
def test_same_bits_twice(product, length):
  case = make_case([3, 0, N, 7], 256, seed=1)
  config = GatherConfig(rows_per_step=4, segment_length=length)
  first, second = (run(case, product=product, config=config) for _ in range(2))
  gathered_cases.assert_same_bits(first, second)


@BOTH
def test_not_finite_stays_where_it_is_used(product):
  case = make_case([2, 5, 3, 0], 256)
  # A row for which there is a list, and one that a single entry gathers.
  place = int(case.starts[1]) + 2
  column = int(case.columns[place])
  case = case._replace(
    a=case.a.at[0].set(jnp.nan), b=case.b.at[column].set(jnp.inf)
  )
  config = GatherConfig(rows_per_step=4, segment_length=4)
  dots, *sums = run(case, product=product, config=config)
  entries = gathered_cases.entries(case)
  used = {slot for row, slot, at in entries if row == 0 or at == column}
  finite = np.isfinite(np.asarray(dots))
  assert set(np.flatnonzero(~finite)) == used
  for y in sums:
    rows_used = {row for row, _, at in entries if at == column}
    finite = np.isfinite(np.asarray(y, np.float32)).all(axis=1)
    assert set(np.flatnonzero(~finite)) == rows_used


def test_what_is_left_out_for_want_of_room_is_zero():
  case = make_case([3, 4, 5], 256)
  config = GatherConfig(rows_per_step=4, segment_length=N)
  work = make_work(case, N)
  # Entries are sorted, so that the first is that of the longest list.
  work = work._replace(segments=work.segments.at[0, 0].set(-1))
  (dots,) = call(
    "sddmm", case, work, config, interpret=kernels.interpret_params()
  )
  kept = case._replace(counts=case.counts.at[2].set(0))
  gathered_cases.check_dots(dots, gathered_cases.expected_dots(kept))


def test_the_context_interprets():
  case = make_case([3, 1], 256)
  config = GatherConfig(rows_per_step=2, segment_length=N)

  @jax.jit
  def in_context(case):
    return call("sddmm_spmm", case, make_work(case, N), config)

  with plgpu.force_gpu_interpret_mode(kernels.interpret_params()):
    results = jax.block_until_ready(in_context(case))
  expected = run(case, product="sddmm_spmm", config=config)
  gathered_cases.assert_same_bits(results, expected)


# Numbers of slots are written through a reference, which transformations must
# not lose.


def stacked_cases(run_one):
  cases = [make_case([7, 0, 1], 256, slots=20, seed=seed) for seed in (0, 1)]
  stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
  expected = [run_one(case) for case in cases]
  return stack, jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected)


def run_split(case):
  config = GatherConfig(rows_per_step=2, segment_length=3)
  return run(case, product="sddmm_spmm", config=config, with_y0=True)


def scanned(stack):
  return jax.lax.scan(lambda _, case: (None, run_split(case)), None, stack)[1]


def sharded(stack):
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("data",), axis_types=auto)
  spec = PartitionSpec("data")

  def one(case):
    case = jax.tree.map(lambda leaf: leaf[0], case)
    return jax.tree.map(lambda leaf: leaf[None], run_split(case))

  return jax.shard_map(
    one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )(stack)


@pytest.mark.parametrize(
  "transformed",
  [scanned, lambda stack: jax.vmap(run_split)(stack), sharded],
  ids=["scan", "vmap", "shard_map"],
)
def test_transformed(transformed):
  stack, expected = stacked_cases(run_split)
  gathered_cases.assert_same_bits(jax.jit(transformed)(stack), expected)


# Errors.


@BOTH
@pytest.mark.parametrize(
  ("name", "array", "message"),
  [
    ("a", jnp.zeros((2, 384), jnp.bfloat16), "384 wide but must be a multiple"),
    ("a", jnp.zeros((2, 512), jnp.bfloat16), "width_of_a=512 and width_of_b=2"),
    ("b", jnp.zeros((N, 256), jnp.float32), r"b is float32\[24, 256\]"),
    ("b", jnp.zeros((0, 256), jnp.bfloat16), "at least one row"),
    ("columns", jnp.zeros((2, 8), jnp.int32), r"columns is int32\[2, 8\] but"),
    ("columns", jnp.zeros(9, jnp.float32), "must be a flat int32 array"),
  ],
)
def test_what_does_not_fit_is_refused(product, name, array, message):
  case = make_case([3, 1], 256)
  config = GatherConfig(rows_per_step=2, segment_length=2)
  with pytest.raises(ValueError, match=message):
    call(product, case._replace(**{name: array}), make_work(case, 2), config)


@pytest.mark.parametrize(
  ("name", "array", "message"),
  [
    ("v", jnp.zeros(9, jnp.bfloat16), "values is bfloat16.* flat float32 arr"),
    ("v", jnp.zeros(2, jnp.float32), r"values=\(2,\) must be the same"),
    ("y0", jnp.zeros((2, 256), jnp.float16), "y0 is float16 but must be bf"),
    ("y0", jnp.zeros((3, 256), jnp.bfloat16), r"and y=\(2, 256\) must be the"),
  ],
)
def test_what_does_not_fit_the_sum_is_refused(name, array, message):
  case = make_case([3, 1], 256)
  case = case._replace(**{name: array})
  config = GatherConfig(rows_per_step=2, segment_length=2)
  work = make_work(case, 2)
  with pytest.raises(ValueError, match=message):
    call("sddmm_spmm", case, work, config, y0=case.y0)


def test_a_dtype_of_no_result_is_refused():
  case = make_case([3, 1], 256)
  config = GatherConfig(rows_per_step=2, segment_length=2)
  with pytest.raises(ValueError, match="dtype=float16 of the result must be b"):
    call("sddmm_spmm", case, make_work(case, 2), config, dtype=jnp.float16)


# Lowered and compiled, by token for sddmm and by neuron for sddmm_spmm.

ELL_WIDTH = 128


def shape_of(product, tokens, k, neurons):
  slots = tokens * ELL_WIDTH
  m, n = (tokens, neurons) if product == "sddmm" else (neurons, tokens)
  width = ELL_WIDTH if product == "sddmm" else tokens
  config = gradient_config.default_config(
    Product(product), m=m, k=k, width=width, active=slots / 4 / m
  )
  shape = Shape(m, k, n, slots=slots, width=width, length=config.segment_length)
  return shape, config


def program(product, shape, config, *, with_y0=False, dtype=jnp.bfloat16):
  types = gathered_cases.operand_types(shape)
  work = types.pop("work")
  types |= {"starts": None, "counts": None}

  def function(case, work):
    y0 = case.y0 if with_y0 else None
    return call(product, case, work, config, y0=y0, dtype=dtype)

  types["y0"] = jax.ShapeDtypeStruct(types["y0"].shape, dtype)
  return function, (gathered_cases.Case(**types), work)


def names_of(product, arguments):
  parts = product == "sddmm_spmm" and arguments[1].part_capacity
  return [product] + (["add_parts"] if parts else [])


@BOTH
@pytest.mark.parametrize("length", [ELL_WIDTH, 8], ids=["whole", "split"])
def test_lowers(product, length):
  shape, config = shape_of(product, ELL_WIDTH, 2048, 64)
  function, arguments = program(
    product, shape._replace(length=length), config, with_y0=True
  )
  text = kernels.lower_for_cuda(function, *arguments)
  assert text.count("mosaic_gpu_v2") == len(names_of(product, arguments))


@BOTH
@pytest.mark.parametrize(
  ("tokens", "k", "neurons"),
  [
    (16384, 2048, 5632),
    (16384, 4096, 14336),
    (512, 768, 1536),
    (2048, 1024, 4096),
    (2048, 256, 1024),
    (2048, 2560, 1024),
    (2048, 5120, 1024),
  ],
  ids=str,
)
def test_compiles_for_h200(product, tokens, k, neurons):
  shape, config = shape_of(product, tokens, k, neurons)
  function, arguments = program(product, shape, config)
  compiled = kernels.compile_for_h200(function, *arguments)
  gathered_cases.check_kernels(compiled, names_of(product, arguments))
  assert gathered_cases.row_loads(compiled, k) >= config.rows_per_step + 1
  # Nothing is copied, only parts are stored.
  parts = arguments[1].part_capacity if product == "sddmm_spmm" else 0
  stored = gathered_cases.temporary_bytes(compiled)
  assert stored <= parts * k * 4 + 2**20


@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"]
)
def test_compiles_with_y0(dtype):
  shape, config = shape_of("sddmm_spmm", 16384, 2048, 5632)
  function, arguments = program(
    "sddmm_spmm", shape, config, with_y0=True, dtype=dtype
  )
  compiled = kernels.compile_for_h200(function, *arguments)
  gathered_cases.check_kernels(compiled, ["sddmm_spmm", "add_parts"])


@BOTH
def test_widest_rows_do_not_spill(product):
  shape, config = shape_of(product, 512, rows.MAX_WIDTH, 64)
  function, arguments = program(product, shape, config, with_y0=True)
  compiled = kernels.compile_for_h200(function, *arguments)
  # Three blocks an SM.
  gathered_cases.check_kernels(
    compiled, names_of(product, arguments), max_registers=168
  )


@BOTH
def test_barriers_part_writers_and_readers(product):
  # The interpreter runs 128 threads as one: only the program shows them.
  shape, config = shape_of(product, 512, 2048, 64)
  function, arguments = program(product, shape, config)
  compiled = kernels.compile_for_h200(function, *arguments)
  start_up = ["wait"]
  step = ["store", "wait", "load", "store", "wait", "load"]
  accesses = gathered_cases.shared_accesses(compiled.kernels[0].ptx)
  assert accesses == start_up + step
