"""Sums of two terms or two results: interpreted against NumPy, compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import gradient_config, rows, spmm
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.gradient_config import Product
from tests.helpers import gathered_cases, kernels
from tests.helpers.gathered_cases import N, Shape, make_case, make_work

MATRICES = "spmm_two_matrices"
VALUES = "spmm_two_values"
BOTH = pytest.mark.parametrize("product", [MATRICES, VALUES])


def call(product, case, work, config, *, with_y0=False, **options):
  """(y,) or (y, z)."""
  options |= {"columns": case.columns, "work": work, "config": config}
  options["m"] = case.y0.shape[0]
  if with_y0:
    options["y0"] = case.y0
  if product == MATRICES:
    values = {"a_values": case.v, "b_values": case.w}
    return (spmm.spmm_two_matrices(case.b, case.c, **values, **options),)
  values = {"y_values": case.v, "z_values": case.w}
  if with_y0:
    options["z0"] = case.z0
  return spmm.spmm_two_values(case.b, **values, **options)


@functools.partial(
  jax.jit, static_argnames=("product", "config", "with_y0", "dtype", "spare")
)
def run(case, *, product, config, with_y0=False, dtype=jnp.bfloat16, spare=0):
  y0, z0 = case.y0.astype(dtype), case.z0.astype(dtype)
  return call(
    product,
    case._replace(y0=y0, z0=z0),
    make_work(case, config.segment_length, spare=spare),
    config,
    with_y0=with_y0,
    dtype=dtype,
    interpret=kernels.interpret_params(),
  )


def check(case, *, product, with_y0=False, dtype=jnp.bfloat16, **options):
  with kernels.no_races():
    results = jax.block_until_ready(
      run(case, product=product, with_y0=with_y0, dtype=dtype, **options)
    )
  terms = [(case.v, case.b), (case.w, case.c)]
  if product == VALUES:
    terms = [(case.v, case.b), (case.w, case.b)]
  sums = [terms] if product == MATRICES else [[term] for term in terms]
  assert len(results) == len(sums)
  for y, summed, y0 in zip(results, sums, (case.y0, case.z0)):
    assert y.dtype == dtype
    gathered_cases.check_sum(
      y, gathered_cases.expected_sum(case, summed, y0 if with_y0 else None)
    )
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
  for y in check(case, product=product, config=config, spare=1):
    assert not np.any(gathered_cases.bits(y))


@BOTH
@pytest.mark.parametrize("length", [N, 2], ids=["whole", "split"])
def test_same_bits_twice(product, length):
  case = make_case([3, 0, N, 7], 256, seed=1)
  config = GatherConfig(rows_per_step=4, segment_length=length)
  first, second = (run(case, product=product, config=config) for _ in range(2))
  gathered_cases.assert_same_bits(first, second)


def ties():
  """Sums 1 + 23 · 2⁻²⁴ + 2⁻⁸ of y, and of z in the opposite order."""
  case = make_case([N], 256)
  start = int(case.starts[0])
  terms = jnp.full(N, 2.0**-24).at[0].set(1).at[-1].set(2.0**-8)
  used = slice(start, start + N)
  return case._replace(
    b=jnp.ones_like(case.b),
    c=jnp.zeros_like(case.c),
    v=case.v.at[used].set(terms),
    w=case.w.at[used].set(terms[::-1]),
  )


@pytest.mark.parametrize("length", [N, 1], ids=["whole", "split"])
def test_terms_are_added_in_order(length):
  # After 1, every 2⁻²⁴ is a tie that is lost, so that 1 + 2⁻⁸ is one of
  # bfloat16, which goes to 1. The other way round they count.
  config = GatherConfig(rows_per_step=1, segment_length=length)
  y, z = run(ties(), product=VALUES, config=config)
  np.testing.assert_array_equal(np.asarray(y, np.float32), 1)
  np.testing.assert_array_equal(np.asarray(z, np.float32), 1 + 2.0**-7)


@BOTH
@pytest.mark.parametrize("length", [N, 5], ids=["whole", "split"])
def test_float32_is_not_rounded(product, length):
  case = ties()
  terms = jnp.where(jnp.isnan(case.v), jnp.nan, 0.0)
  terms = terms.at[case.starts[0]].set(1)
  terms = terms.at[case.starts[0] + N - 1].set(2.0**-20)
  case = case._replace(v=terms, w=terms)
  config = GatherConfig(rows_per_step=4, segment_length=length)
  for y in run(case, product=product, config=config, dtype=jnp.float32):
    np.testing.assert_array_equal(y, np.full((1, 256), 1 + 2.0**-20))


@BOTH
def test_y0_is_rounded_with_the_sum(product):
  # 256 + 1 + 2⁻⁹ rounds to 258. Were the sum rounded before, 257 would be a tie
  # that goes to 256.
  case = make_case([2], 256)
  start = int(case.starts[0])
  weights = case.v.at[start : start + 2].set(jnp.array([1, 2.0**-9]))
  case = case._replace(
    b=jnp.ones_like(case.b),
    c=jnp.zeros_like(case.c),
    y0=jnp.full_like(case.y0, 256),
    z0=jnp.full_like(case.z0, 256),
    v=weights,
    w=weights,
  )
  config = GatherConfig(rows_per_step=4, segment_length=N)
  for y in check(case, product=product, config=config, with_y0=True):
    np.testing.assert_array_equal(np.asarray(y, np.float32), 258)


@BOTH
def test_not_finite_stays_where_it_is_used(product):
  case = make_case([2, 5, 3, 0], 256)
  place = int(case.starts[1]) + 2
  column = int(case.columns[place])
  case = case._replace(b=case.b.at[column].set(jnp.inf))
  config = GatherConfig(rows_per_step=4, segment_length=4)
  used = {row for row, _, at in gathered_cases.entries(case) if at == column}
  for y in run(case, product=product, config=config):
    finite = np.isfinite(np.asarray(y, np.float32)).all(axis=1)
    assert set(np.flatnonzero(~finite)) == used


@BOTH
def test_scan(product):
  # The second pass writes into the results of the first through a reference.
  cases = [make_case([7, 0, 1], 256, slots=20, seed=seed) for seed in (0, 1)]
  stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
  config = GatherConfig(rows_per_step=2, segment_length=3)
  step = functools.partial(run, product=product, config=config, with_y0=True)
  _, results = jax.lax.scan(lambda _, case: (None, step(case)), None, stack)
  expected = [step(case) for case in cases]
  gathered_cases.assert_same_bits(
    results, jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected)
  )


# Errors.


@BOTH
@pytest.mark.parametrize(
  ("name", "array", "message"),
  [
    ("b", jnp.zeros((N, 384), jnp.bfloat16), "384 wide but must be a multiple"),
    ("b", jnp.zeros((N, 256), jnp.float32), r" is float32\[24, 256\] but must"),
    ("columns", jnp.zeros((2, 8), jnp.int32), r"columns is int32\[2, 8\] but"),
    ("v", jnp.zeros(9, jnp.bfloat16), "[ay]_values is bfloat16"),
    ("w", jnp.zeros(2, jnp.float32), r"[bz]_values=\(2,\) must be the same"),
    ("y0", jnp.zeros((2, 512), jnp.bfloat16), r"y0=\(2, 512\) and y=\(2, 256"),
    ("y0", jnp.zeros((2, 256), jnp.float16), "y0 is float16 but must be bf"),
  ],
)
def test_what_does_not_fit_is_refused(product, name, array, message):
  case = make_case([3, 1], 256)
  config = GatherConfig(rows_per_step=2, segment_length=2)
  work = make_work(case, 2)
  with pytest.raises(ValueError, match=message):
    call(product, case._replace(**{name: array}), work, config, with_y0=True)


@pytest.mark.parametrize(
  ("product", "name", "message"),
  [
    (MATRICES, "c", r"a=\(24, 256\) and b=\(3, 256\) must be the same"),
    (VALUES, "z0", r"z0=\(3, 256\) and y=\(2, 256\) must be the same"),
  ],
)
def test_a_second_one_of_another_shape_is_refused(product, name, message):
  case = make_case([3, 1], 256)
  case = case._replace(**{name: jnp.zeros((3, 256), jnp.bfloat16)})
  config = GatherConfig(rows_per_step=2, segment_length=2)
  with pytest.raises(ValueError, match=message):
    call(product, case, make_work(case, 2), config, with_y0=True)


# Lowered and compiled, by token for two matrices, by neuron for two values.

ELL_WIDTH = 128


def shape_of(product, tokens, k, neurons):
  slots = tokens * ELL_WIDTH
  m, n = (tokens, neurons) if product == MATRICES else (neurons, tokens)
  width = ELL_WIDTH if product == MATRICES else tokens
  config = gradient_config.default_config(
    Product(product), m=m, k=k, width=width, active=slots / 4 / m
  )
  shape = Shape(m, k, n, slots=slots, width=width, length=config.segment_length)
  return shape, config


def program(product, shape, config, dtype=jnp.bfloat16, **options):
  types = gathered_cases.operand_types(shape)
  work = types.pop("work")
  types |= {"starts": None, "counts": None}
  for name in ("y0", "z0"):
    types[name] = jax.ShapeDtypeStruct(types[name].shape, dtype)

  def function(case, work):
    return call(product, case, work, config, dtype=dtype, **options)

  return function, (gathered_cases.Case(**types), work)


def names_of(product, work):
  sums = (1 if product == MATRICES else 2) if work.part_capacity else 0
  return [product] + ["add_parts"] * sums


@BOTH
@pytest.mark.parametrize("length", [ELL_WIDTH, 8], ids=["whole", "split"])
def test_lowers(product, length):
  shape, config = shape_of(product, ELL_WIDTH, 2048, 64)
  shape = shape._replace(length=length)
  function, arguments = program(product, shape, config, with_y0=True)
  text = kernels.lower_for_cuda(function, *arguments)
  assert text.count("mosaic_gpu_v2") == len(names_of(product, arguments[1]))


@BOTH
@pytest.mark.parametrize(
  ("tokens", "k", "neurons"),
  [
    (16384, 2048, 5632),
    (16384, 4096, 14336),
    (512, 768, 1536),
    (2048, 1792, 4096),
    (2048, 256, 1024),
    (2048, 3072, 1024),
  ],
  ids=str,
)
def test_compiles_for_h200(product, tokens, k, neurons):
  shape, config = shape_of(product, tokens, k, neurons)
  function, arguments = program(product, shape, config)
  compiled = kernels.compile_for_h200(function, *arguments)
  names = names_of(product, arguments[1])
  gathered_cases.check_kernels(compiled, names)
  matrices = 2 if product == MATRICES else 1
  assert (
    gathered_cases.row_loads(compiled, k) >= matrices * config.rows_per_step
  )
  # Nothing is copied, only parts are stored.
  parts = arguments[1].part_capacity * (len(names) - 1)
  stored = gathered_cases.temporary_bytes(compiled)
  assert stored <= parts * k * 4 + 2**20


@BOTH
@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"]
)
def test_compiles_with_y0(product, dtype):
  shape, config = shape_of(product, 16384, 2048, 5632)
  function, arguments = program(
    product, shape, config, with_y0=True, dtype=dtype
  )
  compiled = kernels.compile_for_h200(function, *arguments)
  gathered_cases.check_kernels(compiled, names_of(product, arguments[1]))


@BOTH
def test_widest_rows_do_not_spill(product):
  shape, config = shape_of(product, 512, rows.MAX_WIDTH, 64)
  function, arguments = program(product, shape, config, with_y0=True)
  compiled = kernels.compile_for_h200(function, *arguments)
  # Three blocks an SM, and two of two sums.
  most = 168 if product == MATRICES else 255
  gathered_cases.check_kernels(
    compiled, names_of(product, arguments[1]), max_registers=most
  )
