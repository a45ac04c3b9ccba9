import jax
import pytest

from twell_jax.training import (
  L1Options,
  coefficient_from_published,
  l1_schedule,
)


def values(options, steps):
  # Optax itself does not hold under strict promotion.
  with jax.numpy_dtype_promotion("standard"):
    return [float(l1_schedule(options)(step)) for step in steps]


def test_schedule_waits_and_rises():
  options = L1Options(coefficient=8.0, start_step=10, warmup_steps=4)
  assert values(options, [0, 9, 10, 11, 12, 14, 99]) == [0, 0, 0, 2, 4, 8, 8]


def test_schedule_without_warmup():
  assert values(L1Options(coefficient=2.0), [0, 1, 50]) == [2, 2, 2]
  late = L1Options(coefficient=2.0, start_step=3)
  assert values(late, [0, 2, 3, 4]) == [0, 0, 2, 2]
  assert values(L1Options(), [0, 5]) == [0, 0]


@pytest.mark.parametrize("name", ["coefficient", "start_step", "warmup_steps"])
def test_negative_options_are_refused(name):
  with pytest.raises(ValueError, match=f"l1 {name} = -1 must be 0 or more"):
    L1Options(**{name: -1})


def test_published_coefficient():
  ours = coefficient_from_published(2e-5, accumulation_steps=8, world_size=8)
  assert ours == pytest.approx(1.28e-3)


def test_a_coefficient_that_is_no_number_is_refused():
  with pytest.raises(ValueError, match="l1 coefficient = nan must be"):
    L1Options(coefficient=float("nan"))
