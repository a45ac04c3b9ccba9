"""Ends a process whose peers let it wait for ever.

A dead process is missed by its heartbeats. One that lives but hangs, on a file
system that does not answer for example, still has them, while the others wait
for it in a collective operation, which on a GPU has no timeout.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

import jax

EXIT_CODE = 70  # of sysexits.h: an internal error


@contextlib.contextmanager
def watch_peers(timeout_s: float) -> Iterator[Callable[[str], None]]:
  """Watches in the block, if there are peers.

  Args:
    timeout_s: The longest between two reports, in seconds.

  Yields:
    A function that reports what was finished.
  """
  if jax.process_count() == 1:
    yield lambda _: None
    return
  with Watchdog(timeout_s) as watchdog:
    yield watchdog.report


class Watchdog:
  """Ends the process if nothing was reported for too long.

  Use it as a context manager, from one thread.
  """

  def __init__(
    self,
    timeout_s: float,
    *,
    end: Callable[[int], None] = os._exit,
  ):
    """Prepares to watch.

    Args:
      timeout_s: The longest between two reports, in seconds.
      end: Is called with the exit code. The usual exit would wait for those
        who do not come.
    """
    self._timeout_s = timeout_s
    self._end = end
    self._last = "the start"
    self._reported = threading.Event()
    self._done = False
    self._thread = threading.Thread(target=self._watch, daemon=True)

  def report(self, what: str) -> None:
    """Says that something was finished."""
    self._last = what
    self._reported.set()

  def __enter__(self) -> "Watchdog":
    self._thread.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._done = True
    self._reported.set()
    self._thread.join()

  def _watch(self) -> None:
    while not self._done:
      if not self._reported.wait(self._timeout_s):
        print(
          f"error: nothing was finished for {self._timeout_s:g} s after"
          f" {self._last}: another process may hang, so this one ends. Resume"
          " all of them from the last checkpoint, with a larger stall_timeout_s"
          " if a step, evaluation or checkpoint takes so long",
          file=sys.stderr,
          flush=True,
        )
        self._end(EXIT_CODE)
        return
      self._reported.clear()
