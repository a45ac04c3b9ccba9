"""The training loop."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import grain
from absl import logging
from jax.sharding import Mesh

from twell_jax.nn import Partitioning, TransformerConfig
from twell_jax.training.checkpointing import (
  Checkpoints,
  config_differences,
  saved_steps,
)
from twell_jax.training.dead_neurons import (
  DeadNeuronOptions,
  check_reinitialization,
)
from twell_jax.training.evaluation import HeldOut, evaluate
from twell_jax.training.interrupts import catch_interrupts
from twell_jax.training.metrics import summarize
from twell_jax.training.objective import (
  L1Options,
  check_target,
  l1_feedback,
  l1_schedule,
)
from twell_jax.training.optimizer import (
  OptimizerOptions,
  learning_rate_schedule,
  make_optimizer,
)
from twell_jax.training.progress import ProgressReport
from twell_jax.training.reorder import make_reorder
from twell_jax.training.sharding import HostBatch, place_batch
from twell_jax.training.state import (
  Model,
  TrainState,
  abstract_model,
  abstract_state,
  initial_state,
)
from twell_jax.training.step import make_eval_step, make_train_step

CHECKPOINTS_NAME = "checkpoints"


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

  def __post_init__(self):
    for name in (
      "steps",
      "accumulation_steps",
      "log_every_steps",
      "eval_every_steps",
      "checkpoint_every_steps",
      "keep_checkpoints",
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


class TrainResult(NamedTuple):
  """How a run ended.

  Attributes:
    outcome: "interrupted" by Ctrl-C or SIGTERM, after saving; or "finished".
    step: Updates made.
    state: The state after them; its checkpoint is on disk.
    model: `model.bind(state.params)` is the trained module.
    held_out: The evaluation of this state; None if it was interrupted between
      two evaluations.
  """

  outcome: Literal["finished", "interrupted"]
  step: int
  state: TrainState
  model: Model
  held_out: HeldOut | None


def check_run(
  config: TransformerConfig,
  options: TrainOptions,
  *,
  mesh: Mesh,
  workdir: str | os.PathLike[str],
  start: Literal["fresh", "resume"] = "fresh",
) -> None:
  """Checks what `train` can know before there are data; writes nothing.

  Raises:
    ValueError: A mesh that does not divide the model, a warm-up that does not
      end, neurons that have no order or are never dead, a target that is out of
      reach, or a start that does not fit the checkpoints in workdir.
  """
  check_target(config, options.l1)
  check_reinitialization(config, options.dead_neurons)
  _check_start(pathlib.Path(workdir), start)
  model = abstract_model(config, Partitioning(mesh))
  optimizer = make_optimizer(options.optimizer, steps=options.steps)
  if options.reorder_neurons_every_steps:
    make_reorder(model, optimizer)


def train(
  config: TransformerConfig,
  options: TrainOptions,
  *,
  mesh: Mesh,
  batches: grain.DatasetIterator,
  held_out: Iterable[HostBatch],
  workdir: str | os.PathLike[str],
  start: Literal["fresh", "resume"] = "fresh",
  run_config: Mapping[str, Any] | None = None,
) -> TrainResult:
  """Trains a language model, or goes on training it.

  Ctrl-C or SIGTERM ends the run after the current step, with a checkpoint. A
  resumed run continues as the unbroken one would have.

  Args:
    config: The model.
    options: How the run goes.
    mesh: The devices (`make_mesh`).
    batches: Endless input: dicts of "inputs" and "targets" int32 and "weights"
      float32, [batch, seq]. On several hosts, each yields its own sequences.
    held_out: Batches of the same form, a finite iterable that starts anew each
      time it is iterated.
    workdir: Holds `checkpoints/`, `metrics.jsonl` and `tensorboard/`.
    start: "resume" continues from the latest checkpoint in workdir; "fresh"
      refuses to start where there is one.
    run_config: What made this run, of JSON types; saved with each checkpoint,
      and compared on resuming: differences are logged.

  Returns:
    The final state and how the run ended.

  Raises:
    ValueError: A mesh, batch, schedule or checkpoint that does not fit; before
      anything is written where it can be known.
    FloatingPointError: The loss became NaN or infinite.
  """
  workdir = pathlib.Path(workdir)
  run_config = dict(run_config or {})
  check_target(config, options.l1)
  check_reinitialization(config, options.dead_neurons)
  _check_start(workdir, start)
  model = abstract_model(config, Partitioning(mesh))
  optimizer = make_optimizer(options.optimizer, steps=options.steps)
  train_step = make_train_step(
    model,
    optimizer,
    learning_rate=learning_rate_schedule(
      options.optimizer, steps=options.steps
    ),
    l1_coefficient=l1_schedule(options.l1),
    accumulation_steps=options.accumulation_steps,
    dead_neurons=options.dead_neurons,
    l1_feedback=l1_feedback(options.l1),
  )
  eval_step = make_eval_step(model)
  reorder_every_steps = options.reorder_neurons_every_steps
  reorder = make_reorder(model, optimizer) if reorder_every_steps else None

  def evaluate_now(state: TrainState) -> HeldOut:
    return evaluate(
      model,
      state.params,
      held_out,
      max_batches=options.eval_batches,
      eval_step=eval_step,
    )

  with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(
      Checkpoints(workdir / CHECKPOINTS_NAME, keep=options.keep_checkpoints)
    )
    if start == "resume":
      restored = checkpoints.restore(abstract_state(model, optimizer), batches)
      state = restored.state
      for difference in config_differences(restored.config, run_config):
        logging.warning("config changed since the checkpoint: %s", difference)
    else:
      state = initial_state(model, optimizer, seed=options.seed)
    step = int(state.step)
    report = stack.enter_context(
      ProgressReport(
        workdir,
        steps=options.steps,
        start_step=step,
        log_every_steps=options.log_every_steps,
        summarize=functools.partial(
          summarize,
          hot_neurons=config.hot_neurons,
          shards=model.partitioning.neuron_shards,
        ),
      )
    )
    interrupt = stack.enter_context(catch_interrupts())
    evaluation = None
    stop = False

    while step < options.steps and not stop:
      batch = place_batch(_next_batch(batches, step), model.partitioning)
      state, statistics = train_step(state, batch)
      step += 1
      # Before a checkpoint is saved: what follows depends on nothing else.
      if reorder is not None and step % reorder_every_steps == 0:
        state = reorder(state, statistics.fired)
      report.add(step, statistics, tokens=batch["inputs"].size)

      last = step == options.steps
      save = last or step % options.checkpoint_every_steps == 0
      evaluation = None
      if save or step % options.eval_every_steps == 0:
        with report.paused():
          evaluation = evaluate_now(state)
          report.held_out(step, evaluation)
      stop = interrupt.requested
      if save or stop:
        with report.paused():
          checkpoints.save(
            state,
            batches,
            step=step,
            config=run_config,
            held_out_loss=None if evaluation is None else evaluation.loss,
          )

    if evaluation is None and not stop:  # Resumed at its end: nothing was run.
      evaluation = evaluate_now(state)

  return TrainResult(
    outcome="finished" if step >= options.steps else "interrupted",
    step=step,
    state=state,
    model=model,
    held_out=evaluation,
  )


def _next_batch(batches: Iterator[HostBatch], step: int) -> HostBatch:
  try:
    return next(batches)
  except StopIteration:
    raise ValueError(
      f"the input ended after {step} batches: it must repeat without end"
    ) from None


def _check_start(workdir: pathlib.Path, start: str) -> None:
  directory = workdir / CHECKPOINTS_NAME
  steps = saved_steps(directory)
  if start == "fresh" and steps:
    raise ValueError(
      f"{directory} already has a checkpoint of step {steps[-1]}: resume it or "
      "choose another workdir"
    )
  if start == "resume" and not steps:
    raise ValueError(
      f"no checkpoint in {directory}: check the path, or start a new run"
    )
