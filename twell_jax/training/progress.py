"""What a run shows and records while it goes: progress bar and metrics."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from tqdm.auto import tqdm

from twell_jax.training import distributed
from twell_jax.training.evaluation import HeldOut
from twell_jax.training.health import Health
from twell_jax.training.metrics import (
  MetricsWriter,
  StepSummary,
  to_record,
)
from twell_jax.training.step import StepStatistics


class _Pending(NamedTuple):
  """A step that may still be running on the device."""

  step: int
  health: Health
  summary: StepSummary | None
  tokens: int


class ProgressReport:
  """Progress bar and records, one step behind the device.

  A step's numbers are fetched when the next step has been handed to the device,
  which therefore never waits for the host.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    *,
    steps: int,
    start_step: int,
    log_every_steps: int,
    summarize: Callable[[StepStatistics], StepSummary],
    check: Callable[[int, Health], None],
  ):
    """Opens the files.

    Args:
      workdir: Where they are.
      steps: Updates of the whole run.
      start_step: Updates made before; later records are removed.
      log_every_steps: Steps between records of kind "train".
      summarize: Makes the numbers of a record.
      check: Is called with every step and its health, in order; what it raises
        ends the run.
    """
    self._check = check
    self._steps = steps
    self._summarize = summarize
    self._log_every_steps = log_every_steps
    # One process writes for all.
    self._writer = (
      MetricsWriter(workdir, start_step=start_step)
      if distributed.is_first()
      else None
    )
    self._bar = tqdm(
      total=steps,
      initial=start_step,
      unit="step",
      # In a log file each refresh is a line.
      mininterval=0.5 if sys.stderr.isatty() else 10.0,
      disable=self._writer is None,
    )
    self._pending: _Pending | None = None
    self._clock = _TokenClock()

  def __enter__(self) -> "ProgressReport":
    return self

  def __exit__(self, *exception: object) -> None:
    self._bar.close()
    if self._writer is not None:
      self._writer.__exit__(*exception)

  def add(self, step: int, statistics: StepStatistics, *, tokens: int) -> None:
    """Takes a step that was just handed to the device; reports the last one."""
    due = step % self._log_every_steps == 0
    due = due or step == self._steps
    pending = _Pending(
      step,
      Health.of(statistics),
      self._summarize(statistics) if due else None,
      tokens,
    )
    self._flush()
    self._pending = pending

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Reports every step so far; what happens inside is not training time."""
    self._flush()
    with self._clock.stopped():
      yield

  def held_out(self, step: int, evaluation: HeldOut) -> None:
    """Records an evaluation."""
    if self._writer is None:
      return
    self._writer.write("held_out", step=step, values=evaluation._asdict())
    self._bar.write(
      f"step {step}: held-out loss {evaluation.loss:.4f}, "
      f"{evaluation.active_fraction:.2%} active",
      file=sys.stderr,
    )

  def _flush(self) -> None:
    if self._pending is None:
      return
    pending, self._pending = self._pending, None
    health = jax.device_get(pending.health)  # Waits for the step.
    self._check(pending.step, health)
    self._clock.count(pending.tokens)
    self._bar.update()
    if pending.summary is None or self._writer is None:
      return
    record = to_record(pending.summary)
    progress = {
      "loss": f"{health.loss:.3f}",
      "active": f"{record['active_fraction']:.2%}",
    }
    tokens_per_s = self._clock.read()
    if tokens_per_s is not None:
      record["tokens_per_s"] = tokens_per_s
      progress["tokens/s"] = f"{tokens_per_s:,.0f}"
    self._writer.write("train", step=pending.step, values=record)
    self._bar.set_postfix(progress)


class _TokenClock:
  """Tokens per second of training, between two readings.

  It starts when the first step is done: that one includes the compilation.
  """

  def __init__(self):
    self._tokens = 0
    self._training_s = 0.0
    self._since_s: float | None = None

  def count(self, tokens: int) -> None:
    """Notes that a step of so many tokens is done."""
    if self._since_s is None:
      self._since_s = time.perf_counter()
    else:
      self._tokens += tokens

  def read(self) -> float | None:
    """The rate since the last reading; None if no step was timed."""
    if self._since_s is None or not self._tokens:
      return None
    now_s = time.perf_counter()
    tokens_per_s = self._tokens / (self._training_s + now_s - self._since_s)
    self._tokens, self._training_s, self._since_s = 0, 0.0, now_s
    return tokens_per_s

  @contextlib.contextmanager
  def stopped(self) -> Iterator[None]:
    """Does not count the time spent inside."""
    started_s = time.perf_counter()
    try:
      yield
    finally:
      self._training_s -= time.perf_counter() - started_s
