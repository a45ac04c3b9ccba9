"""What a run reports: summaries of a step, and the files they are written to.

`metrics.jsonl` holds one object per line with "kind" ("train" or "held_out"),
"step" (updates made so far) and the numbers; per-layer numbers are lists. The
same numbers go to TensorBoard event files beside it. Continuing a run at step s
first removes what was written after s, so that no step is recorded twice.
"""

import contextlib
import functools
import os
import pathlib
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jsonlines
from jaxtyping import Array, Float, Int32
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import RecordWriter

from twell_jax.training import disk
from twell_jax.training.step import StepStatistics

JSONL_NAME = "metrics.jsonl"
FREQUENT_RATE = 0.01

Record = dict[str, Any]


class StepSummary(NamedTuple):
  """The numbers of a step that are written down.

  Attributes:
    loss: The objective.
    cross_entropy: Mean over target weights, in nats.
    gradient_norm: Global norm before clipping.
    learning_rate: The one of this update.
    l1_coefficient: The λ of this update.
    active_fraction: Mean active neurons per token over d_ff, all layers.
    l1: Mean over tokens of Σ|h|, per layer.
    active_mean: Active neurons per token, per layer; so are the next three.
    active_p50: Median.
    active_p95: 95th percentile.
    active_max: Largest.
    alive_fraction: Neurons active on at least one token of the step, per layer.
    dead_fraction: Neurons silent during the window of tokens that ends with the
      step (`DeadNeuronOptions`), per layer; 0 until there were as many.
    reinitialized: Neurons that the step re-initialised, per layer.
    overflowed: Tokens beyond a format's capacity, per layer; where the neurons
      are split over devices, the mean of these. So is the next.
    frequent_neurons: Neurons active on more than `FREQUENT_RATE` of the step's
      tokens, per layer: about as many as pay as hot neurons on a GPU
      (`twell_jax.choose_hot_neurons` says it for any device).
    hot_share: Share of the activations that are hot neurons', per layer; 0
      where there are none. It falls as the neurons' order becomes old.
    dense_fraction: Tokens computed by dense products, over all, per layer: 1
      while a layer is too active for the sparse ones, then 0, or the share of
      the tokens that overflow.
    skipped_updates: Updates of the run so far that were left out because their
      loss or gradient was not finite.
  """

  loss: Float[Array, ""]
  cross_entropy: Float[Array, ""]
  gradient_norm: Float[Array, ""]
  learning_rate: Float[Array, ""]
  l1_coefficient: Float[Array, ""]
  active_fraction: Float[Array, ""]
  l1: Float[Array, "layers"]
  active_mean: Float[Array, "layers"]
  active_p50: Float[Array, "layers"]
  active_p95: Float[Array, "layers"]
  active_max: Float[Array, "layers"]
  alive_fraction: Float[Array, "layers"]
  dead_fraction: Float[Array, "layers"]
  reinitialized: Float[Array, "layers"]
  overflowed: Float[Array, "layers"]
  frequent_neurons: Float[Array, "layers"]
  hot_share: Float[Array, "layers"]
  dense_fraction: Float[Array, "layers"]
  skipped_updates: Int32[Array, ""]


