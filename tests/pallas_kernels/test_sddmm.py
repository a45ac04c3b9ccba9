"""What is particular to dot products at a pattern."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gather_config import GatherConfig
from tests.helpers import gathered_cases, kernels
from tests.helpers.gathered_cases import N, make_case, make_work
from tests.helpers.gradient_products import (
  SDDMM,
  SDDMM_SPMM,
  call,
  of_each,
  run,
)


@of_each(SDDMM, SDDMM_SPMM)
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
    SDDMM, case, work, config, interpret=kernels.interpret_params()
  )
  kept = case._replace(counts=case.counts.at[2].set(0))
  gathered_cases.check_dots(dots, gathered_cases.expected_dots(kept))


# Errors.


@of_each(SDDMM, SDDMM_SPMM)
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
    call(SDDMM_SPMM, case, work, config, with_y0=True)


def test_a_dtype_of_no_result_is_refused():
  case = make_case([3, 1], 256)
  config = GatherConfig(rows_per_step=2, segment_length=2)
  with pytest.raises(ValueError, match="dtype=float16 of the result must be b"):
    call(SDDMM_SPMM, case, make_work(case, 2), config, dtype=jnp.float16)
