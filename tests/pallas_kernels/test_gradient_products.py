"""The kernels of training, interpreted against NumPy, whichever it is."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels.gather_config import GatherConfig
from tests.helpers import gathered_cases, kernels
from tests.helpers.gathered_cases import N, make_case, make_work
from tests.helpers.gradient_products import (
  MATRICES,
  SDDMM_SPMM,
  VALUES,
  call,
  check,
  of_each,
  run,
)


@of_each()
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


@of_each()
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


@of_each()
@settings(max_examples=10)
@given(
  counts=st.lists(st.integers(0, N), min_size=4, max_size=4),
  seed=st.integers(0, 2**32 - 1),
)
def test_any_lists(product, counts, seed):
  case = make_case(counts, 256, slots=4 * (N + 4), seed=seed)
  config = GatherConfig(rows_per_step=4, segment_length=9)
  check(case, product=product, config=config)


@of_each()
def test_no_entries(product):
  case = make_case([0, 0], 256)
  config = GatherConfig(rows_per_step=4, segment_length=N)
  for result in check(case, product=product, config=config, spare=1):
    assert not np.any(gathered_cases.bits(result))


@of_each()
@pytest.mark.parametrize("length", [N, 2], ids=["whole", "split"])
def test_same_bits_twice(product, length):
  case = make_case([3, 0, N, 7], 256, seed=1)
  config = GatherConfig(rows_per_step=4, segment_length=length)
  first, second = (run(case, product=product, config=config) for _ in range(2))
  gathered_cases.assert_same_bits(first, second)


def test_the_context_interprets():
  case = make_case([3, 1], 256)
  config = GatherConfig(rows_per_step=2, segment_length=N)

  @jax.jit
  def in_context(case):
    return call(SDDMM_SPMM, case, make_work(case, N), config)

  with plgpu.force_gpu_interpret_mode(kernels.interpret_params()):
    results = jax.block_until_ready(in_context(case))
  expected = run(case, product=SDDMM_SPMM, config=config)
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
  return run(case, product=SDDMM_SPMM, config=config, with_y0=True)


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


@of_each(MATRICES, VALUES)
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
