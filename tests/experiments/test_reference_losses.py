"""Comparing losses; test_quickstart.py makes steps to compare."""

import pytest

from experiments import reference_losses
from experiments.reference_losses import Losses

TWO = [Losses(1, 4.0, 3.0), Losses(2, 2.0, 1.0)]


def record(step, loss, cross_entropy):
  return {"step": step, "loss": loss, "cross_entropy": cross_entropy}


@pytest.mark.parametrize(
  ("other", "difference"),
  [
    (record(2, 2.0, 1.0), 0.0),
    (record(2, 1.6, 1.0), 0.25),
    (record(2, 2.0, 1.25), 0.2),
    (record(1, 5.0, 3.0), 0.2),
  ],
)
def test_the_largest_difference(other, difference):
  others = [other, record(3, 9.0, 9.0)]
  largest = reference_losses.largest_difference(TWO, others)
  assert largest.step == other["step"]
  assert largest.relative == pytest.approx(difference)
  reference_losses.check(largest, tolerance=1.01 * difference)
  if difference:
    with pytest.raises(FloatingPointError, match=f"step {largest.step} is 0.2"):
      reference_losses.check(largest, tolerance=0.99 * difference)


def test_a_loss_that_is_no_number():
  others = [record(1, 4.1, 3.0), record(2, 2.0, float("nan"))]
  difference = reference_losses.largest_difference(TWO, others)
  with pytest.raises(FloatingPointError, match="at step 2 is nan"):
    reference_losses.check(difference, tolerance=1.0)


def test_nothing_to_compare():
  with pytest.raises(ValueError, match="none of its first 2 steps"):
    reference_losses.largest_difference(TWO, [record(10, 1.0, 1.0)])
