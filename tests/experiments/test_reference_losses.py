"""The first steps of a run, made again by the reference implementation."""

import jax
import numpy as np
import pytest

from experiments import reference_losses, train
from experiments.reference_losses import Losses
from tests.experiments import programs
from twell_jax import training

TWO = [Losses(1, 4.0, 3.0), Losses(2, 2.0, 1.0)]


def test_no_more_steps_than_the_run_has(corpus, tmp_path):
  config = programs.tiny_config(
    {"data.corpus": str(corpus), "steps": 2, "optimizer.warmup_steps": 1}
  )
  losses = reference_losses.reference_losses(
    train.model_config(config),
    train.train_options(config),
    mesh=training.make_mesh(devices=jax.devices()[:1]),
    batches=iter(train.load_data(config, tmp_path).train),
    steps=5,
  )
  assert [step.step for step in losses] == [1, 2]
  # A model that knows nothing yet, and λ = 0 in its first step.
  assert losses[0].cross_entropy == pytest.approx(np.log(300), rel=0.05)
  assert losses[0].loss == losses[0].cross_entropy
  assert losses[1].loss > losses[1].cross_entropy


@pytest.mark.parametrize(
  ("record", "difference"),
  [
    ({"step": 2, "loss": 2.0, "cross_entropy": 1.0}, 0.0),
    ({"step": 2, "loss": 2.1, "cross_entropy": 1.0}, 0.05),
    ({"step": 2, "loss": 2.0, "cross_entropy": 0.9}, 0.1),
    ({"step": 1, "loss": 3.0, "cross_entropy": 3.0}, 0.25),
  ],
)
def test_the_largest_difference(record, difference):
  later = {"step": 3, "loss": 9.0, "cross_entropy": 9.0}
  comparison = reference_losses.compare([record, later], TWO)
  step = record["step"]
  assert comparison.steps == 2
  assert comparison.compared == [TWO[step - 1]]
  assert comparison.at_step == step
  largest = comparison.largest_relative_difference
  assert largest == pytest.approx(difference)
  reference_losses.check(comparison, tolerance=1.01 * difference)
  if difference:
    with pytest.raises(
      FloatingPointError, match=f"at step {step} is {largest:.2g}"
    ):
      reference_losses.check(comparison, tolerance=0.99 * difference)


def test_a_loss_that_is_no_number():
  records = [
    {"step": 1, "loss": 4.1, "cross_entropy": 3.0},
    {"step": 2, "loss": 2.0, "cross_entropy": float("nan")},
  ]
  comparison = reference_losses.compare(records, TWO)
  with pytest.raises(FloatingPointError, match="at step 2 is nan"):
    reference_losses.check(comparison, tolerance=1.0)


def test_nothing_to_compare():
  with pytest.raises(ValueError, match="none of its first 2 steps"):
    reference_losses.compare([{"step": 10}], TWO)
