"""Checkpoints of a run, by Orbax: written in the background, restored anywhere.

A checkpoint of step s holds the state after s updates, the position of the
input after the batches of these s updates, the config of the run as JSON, and
the fingerprints of all these. The latest few are kept, and the one with the
lowest held-out loss.

It is written under a temporary name and renamed when it is complete, so that a
run that is killed, or a disk that is full, never costs an earlier one. One that
is damaged later is found when it is read: resuming then takes the one before.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import grain
import orbax.checkpoint as ocp
from absl import logging
from grain import checkpoint as grain_checkpoint
from orbax.checkpoint import checkpoint_managers as policies

from twell_jax.training import disk, distributed
from twell_jax.training.checkpoint_reader import (
  LOSS,
  CheckpointReader,
  DamagedError,
  Restored,
)
from twell_jax.training.fingerprints import (
  json_fingerprint,
  state_fingerprints,
)
from twell_jax.training.state import TrainState

# How long processes wait for each other to open a directory.
_OPENING_TIMEOUT_S = 600.0


class Checkpoints:
  """The checkpoints in one directory.

  Use it as a context manager: leaving it waits for the last write. Nothing is
  written, and nothing removed, before the first `save`. On several processes,
  which see the same file system, all of them make the same calls.
  """

  def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3):
    """Opens the directory, which need not exist yet.

    Args:
      directory: Where checkpoints are.
      keep: How many of the latest are kept, besides the best.
    """
    if keep < 1:
      raise ValueError(f"checkpoint keep = {keep} must be at least 1")
    self.directory = pathlib.Path(directory).absolute()
    self._keep = keep
    self._reader = CheckpointReader(self.directory)
    self._writer: ocp.CheckpointManager | None = None
    self._damaged: set[int] = set()  # found while reading
    self._last_step: int | None = None  # of the writer

  @property
  def steps(self) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    return saved_steps(self.directory)

  @property
  def best_step(self) -> int | None:
    """The step with the lowest held-out loss; None without checkpoints."""
    return min(self.steps, key=self._reader.held_out_loss, default=None)

  def save(
    self,
    state: TrainState,
    batches: grain.DatasetIterator,
    *,
    step: int,
    config: Mapping[str, Any],
    held_out_loss: float | None,
  ) -> None:
    """Copies the state from the devices and writes it in the background.

    Args:
      state: The state; it may be donated as soon as this returns.
      batches: The input, whose position is saved.
      step: Updates made so far.
      config: The config of the run, of JSON types.
      held_out_loss: The loss by which the best is chosen; None if unknown.

    Raises:
      FloatingPointError: The state has a NaN or an infinity; not saved.
      OSError: The disk refused this checkpoint or the one before, which was
        still being written. Those before it are untouched.
    """
    fingerprints = state_fingerprints(state)
    if fingerprints.not_finite:
      raise FloatingPointError(
        f"{fingerprints.not_finite[0]} is not finite at step {step}, which is"
        " not saved: resume from the last checkpoint with a smaller learning"
        " rate"
      )
    config = dict(config)
    known = held_out_loss is not None and math.isfinite(held_out_loss)
    writer = self._open_writer()
    self.wait()
    self._last_step = step
    with self._writing():
      writer.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          input=grain_checkpoint.CheckpointSave(batches),
          config=ocp.args.JsonSave(config),
          fingerprints=ocp.args.JsonSave(
            {
              "state": fingerprints.sums,
              "input": json_fingerprint(batches.get_state()),
              "config": json_fingerprint(config),
            }
          ),
        ),
        metrics={LOSS: held_out_loss if known else math.inf},
      )

  def restore(
    self,
    abstract: TrainState,
    batches: grain.DatasetIterator | None = None,
    *,
    step: int | None = None,
  ) -> Restored:
    """Loads a checkpoint onto the mesh of the abstract state.

    One that was written before silent tokens were counted is loaded too: the
    counts and the control of λ begin as in a new run, which is logged.

    Args:
      abstract: Shapes, dtypes and shardings of the state
        (`twell_jax.training.state.abstract_state`).
      batches: The input, which is moved to the saved position; None leaves the
        position unread.
      step: Which checkpoint; None for the latest that is whole. Those that are
        newer and damaged are logged, and moved aside by the next `save`.

    Returns:
      The state and the config that was saved with it.

    Raises:
      ValueError: There is no such checkpoint, or it is damaged, or its
        parameters have another shape. `batches` has not been moved then.
    """
    damaged: dict[int, DamagedError] = {}
    for candidate in self._candidates(step):
      try:
        restored = self._reader.restore(candidate, abstract, batches)
      except DamagedError as error:
        damaged[candidate] = error
        continue
      for number, problem in damaged.items():
        logging.warning(
          "checkpoint %s is damaged: %s. Taking that of step %d",
          self.directory / str(number),
          problem,
          candidate,
        )
      self._damaged |= damaged.keys()
      return restored
    raise self._unreadable(damaged)

  def config(self, *, step: int | None = None) -> Mapping[str, Any]:
    """The config saved with a checkpoint; of the latest that has a whole one.

    Raises:
      ValueError: There is none.
    """
    damaged: dict[int, DamagedError] = {}
    for candidate in self._candidates(step):
      try:
        return self._reader.config(candidate)
      except DamagedError as error:
        damaged[candidate] = error
    raise self._unreadable(damaged)

  def wait(self) -> None:
    """Returns when everything saved is on disk; raises OSError if not."""
    if self._writer is not None:
      with self._writing():
        self._writer.wait_until_finished()

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *exception: object) -> None:
    if self._writer is not None:
      with self._writing():
        self._writer.close()

  def _writing(self):
    return disk.writing(f"checkpoint of step {self._last_step}", self.directory)

  def _open_writer(self) -> ocp.CheckpointManager:
    if self._writer is None:
      distributed.wait_for_all(
        f"checkpoints read {self.directory}", timeout_s=_OPENING_TIMEOUT_S
      )
      if distributed.is_first():
        with disk.writing("checkpoints", self.directory):
          self._mend()
      distributed.wait_for_all(
        f"checkpoints mended {self.directory}", timeout_s=_OPENING_TIMEOUT_S
      )
      with disk.writing("checkpoints", self.directory):
        self._writer = ocp.CheckpointManager(
          self.directory,
          options=ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics[LOSS],
            best_mode="min",
            # What a killed run has begun to write.
            cleanup_tmp_directories=True,
            preservation_policy=_preservation(self._keep),
          ),
          item_handlers={
            "state": ocp.StandardCheckpointHandler(),
            "input": grain_checkpoint.CheckpointHandler(),
            "config": ocp.JsonCheckpointHandler(),
            "fingerprints": ocp.JsonCheckpointHandler(),
          },
        )
    return self._writer

  def _mend(self) -> None:
    """Makes the directory one that Orbax can continue."""
    for step in self._damaged:
      _move_aside(self.directory / str(step))
    # Opening reads the loss of every checkpoint.
    for step in self.steps:
      try:
        self._reader.held_out_loss(step)
      except DamagedError as error:
        logging.warning(
          "held-out loss of the checkpoint of step %d is unknown (%s): not"
          " taken for the best",
          step,
          error,
        )
        path = self.directory / str(step) / "metrics" / "metrics"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({LOSS: math.inf}))

  def _candidates(self, step: int | None) -> list[int]:
    """The steps to try, the same in every process."""
    steps = self.steps
    if not steps:
      raise ValueError(
        f"no checkpoint in {self.directory}: check the path, or start a new run"
      )
    if step is not None and step not in steps:
      raise ValueError(
        f"no checkpoint of step {step} in {self.directory}: it has "
        f"{', '.join(map(str, steps))}"
      )
    return steps[::-1] if step is None else [step]

  def _unreadable(self, damaged: Mapping[int, DamagedError]) -> ValueError:
    found = "; ".join(
      f"step {step}: {error}" for step, error in damaged.items()
    )
    return ValueError(
      f"no checkpoint in {self.directory} can be read ({found}): restore the"
      " files from a copy, or start a new run in another workdir"
      if len(damaged) == len(self.steps)
      else f"checkpoint in {self.directory} is damaged ({found}): choose"
      " another step, or none for the latest that is whole"
    )


def _preservation(keep: int) -> policies.PreservationPolicy:
  return policies.AnyPreservationPolicy(
    [
      policies.LatestN(keep),
      # The policy keeps the last of its order: here the lowest loss.
      policies.BestN(
        get_metric_fn=lambda metrics: metrics[LOSS], reverse=True, n=1
      ),
    ]
  )


def _move_aside(path: pathlib.Path) -> None:
  """Renames a damaged checkpoint: another of its step is to be saved."""
  aside, number = path.with_name(f"{path.name}.damaged"), 1
  while aside.exists():
    number += 1
    aside = path.with_name(f"{path.name}.damaged-{number}")
  path.rename(aside)
  logging.warning("moved the damaged checkpoint %s to %s", path, aside)


def saved_steps(directory: str | os.PathLike[str]) -> list[int]:
  """The steps that have a complete checkpoint, ascending; creates nothing."""
  directory = pathlib.Path(directory)
  if not directory.exists():
    return []
  return sorted(ocp.utils.checkpoint_steps(directory.absolute()))


def config_differences(
  saved: Mapping[str, Any], current: Mapping[str, Any], *, prefix: str = ""
) -> list[str]:
  """The fields in which two nested configs differ, as "a.b: old -> new"."""
  differences = []
  for key in sorted(saved.keys() | current.keys()):
    old, new = saved.get(key), current.get(key)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
      differences += config_differences(old, new, prefix=f"{prefix}{key}.")
    elif _as_json(old) != _as_json(new):
      differences.append(f"{prefix}{key}: {old!r} -> {new!r}")
  return differences


def _as_json(value: Any) -> Any:
  return list(value) if isinstance(value, tuple) else value
