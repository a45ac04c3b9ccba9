"""Whether a run's losses are those of the reference implementation.

The first steps of the run are made again, with dense layers: the same
parameters, text, order and schedules. Only rounding may tell the two apart. It
grows from step to step, as each step trains on what the last one rounded.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from twell_jax import nn, training
from twell_jax.training.sharding import HostBatch


class Losses(NamedTuple):
  """The losses of a step, by their names in the metrics of a run."""

  step: int
  loss: float
  cross_entropy: float


class Comparison(NamedTuple):
  """How far a run's losses are from the reference implementation's.

  Attributes:
    steps: How many steps were made again.
    compared: The reference's losses at those of the steps that the run logged.
    largest_relative_difference: Of loss or cross entropy, at any such step.
    at_step: The step where it is.
  """

  steps: int
  compared: list[Losses]
  largest_relative_difference: float
  at_step: int


def reference_losses(
  config: nn.TransformerConfig,
  options: training.TrainOptions,
  *,
  mesh: jax.sharding.Mesh,
  batches: Iterable[HostBatch],
  steps: int,
) -> list[Losses]:
  """Trains with the reference implementation and writes nothing.

  Args:
    config: The model.
    options: Of the whole run, whose schedules the steps follow.
    mesh: The devices.
    batches: The input of the run from its beginning.
    steps: How many of the run's first steps to make, if it has so many.

  Returns:
    The losses of every step.
  """
  config = dataclasses.replace(config, implementation="reference")
  model = training.abstract_model(config, nn.Partitioning(mesh))
  optimizer = training.make_optimizer(options.optimizer, steps=options.steps)
  train_step = training.make_train_step(
    model,
    optimizer,
    learning_rate=training.learning_rate_schedule(
      options.optimizer, steps=options.steps
    ),
    l1_coefficient=training.l1_schedule(options.l1),
    accumulation_steps=options.accumulation_steps,
  )
  state = training.initial_state(model, optimizer, seed=options.seed)
  losses = []
  first_batches = itertools.islice(batches, min(steps, options.steps))
  for step, batch in enumerate(first_batches, start=1):
    state, statistics = train_step(
      state, training.place_batch(batch, model.partitioning)
    )
    losses.append(
      Losses(step, float(statistics.loss), float(statistics.cross_entropy))
    )
  return losses


def compare(
  records: Iterable[Mapping[str, Any]], reference: Sequence[Losses]
) -> Comparison:
  """Compares losses wherever both have them.

  Args:
    records: The metrics of the run, of kind "train".
    reference: What `reference_losses` returned.

  Raises:
    ValueError: The run logged none of the reference's steps.
  """
  by_step = {losses.step: losses for losses in reference}
  compared, differences = [], []
  names = ("loss", "cross_entropy")
  for record in records:
    if record["step"] not in by_step:
      continue
    losses = by_step[record["step"]]
    compared.append(losses)
    differences.append(
      [abs(record[name] / getattr(losses, name) - 1) for name in names]
    )
  if not compared:
    raise ValueError(
      f"the run logged none of its first {len(reference)} steps, which were"
      " made again: make at least log_every_steps of them"
    )
  # To NumPy a NaN is the largest.
  largest_of_step = np.max(differences, axis=1)
  where = int(np.argmax(largest_of_step))
  return Comparison(
    steps=len(reference),
    compared=compared,
    largest_relative_difference=float(largest_of_step[where]),
    at_step=compared[where].step,
  )


def check(comparison: Comparison, *, tolerance: float) -> None:
  """Raises FloatingPointError if a relative difference is above `tolerance`."""
  largest = comparison.largest_relative_difference
  # Said so that a NaN is above it too.
  if not largest <= tolerance:
    raise FloatingPointError(
      f"the loss at step {comparison.at_step} is {largest:.2g} away from the"
      f" reference implementation's, relatively, and rounding explains"
      f" {tolerance:.2g}: run tests/ops to find the wrong product, or allow"
      " more if the model computes in 16 bits"
    )
