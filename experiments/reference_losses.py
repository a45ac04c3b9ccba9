"""Whether a run trains as the reference implementation would.

The first steps of the run are made again, and beside them the same steps with
the reference implementation's dense layers: same parameters, text and
schedules. Only rounding may tell their losses apart.

Rounding grows in training, which is chaotic: where two runs began equal, they
are soon two samples of what training leads to. In the quickstart the run with
sparse products and the reference's are 5e-6 apart until step 23, 3e-4 at step
24, where the loss has a spike, and 1e-2 at step 100. Two runs of the reference,
of which one cuts its batches in two, come to 6e-4 at step 24 as well. A bound
on that would hold for a wrong gradient too.

So the reference begins again from the run's state, the optimizer's included,
every 10 steps: time enough for a wrong gradient to show, too little for chaos.
The losses are then at most 2.2e-5 apart, and mostly 1e-7, in all 100 steps,
through which layers change between dense and sparse products. A tenth more L1
on one side moves even the cross entropy by up to 4e-3.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from twell_jax import nn, training
from twell_jax.training.sharding import HostBatch
from twell_jax.training.step import StepStatistics

RESTART_EVERY_STEPS = 10


class Losses(NamedTuple):
  """The losses of a step, by their names in the metrics of a run."""

  step: int
  loss: float
  cross_entropy: float


class Steps(NamedTuple):
  """The same steps, made twice.

  Attributes:
    run: The losses of the run's own implementation.
    reference: The losses of the reference implementation.
  """

  run: list[Losses]
  reference: list[Losses]


class Difference(NamedTuple):
  """The largest relative difference of two sequences of losses, and where."""

  relative: float
  step: int


def make_steps(
  config: nn.TransformerConfig,
  options: training.TrainOptions,
  *,
  mesh: jax.sharding.Mesh,
  batches: Iterable[HostBatch],
  steps: int,
) -> Steps:
  """Makes the first steps of a run twice, and writes nothing.

  Args:
    config: The model.
    options: Of the whole run, whose schedules the steps follow.
    mesh: The devices.
    batches: The input of the run from its beginning.
    steps: How many steps to make, if the run has so many.

  Returns:
    The losses of each step.
  """
  model = training.abstract_model(config, nn.Partitioning(mesh))
  optimizer, run_step = training.make_updates(model, options)
  reference = training.abstract_model(
    dataclasses.replace(config, implementation="reference"),
    nn.Partitioning(mesh),
  )
  reference_step = training.make_updates(reference, options).step
  reorder_every_steps = options.reorder_neurons_every_steps
  reorder = None
  if reorder_every_steps:
    reorder = training.make_reorder(model, optimizer)

  made = Steps([], [])
  state = training.initial_state(model, optimizer, seed=options.seed)
  beside = state
  first_batches = itertools.islice(batches, min(steps, options.steps))
  for step, host_batch in enumerate(first_batches, start=1):
    if step % RESTART_EVERY_STEPS == 1:
      # A step consumes the state that it is given.
      beside = jax.tree.map(lambda leaf: leaf.copy(), state)
    batch = training.place_batch(host_batch, model.partitioning)
    state, statistics = run_step(state, batch)
    beside, statistics_beside = reference_step(beside, batch)
    if reorder is not None and step % reorder_every_steps == 0:
      state = reorder(state, statistics.fired)
    made.run.append(_losses(step, statistics))
    made.reference.append(_losses(step, statistics_beside))
  return made


def largest_difference(
  losses: Sequence[Losses], others: Iterable[Mapping[str, Any]]
) -> Difference:
  """Compares losses wherever both have them.

  Args:
    losses: Of some steps.
    others: Metrics of the same or other steps.

  Raises:
    ValueError: They have no step in common.
  """
  by_step = {other["step"]: other for other in others}
  common = [step for step in losses if step.step in by_step]
  if not common:
    raise ValueError(
      f"the run logged none of its first {len(losses)} steps, which were made"
      " again: make at least log_every_steps of them"
    )
  names = ("loss", "cross_entropy")
  # To NumPy a NaN is the largest.
  largest = np.max(
    [
      [abs(getattr(step, n) / by_step[step.step][n] - 1) for n in names]
      for step in common
    ],
    axis=1,
  )
  where = int(np.argmax(largest))
  return Difference(float(largest[where]), common[where].step)


def check(difference: Difference, *, tolerance: float) -> None:
  """Raises FloatingPointError if a difference is above `tolerance`."""
  # Said so that a NaN is above it too.
  if not difference.relative <= tolerance:
    raise FloatingPointError(
      f"the loss at step {difference.step} is {difference.relative:.2g} away"
      " from the reference implementation's, relatively, and rounding explains"
      f" {tolerance:.2g}: run tests/ops to find the wrong product, or allow"
      " more if the model computes in 16 bits"
    )


def _losses(step: int, statistics: StepStatistics) -> Losses:
  return Losses(step, float(statistics.loss), float(statistics.cross_entropy))
