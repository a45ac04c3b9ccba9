"""Reads one checkpoint, and finds out whether it is whole.

Each process reads by itself and without waiting for the others, so that a file
that only one of them cannot read is an error there and not a deadlock. Whether
all could is agreed upon afterwards; what was read is then compared with the
fingerprints that were saved with it.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import grain
import jax
import orbax.checkpoint as ocp
from absl import logging
from grain import checkpoint as grain_checkpoint
from jaxtyping import PyTree

from twell_jax.training import distributed
from twell_jax.training.fingerprints import (
  json_fingerprint,
  state_fingerprints,
)
from twell_jax.training.sharding import path_name
from twell_jax.training.state import TRACKED, TrainState, with_tracking

LOSS = "held_out_loss"


class DamagedError(ValueError):
  """A checkpoint that cannot be read, or whose numbers have changed."""


class Restored(NamedTuple):
  """What a checkpoint held.

  Attributes:
    state: The state, on the mesh that was asked for.
    config: The config of the run that wrote it.
  """

  state: TrainState
  config: Mapping[str, Any]


class _Read(NamedTuple):
  """What this process read.

  Attributes:
    fields: Those of the state.
    config: The config of the run.
    positions: Of the input, for each process that saved it.
    fingerprints: Of all these; None in early checkpoints.
  """

  fields: Mapping[str, Any]
  config: Mapping[str, Any]
  positions: list[Any]
  fingerprints: Mapping[str, Any] | None


class CheckpointReader:
  """Reads checkpoints of a directory by their steps; writes nothing."""

  def __init__(self, directory: pathlib.Path):
    self._directory = directory
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
      primary_host=here, active_processes={here}
    )
    self._checkpointer = ocp.Checkpointer(
      ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        state=ocp.StandardCheckpointHandler(multiprocessing_options=alone),
        # Not used: the files are read below, whichever process wrote them.
        input=grain_checkpoint.CheckpointHandler(),
        config=ocp.JsonCheckpointHandler(),
        fingerprints=ocp.JsonCheckpointHandler(),
        metrics=ocp.JsonCheckpointHandler(filename="metrics"),
      ),
      multiprocessing_options=alone,
    )

  def restore(
    self,
    step: int,
    abstract: TrainState,
    batches: grain.DatasetIterator | None,
  ) -> Restored:
    """Reads a checkpoint; moves `batches` to its position once all is well.

    Raises:
      DamagedError: Some process could not read it, or it has changed.
      ValueError: It is of another model, or of an input that so many processes
        cannot continue.
    """
    shapes, problem = self._attempt(self._shapes, step)
    if not distributed.all_agree(shapes is not None) or shapes is None:
      raise DamagedError(problem)
    self._check_parameters(abstract.params, shapes["params"], step)
    absent = [name for name in TRACKED if name not in shapes]
    wanted = {
      name: value
      for name, value in abstract._asdict().items()
      if name not in absent
    }
    read, problem = self._attempt(self._read, step, wanted)
    if not distributed.all_agree(read is not None) or read is None:
      raise DamagedError(problem)
    self._check_state(read, step)
    if batches is not None:
      batches.set_state(self._own_position(read.positions, step))
    if absent:
      logging.warning(
        "checkpoint of step %d has no %s: begun anew", step, ", ".join(absent)
      )
    return Restored(with_tracking(read.fields, abstract), read.config)

  def config(self, step: int) -> Mapping[str, Any]:
    """The config saved with a checkpoint; raises DamagedError."""
    return self._item("config", step)

  def held_out_loss(self, step: int) -> float:
    """The loss saved with a checkpoint; raises DamagedError."""
    loss = self._item("metrics", step).get(LOSS)
    if loss is None:
      raise DamagedError("its held-out loss is missing")
    return loss

  def _item(self, name: str, step: int) -> Mapping[str, Any]:
    def read(step):
      args = ocp.args.Composite(**{name: ocp.args.JsonRestore()})
      return self._checkpointer.restore(self._path(step), args=args)[name]

    item, problem = self._attempt(read, step)
    if item is None:
      raise DamagedError(problem)
    return item

  def _attempt(self, read, *arguments):
    """What `read` returns or None, and what is wrong."""
    try:
      return read(*arguments), "another process could not read it"
    # A damaged file makes Orbax raise anything, Exception itself included.
    except Exception as error:
      text = " ".join(f"{type(error).__name__}: {error}".split())
      return None, text if len(text) <= 300 else f"{text[:300]}…"

  def _path(self, step: int) -> pathlib.Path:
    return self._directory / str(step)

  def _shapes(self, step: int) -> Mapping[str, Any]:
    shapes = self._checkpointer.metadata(self._path(step)).item_metadata[
      "state"
    ]
    if shapes is None:
      raise DamagedError("the shapes of its arrays are missing")
    return shapes

  def _read(self, step: int, wanted: Mapping[str, Any]) -> _Read:
    path = self._path(step)
    args: dict[str, Any] = {
      "state": ocp.args.StandardRestore(dict(wanted)),
      "config": ocp.args.JsonRestore(),
    }
    # Early checkpoints have none.
    has_fingerprints = (path / "fingerprints").exists()
    if has_fingerprints:
      args["fingerprints"] = ocp.args.JsonRestore()
    restored = self._checkpointer.restore(path, args=ocp.args.Composite(**args))
    read = _Read(
      restored["state"],
      restored["config"],
      [
        json.loads(file.read_text())
        for file in sorted(
          (path / "input").glob("process_*-of-*.json"), key=_process
        )
      ],
      restored["fingerprints"] if has_fingerprints else None,
    )
    if not read.positions:
      raise DamagedError("the position of the input is missing")
    if read.fingerprints is not None:
      for name, value in (
        ("config", read.config),
        ("input", read.positions[0]),
      ):
        if read.fingerprints[name] != json_fingerprint(value):
          raise DamagedError(f"its {name} is not what was saved")
    return read

  def _check_state(self, read: _Read, step: int) -> None:
    if read.fingerprints is None:
      logging.warning(
        "checkpoint of step %d is from before there were fingerprints: what it"
        " holds is not verified",
        step,
      )
      return
    found = state_fingerprints(read.fields).sums
    saved = read.fingerprints["state"]
    changed = sorted(
      name
      for name in saved.keys() | found.keys()
      # One that is read as another type has other bits.
      if _dtype(saved.get(name)) == _dtype(found.get(name))
      and saved.get(name) != found.get(name)
    )
    if changed:
      raise DamagedError(
        f"{len(changed)} of its arrays are not what was saved, {changed[0]}"
        " the first"
      )

  def _own_position(self, positions: list[Any], step: int) -> Any:
    if len(positions) == jax.process_count():
      return positions[jax.process_index()]
    if any(position != positions[0] for position in positions):
      raise ValueError(
        f"checkpoint {self._path(step)} has another position of the input for"
        f" each of its {len(positions)} processes: resume with as many, not"
        f" {jax.process_count()}"
      )
    return positions[0]

  def _check_parameters(
    self, abstract: PyTree, saved: PyTree, step: int
  ) -> None:
    saved, wanted = _shape_by_name(saved), _shape_by_name(abstract)
    for name in wanted | saved:
      if saved.get(name) != wanted.get(name):
        raise ValueError(
          f"checkpoint {self._path(step)} has parameter {name} of "
          f"shape {saved.get(name, 'none')} and the model has "
          f"{wanted.get(name, 'none')}: use the config it was trained with "
          "or another directory"
        )


def _process(file: pathlib.Path) -> int:
  """The process that wrote process_I-of-N.json."""
  return int(file.name.removeprefix("process_").split("-", 1)[0])


def _dtype(fingerprint: str | None) -> str | None:
  return None if fingerprint is None else fingerprint.split(":", 1)[0]


def _shape_by_name(tree: PyTree) -> dict[str, tuple[int, ...]]:
  return {
    path_name(path): tuple(leaf.shape)
    for path, leaf in jax.tree.leaves_with_path(tree)
  }
