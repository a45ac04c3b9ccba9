"""Stopping a run between two steps when a signal asks for it.

Of several processes, one that a signal reaches stops all of them after the same
step: `distributed.make_vote` makes one decision of their wishes.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

from absl import logging


class Interrupt:
  """Whether somebody asked the run to stop."""

  requested = False


@contextlib.contextmanager
def catch_interrupts() -> Iterator[Interrupt]:
  """The first SIGINT or SIGTERM asks to stop, the next acts as it used to."""
  interrupt = Interrupt()
  if threading.current_thread() is not threading.main_thread():
    yield interrupt  # Python delivers signals to the main thread only.
    return
  previous = {
    number: signal.getsignal(number)
    for number in (signal.SIGINT, signal.SIGTERM)
  }

  def restore() -> None:
    for number, handler in previous.items():
      signal.signal(number, handler)

  def request(number: int, frame: object) -> None:
    del frame
    interrupt.requested = True
    restore()
    logging.warning(
      "%s: saving and ending soon; once more ends without saving",
      signal.Signals(number).name,
    )

  for number in previous:
    signal.signal(number, request)
  try:
    yield interrupt
  finally:
    restore()
