"""The training loop."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import grain
import jax
from absl import logging
from jax.sharding import Mesh

from twell_jax.nn import Partitioning, TransformerConfig
from twell_jax.training.checkpointing import (
  Checkpoints,
  config_differences,
  saved_steps,
)
from twell_jax.training.dead_neurons import check_reinitialization
from twell_jax.training.distributed import make_vote
from twell_jax.training.evaluation import HeldOut, evaluate
from twell_jax.training.health import check_health
from twell_jax.training.interrupts import catch_interrupts
from twell_jax.training.metrics import StepSummary, summarize
from twell_jax.training.objective import check_target
from twell_jax.training.optimizer import make_optimizer
from twell_jax.training.options import TrainOptions, make_updates
from twell_jax.training.progress import ProgressReport
from twell_jax.training.reorder import make_reorder
from twell_jax.training.sharding import (
  HostBatch,
  data_shard,
  place_batch,
  replicated,
)
from twell_jax.training.state import (
  Model,
  TrainState,
  abstract_model,
  abstract_state,
  initial_state,
)
from twell_jax.training.step import StepStatistics, make_eval_step
from twell_jax.training.watchdog import watch_peers

CHECKPOINTS_NAME = "checkpoints"


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
  data_shard(mesh)
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
  resumed run continues as the unbroken one would have. Several processes
  (`distributed.join_processes`) all call this; a signal to one of them ends all
  after the same step, and process 0 writes the metrics.

  Args:
    config: The model.
    options: How the run goes.
    mesh: The devices (`make_mesh`).
    batches: Endless input: dicts of "inputs" and "targets" int32 and "weights"
      float32, [batch, seq]. Of several processes, each yields the sequences of
      its `data_shard`.
    held_out: Batches of the same form, a finite iterable that starts anew each
      time it is iterated.
    workdir: Holds `checkpoints/`, `metrics.jsonl` and `tensorboard/`; the same
      for all processes.
    start: "resume" continues from the latest checkpoint in workdir that is not
      damaged; "fresh" refuses to start where there is one.
    run_config: What made this run, of JSON types; saved with each checkpoint,
      and compared on resuming: differences are logged.

  Returns:
    The final state and how the run ended.

  Raises:
    ValueError: A mesh, batch, schedule or checkpoint that does not fit; before
      anything is written where it can be known.
    FloatingPointError: The loss, the gradient or the state became NaN or
      infinite, beyond what the options allow. The last checkpoint is from
      before.
    OSError: The disk refused a checkpoint or the metrics. Earlier checkpoints
      are untouched.
  """
  workdir = pathlib.Path(workdir)
  run_config = dict(run_config or {})
  check_target(config, options.l1)
  check_reinitialization(config, options.dead_neurons)
  _check_start(workdir, start)
  model = abstract_model(config, Partitioning(mesh))
  optimizer, train_step = make_updates(model, options)
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
    # Left last: closing the others waits for peers, too.
    finished = stack.enter_context(watch_peers(options.stall_timeout_s))
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
        summarize=_summarize_for(model),
        check=functools.partial(check_health, options),
      )
    )
    interrupt = stack.enter_context(catch_interrupts())
    vote = make_vote(mesh)
    finished(f"reaching step {step}")
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
        finished(f"the evaluation after step {step}")
      stop = vote(interrupt.requested)
      if save or stop:
        with report.paused():
          checkpoints.save(
            state,
            batches,
            step=step,
            config=run_config,
            held_out_loss=None if evaluation is None else evaluation.loss,
          )
      finished(f"step {step}")

    if evaluation is None and not stop:  # Resumed at its end: nothing was run.
      evaluation = evaluate_now(state)

  return TrainResult(
    outcome="finished" if step >= options.steps else "interrupted",
    step=step,
    state=state,
    model=model,
    held_out=evaluation,
  )


def _summarize_for(model: Model) -> Callable[[StepStatistics], StepSummary]:
  """`summarize` for this model, its results on every device, hence host."""
  return jax.jit(
    functools.partial(
      summarize,
      hot_neurons=model.config.hot_neurons,
      shards=model.partitioning.neuron_shards,
    ),
    out_shardings=replicated(model.partitioning),
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