@functools.partial(jax.jit, static_argnames=("hot_neurons", "shards"))
def summarize(
  statistics: StepStatistics, *, hot_neurons: int = 0, shards: int = 1
) -> StepSummary:
  """Reduces the statistics of a step, on device.

  Args:
    statistics: What the step measured.
    hot_neurons: Of the model.
    shards: Slices in which the neurons lie on the mesh, each of which begins
      with its share of the hot ones.
  """
  layers, d_ff = statistics.fired.shape
  active = jnp.moveaxis(statistics.active, 1, 0).reshape(layers, -1)
  active = active.astype(jnp.float32)
  active_mean = jnp.mean(active, axis=1)
  percentiles = jnp.percentile(active, jnp.array([50.0, 95.0]), axis=1)
  # Not as integers: a layer's sum over a large batch does not fit them.
  fired = statistics.fired.astype(jnp.float32)
  hot = fired.reshape(layers, shards, -1)[:, :, : hot_neurons // shards]
  return StepSummary(
    loss=statistics.loss,
    cross_entropy=statistics.cross_entropy,
    gradient_norm=statistics.gradient_norm,
    learning_rate=statistics.learning_rate,
    l1_coefficient=statistics.l1_coefficient,
    active_fraction=jnp.mean(active_mean) / d_ff,
    l1=statistics.l1,
    active_mean=active_mean,
    active_p50=percentiles[0],
    active_p95=percentiles[1],
    active_max=jnp.max(active, axis=1),
    alive_fraction=jnp.mean((fired > 0).astype(jnp.float32), axis=1),
    dead_fraction=statistics.dead.astype(jnp.float32) / d_ff,
    reinitialized=statistics.reinitialized.astype(jnp.float32),
    overflowed=statistics.overflowed.astype(jnp.float32) / shards,
    frequent_neurons=jnp.sum(
      (fired > FREQUENT_RATE * active.shape[1]).astype(jnp.float32), axis=1
    ),
    hot_share=jnp.sum(hot, axis=(1, 2))
    / jnp.maximum(jnp.sum(fired, axis=1), 1.0),
    dense_fraction=statistics.dense_tokens.astype(jnp.float32)
    / (shards * active.shape[1]),
    skipped_updates=statistics.skipped_updates,
  )


def to_record(summary: NamedTuple) -> Record:
  """Fetches arrays and makes them plain numbers and lists."""
  fetched = jax.device_get(summary)._asdict()
  return {name: value.tolist() for name, value in fetched.items()}


class MetricsWriter:
  """Writes records to `metrics.jsonl` and to TensorBoard.

  Use it as a context manager. Of several processes only one should have one.
  """

  def __init__(self, directory: str | os.PathLike[str], *, start_step: int):
    """Opens the files to continue after start_step.

    Args:
      directory: Where they are, created if absent.
      start_step: Records of later steps are removed: the run is about to write
        them again. 0 removes all.

    Raises:
      OSError: The disk refuses; so do the other methods.
    """
    self._directory = pathlib.Path(directory)
    self._open = contextlib.ExitStack()
    with self._writing():
      self._directory.mkdir(parents=True, exist_ok=True)
      path = self._directory / JSONL_NAME
      kept = [r for r in read_metrics(directory) if r["step"] <= start_step]
      kept = kept if start_step else []
      # Replaced in one go: an interruption leaves the old file or the new one.
      rewritten = path.with_suffix(".jsonl.tmp")
      with jsonlines.open(rewritten, "w") as lines:
        lines.write_all(kept)
      rewritten.replace(path)
      self._lines = jsonlines.open(path, "a", flush=True)
      self._open.callback(self._lines.close)
      board = self._directory / "tensorboard"
      board.mkdir(exist_ok=True)
      # Its SummaryWriter writes in a thread, which a full disk ends, and then
      # waits for that thread for ever.
      name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
      self._board = RecordWriter(str(board / name))
      self._open.callback(self._board.close)
      self._event(0, file_version="brain.Event:2")
      self._event(
        start_step + 1,
        # Tells readers to forget what earlier files have of these steps.
        session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START),
      )

  def write(self, kind: str, *, step: int, values: Mapping[str, Any]) -> None:
    """Writes one record: numbers, and lists with a number for each layer."""
    scalars: dict[str, float] = {}
    for name, value in values.items():
      if isinstance(value, list):
        for layer, number in enumerate(value):
          scalars[f"{kind}/{name}/layer_{layer}"] = number
      else:
        scalars[f"{kind}/{name}"] = value
    summary = summary_pb2.Summary(
      value=[
        summary_pb2.Summary.Value(tag=tag, simple_value=number)
        for tag, number in scalars.items()
      ]
    )
    with self._writing():
      self._lines.write({"kind": kind, "step": step, **values})
      self._event(step, summary=summary)

  def __enter__(self) -> "MetricsWriter":
    return self

  def __exit__(self, *exception: object) -> None:
    with self._writing():
      self._open.close()

  def _event(self, step: int, **content: Any) -> None:
    event = event_pb2.Event(wall_time=time.time(), step=step, **content)
    self._board.write(event.SerializeToString())

  def _writing(self):
    return disk.writing("metrics", self._directory)


def read_metrics(
  directory: str | os.PathLike[str], *, kind: str | None = None
) -> list[Record]:
  """The records of a run, in the order in which they were written.

  Args:
    directory: The one given to `MetricsWriter`.
    kind: "train" or "held_out"; None for both.

  Returns:
    The records; none if nothing was written yet.
  """
  path = pathlib.Path(directory) / JSONL_NAME
  if not path.exists():
    return []
  with jsonlines.open(path) as lines:
    # A killed run may leave half a line at the end, of a step that is lost.
    records = list(lines.iter(type=dict, skip_invalid=True))
  return [r for r in records if kind is None or r["kind"] == kind]
