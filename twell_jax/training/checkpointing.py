"""Checkpoints of a run, by Orbax: written in the background, restored anywhere.

A checkpoint of step s holds the state after s updates, the position of the
input after the batches of these s updates, and the config of the run as JSON.
The latest few are kept, and the one with the lowest held-out loss.
"""

import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import grain
import jax
import orbax.checkpoint as ocp
from absl import logging
from grain import checkpoint as grain_checkpoint
from orbax.checkpoint import checkpoint_managers as policies

from twell_jax.training.sharding import path_name
from twell_jax.training.state import TRACKED, TrainState, with_tracking

_LOSS = "held_out_loss"


class Restored(NamedTuple):
  """What a checkpoint held.

  Attributes:
    state: The state, on the mesh that was asked for.
    config: The config of the run that wrote it.
  """

  state: TrainState
  config: Mapping[str, Any]


class Checkpoints:
  """The checkpoints in one directory.

  Use it as a context manager: leaving it waits for the last write.
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
    options = ocp.CheckpointManagerOptions(
      best_fn=_loss,
      best_mode="min",
      preservation_policy=policies.AnyPreservationPolicy(
        [
          policies.LatestN(keep),
          # The policy keeps the last of its order: here the lowest loss.
          policies.BestN(get_metric_fn=_loss, reverse=True, n=1),
        ]
      ),
    )
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=options,
      # Named here so that metadata can be read before anything is restored.
      item_handlers={
        "state": ocp.StandardCheckpointHandler(),
        "input": grain_checkpoint.CheckpointHandler(),
        "config": ocp.JsonCheckpointHandler(),
      },
    )

  @property
  def steps(self) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    return sorted(self._manager.all_steps())

  @property
  def best_step(self) -> int | None:
    """The step with the lowest held-out loss; None without checkpoints."""
    return self._manager.best_step()

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
    """
    loss = math.inf if held_out_loss is None else held_out_loss
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        input=grain_checkpoint.CheckpointSave(batches),
        config=ocp.args.JsonSave(dict(config)),
      ),
      metrics={_LOSS: loss},
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
      step: Which checkpoint; None for the latest.

    Returns:
      The state and the config that was saved with it.

    Raises:
      ValueError: There is no such checkpoint, or its parameters have another
        shape. Nothing has been loaded then.
    """
    step = self._existing_step(step)
    metadata = self._manager.item_metadata(step)["state"]
    self._check_parameters(abstract.params, metadata["params"], step)
    absent = [name for name in TRACKED if name not in metadata]
    wanted = {
      name: value
      for name, value in abstract._asdict().items()
      if name not in absent
    }
    args = {
      "state": ocp.args.StandardRestore(wanted),
      "config": ocp.args.JsonRestore(),
    }
    if batches is not None:
      args["input"] = grain_checkpoint.CheckpointRestore(batches)
    restored = self._manager.restore(step, args=ocp.args.Composite(**args))
    if absent:
      logging.warning(
        "checkpoint of step %d has no %s: begun anew", step, ", ".join(absent)
      )
    state = with_tracking(restored["state"], abstract)
    return Restored(state, restored["config"])

  def config(self, *, step: int | None = None) -> Mapping[str, Any]:
    """The config saved with a checkpoint; with the latest if step is None."""
    return self._manager.restore(
      self._existing_step(step),
      args=ocp.args.Composite(config=ocp.args.JsonRestore()),
    )["config"]

  def wait(self) -> None:
    """Returns when everything saved is on disk."""
    self._manager.wait_until_finished()

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *exception: object) -> None:
    self._manager.close()

  def _existing_step(self, step: int | None) -> int:
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
    return steps[-1] if step is None else step

  def _check_parameters(self, abstract: Any, saved: Any, step: int) -> None:
    saved = _shapes(saved)
    wanted = _shapes(abstract)
    for name in wanted | saved:
      if saved.get(name) != wanted.get(name):
        raise ValueError(
          f"checkpoint {self.directory / str(step)} has parameter {name} of "
          f"shape {saved.get(name, 'none')} and the model has "
          f"{wanted.get(name, 'none')}: use the config it was trained with "
          "or another directory"
        )


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


def _loss(metrics: Mapping[str, float]) -> float:
  return metrics[_LOSS]


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  return {
    path_name(path): tuple(leaf.shape)
    for path, leaf in jax.tree.leaves_with_path(tree)
  }
