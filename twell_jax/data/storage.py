"""Cached results on disk that are either complete or absent.

What is expensive to make (a trained tokenizer, a tokenised split) lives in a
directory of its own. The directory is filled under a temporary name and renamed
when it is complete, so an interrupted run leaves nothing that a later run would
take for a result, and two processes that make the same thing do not disturb
each other.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator

# What POSIX systems answer when the target of a rename already holds files.
_TARGET_IS_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)


@contextlib.contextmanager
def complete_directory(directory: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a directory to fill that gets its real name only on success.

  Args:
    directory: the name it gets at the end. If another process was faster, its
      result stays and ours is dropped.

  Yields:
    The path of a new, empty directory beside it.
  """
  directory.parent.mkdir(parents=True, exist_ok=True)
  # Not of tempfile, whose directories nobody else may read.
  partial = directory.with_name(f"incomplete-{directory.name}-{uuid.uuid4()}")
  partial.mkdir()
  try:
    yield partial
    try:
      os.rename(partial, directory)
    except OSError as error:
      if error.errno not in _TARGET_IS_TAKEN:
        raise
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def fingerprint(*parts: object) -> str:
  """Returns 16 hexadecimal digits that name what a result was made from.

  Args:
    *parts: values that JSON can hold; any change in them changes the digits.
  """
  text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]
