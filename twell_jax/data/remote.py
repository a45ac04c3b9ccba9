"""What readers of files raise, each in its own way, as a ValueError."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def read_errors(what: str, *, remedy: str) -> Iterator[None]:
  """Turns an error within the block into a ValueError of one line.

  Our own pass, since they say already what is wrong with the content.

  Args:
    what: Is read there; the message begins with it.
    remedy: What to do about it.
  """
  try:
    yield
  # A protocol's package has errors of its own, which may have no common base:
  # huggingface_hub raises those of its HTTP client, too.
  except Exception as error:
    # Those of libraries, as of pyarrow, are of classes derived from it.
    if type(error) is ValueError:
      raise
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    raise ValueError(f"{what} cannot be read ({reason}); {remedy}") from error
