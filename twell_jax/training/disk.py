"""What is said when a disk refuses to be written to."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def writing(what: str, directory: str | os.PathLike[str]) -> Iterator[None]:
  """Makes an error in the block one that says where, how full, what to do.

  Args:
    what: Is being written.
    directory: Where.

  Raises:
    OSError: Writing failed.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError:
    raise  # Of processes that wait for each other, not of the disk.
  # Storage libraries raise ValueError, and Exception itself.
  except Exception as error:
    raise OSError(
      f"{what} could not be written to {directory}, where"
      f" {_free(pathlib.Path(directory))} are free ({_short(error)}). Earlier"
      " checkpoints are untouched: make room, or mend what it says, and resume"
    ) from error


def _free(directory: pathlib.Path) -> str:
  while not directory.exists():
    directory = directory.parent
  return f"{shutil.disk_usage(directory).free / 1e9:.3f} GB"


def _short(error: Exception) -> str:
  text = " ".join(str(error).split())
  return text if len(text) <= 300 else f"{text[:300]}…"
