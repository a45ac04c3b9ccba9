"""How a run goes, and the updates that this means."""

import dataclasses
from typing import NamedTuple, get_args

import optax

from twell_jax.training.dead_neurons import DeadNeuronOptions
from twell_jax.training.objective import L1Options, l1_feedback, l1_schedule
from twell_jax.training.optimizer import (
  OptimizerOptions,
  learning_rate_schedule,
  make_optimizer,
)
from twell_jax.training.state import Model
from twell_jax.training.step import NonFinite, TrainStep, make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
  """How a run goes.

  Attributes:
    steps: Updates in all.
    seed: Decides the initial parameters.
    accumulation_steps: Micro-batches into which each batch is cut.
    optimizer: AdamW and its schedule.
    l1: The schedule of the sparsity coefficient, or its target.
    dead_neurons: What counts as dead, and whether it is re-initialised.
    log_every_steps: Steps between records of kind "train".
    eval_every_steps: Steps between evaluations on held-out text. Every
      checkpoint and the last step are evaluated too.
    eval_batches: Held-out batches of an evaluation; 0 is all of them.
    checkpoint_every_steps: Steps between checkpoints; the last step has one.
    keep_checkpoints: How many of the latest are kept, besides the best.
    reorder_neurons_every_steps: Steps between sortings of the neurons of every
      layer by how often they fired in the step just made, so that the model's
      `hot_neurons` are those that fire most; 0 is never. Loss and updates are
      unchanged but for rounding.
    non_finite: What a loss or gradient that is NaN or infinite does: "stop" the
      run, whose checkpoints are all from before it; or "skip" that update,
      which leaves all but the step and the position in the input as they were.
    max_skipped_in_a_row: With "skip", so many skipped updates one after another
      stop the run as well.
    stall_timeout_s: Where several processes train together: seconds without a
      finished step, evaluation or checkpoint after which a process takes
      another one to hang, and ends. It must be longer than the longest of these
      and than compiling a step.
  """

  steps: int
  seed: int = 0
  accumulation_steps: int = 1
  optimizer: OptimizerOptions = dataclasses.field(
    default_factory=OptimizerOptions
  )
  l1: L1Options = dataclasses.field(default_factory=L1Options)
  dead_neurons: DeadNeuronOptions = dataclasses.field(
    default_factory=DeadNeuronOptions
  )
  log_every_steps: int = 10
  eval_every_steps: int = 200
  eval_batches: int = 0
  checkpoint_every_steps: int = 200
  keep_checkpoints: int = 3
  reorder_neurons_every_steps: int = 0
  non_finite: NonFinite = "stop"
  max_skipped_in_a_row: int = 10
  stall_timeout_s: float = 1800.0

  def __post_init__(self):
    for name in (
      "steps",
      "accumulation_steps",
      "log_every_steps",
      "eval_every_steps",
      "checkpoint_every_steps",
      "keep_checkpoints",
      "max_skipped_in_a_row",
    ):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
    if self.eval_batches < 0:
      raise ValueError(
        f"eval_batches = {self.eval_batches} is negative: 0 is all of them"
      )
    if self.reorder_neurons_every_steps < 0:
      raise ValueError(
        "reorder_neurons_every_steps ="
        f" {self.reorder_neurons_every_steps} is negative: 0 is never"
      )
    if self.non_finite not in get_args(NonFinite):
      raise ValueError(
        f"non_finite = {self.non_finite!r} is none of "
        f"{', '.join(map(repr, get_args(NonFinite)))}"
      )
    if not self.stall_timeout_s > 0:
      raise ValueError(
        f"stall_timeout_s = {self.stall_timeout_s} must be above 0"
      )


class Updates(NamedTuple):
  """What updates a model.

  Attributes:
    optimizer: The transformation whose state a `TrainState` holds.
    step: One update, compiled when it is first called.
  """

  optimizer: optax.GradientTransformation
  step: TrainStep


def make_updates(model: Model, options: TrainOptions) -> Updates:
  """The updates of a run, as `train` makes them.

  Args:
    model: The model on its mesh.
    options: How the run goes.

  Raises:
    ValueError: The learning rate's warm-up does not end within the run.
  """
  optimizer = make_optimizer(options.optimizer, steps=options.steps)
  step = make_train_step(
    model,
    optimizer,
    learning_rate=learning_rate_schedule(
      options.optimizer, steps=options.steps
    ),
    l1_coefficient=l1_schedule(options.l1),
    accumulation_steps=options.accumulation_steps,
    dead_neurons=options.dead_neurons,
    l1_feedback=l1_feedback(options.l1),
    non_finite=options.non_finite,
  )
  return Updates(optimizer, step)
