"""What is particular to sums of two terms or two results."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gather_config import GatherConfig
from tests.helpers import gathered_cases
from tests.helpers.gathered_cases import N, make_case, make_work
from tests.helpers.gradient_products import (
  MATRICES,
  VALUES,
  call,
  check,
  of_each,
  run,
)


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


@of_each(MATRICES, VALUES)
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


@of_each(MATRICES, VALUES)
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


@of_each(MATRICES, VALUES)
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


# Errors.


@of_each(MATRICES, VALUES)
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
