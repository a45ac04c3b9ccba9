"""Runs stages in a process of its own, and says which one it was that hung.

A kernel that hangs or faults takes its process with it: nothing more can be
done on the device from there. So a worker process runs the stages and tells of
each before it begins and when it has ended. If it says nothing for longer than
a stage may take, or ends before its time, the stage in question is recorded as
HUNG or DIED, and a new worker goes on with the others. The record is written
after every stage, so that a run that is killed keeps what it had.
"""

import json
import os
import pathlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# A worker's start: the imports, and the device's first use.
_START_LIMIT_S = 120.0
# The driver takes a moment to end a process whose kernel hangs.
_KILL_LIMIT_S = 30.0


class RefusedError(Exception):
  """The worker will not run on this device; the message says why."""


class Budget(NamedTuple):
  """When it began and when it is spent, in seconds of time.time()."""

  begins: float
  ends: float


class Record:
  """What is known so far, in a JSON file that is always whole.

  Attributes:
    stages: Results by name, in the order of running.
    planned: Names of all stages, most important first.
    device: What the worker says of the device.
  """

  def __init__(self, path: pathlib.Path, header: Mapping[str, Any]):
    self._path = path
    self._header = dict(header)
    self.stages: dict[str, dict[str, Any]] = {}
    self.planned: list[str] = []
    self.device: dict[str, Any] = {}

  @property
  def left_out(self) -> list[str]:
    """Planned stages without a result."""
    return [name for name in self.planned if name not in self.stages]

  def as_dict(self) -> dict[str, Any]:
    """What the file says."""
    return {
      **self._header,
      "device": self.device,
      "stages": [
        {"name": name, **result} for name, result in self.stages.items()
      ],
      "left_out": self.left_out,
    }

  def write(self, more: Mapping[str, Any] | None = None) -> None:
    """Replaces the file, adding the given fields."""
    text = json.dumps(self.as_dict() | dict(more or {}), indent=1)
    temporary = self._path.with_suffix(".partial")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, self._path)


def supervise(
  command: Sequence[str],
  request: Mapping[str, Any],
  *,
  record: Record,
  budget: Budget,
  on_result: Callable[[str, Mapping[str, Any]], None],
  start_limit_s: float = _START_LIMIT_S,
) -> None:
  """Runs workers until all stages have a result or the budget is spent.

  Args:
    command: Starts a worker; its last argument will be the request as JSON.
    request: What the worker is asked for, whatever it is. Added to it are
      `events`, the descriptor to which it writes an event a line; `skip`,
      names of stages; `begins` and `ends`, the budget.
    record: Where results go.
    budget: After it the worker is killed.
    on_result: Called with each stage's name and result.
    start_limit_s: Until a worker's first event.

  Raises:
    RefusedError: The worker refuses the device.
    RuntimeError: A worker ended before it had begun a stage.
  """
  finished = False
  while not finished and time.time() < budget.ends:
    with _Worker(command, request, record.stages, budget) as worker:
      finished = _Watch(worker, record, budget, on_result).run(start_limit_s)


class _Worker:
  """A worker process and its events; ends with the block."""

  def __init__(
    self,
    command: Sequence[str],
    request: Mapping[str, Any],
    skip: Iterable[str],
    budget: Budget,
  ):
    read, write = os.pipe()
    given = {
      **request,
      **budget._asdict(),
      "events": write,
      "skip": list(skip),
    }
    self.process = subprocess.Popen(
      [*command, json.dumps(given)], pass_fds=(write,)
    )
    os.close(write)
    self._pipe = os.fdopen(read, encoding="utf-8")
    self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self) -> None:
    """Queues the events, and None after the last."""
    for line in self._pipe:
      # A process that is killed may leave half a line.
      if line.endswith("\n"):
        self.events.put(json.loads(line))
    self.events.put(None)

  def __enter__(self) -> "_Worker":
    return self

  def __exit__(self, *_: object) -> None:
    self.process.kill()  # does nothing to one that has ended
    self.process.wait(timeout=_KILL_LIMIT_S)
    self._reader.join(timeout=_KILL_LIMIT_S)
    self._pipe.close()


class _Watch:
  """Follows one worker; `run` returns whether no other one is needed."""

  def __init__(
    self,
    worker: _Worker,
    record: Record,
    budget: Budget,
    on_result: Callable[[str, Mapping[str, Any]], None],
  ):
    self._worker, self._record, self._budget = worker, record, budget
    self._on_result = on_result
    self._stage: str | None = None
    self._began = time.time()
    self._has_begun_any = False

  def run(self, start_limit_s: float) -> bool:
    limit_s = start_limit_s
    while True:
      ends = min(self._began + limit_s, self._budget.ends)
      try:
        event = self._worker.events.get(timeout=max(0, ends - time.time()))
      except queue.Empty:
        if time.time() >= self._budget.ends:
          return True  # the stage, if any, remains among those left out
        self._fail("HUNG", f"no end within {limit_s:.0f} s")
        return False
      if event is None:
        return self._ended()
      match event["event"]:
        case "refused":
          raise RefusedError(event["why"])
        case "device":
          self._record.device = event["device"]
        case "plan":
          self._record.planned = event["stages"]
        case "begin":
          self._stage, self._has_begun_any = event["name"], True
          limit_s = event["limit_s"]
        case "end":
          self._keep(event["result"])
      self._began = time.time()

  def _ended(self) -> bool:
    code = self._worker.process.wait(timeout=_KILL_LIMIT_S)
    if code == 0:
      return True
    if self._stage is not None:
      self._fail("DIED", f"the process ended with exit code {code}")
    elif not self._has_begun_any:
      raise RuntimeError(
        f"the worker ended with exit code {code} before any stage: its"
        " messages are above"
      )
    return False

  def _fail(self, status: str, message: str) -> None:
    if self._stage is None:
      if not self._has_begun_any:
        raise RuntimeError(f"the worker does not start: {message}")
      return
    self._keep({"status": status, "message": message})

  def _keep(self, result: Mapping[str, Any]) -> None:
    assert self._stage is not None
    seconds = round(time.time() - self._began, 2)
    kept = {**result, "seconds": seconds}
    self._record.stages[self._stage] = kept
    self._record.write()
    self._on_result(self._stage, kept)
    self._stage = None
