"""Token ids in a file: written as they come, read where they are needed."""

import os
import pathlib
import tokenize
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
from jaxtyping import UInt

_DTYPES = (np.dtype(np.uint16), np.dtype(np.uint32))
# What numpy raises: it reads a header as Python, which may not even be tokens.
_DAMAGED_HEADER = (ValueError, TypeError, SyntaxError, tokenize.TokenError)


class TokenFile:
  """The ids of a .npy file, of which slices are read when they are asked for.

  The file is opened for each slice, not mapped: a file that vanishes or is cut
  short while a model trains is then an error that names it, and thousands of
  files need no descriptors.
  """

  def __init__(self, path: str | os.PathLike[str], *, vocab_size: int):
    """Reads the header.

    Args:
      path: Of the file.
      vocab_size: What ids that are read must be below.

    Raises:
      ValueError: The file is missing, is no list of ids, or has another size
        than its header says.
    """
    self.path = pathlib.Path(path)
    self._vocab_size = vocab_size
    try:
      with open(self.path, "rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        self._offset = file.tell()
        size = os.fstat(file.fileno()).st_size
    except (OSError, *_DAMAGED_HEADER) as error:
      raise ValueError(
        f"no token ids can be read from {self.path} ({error}):"
        f" {_remedy(self.path)}"
      ) from error
    if len(shape) != 1 or dtype not in _DTYPES:
      raise ValueError(
        f"{self.path} holds {dtype} {list(shape)}, not a list of token ids:"
        f" {_remedy(self.path)}"
      )
    expected = self._offset + shape[0] * dtype.itemsize
    if size != expected:
      raise ValueError(
        f"{self.path} has {size} bytes and by its header {expected}:"
        f" {_remedy(self.path)}"
      )
    self._len = shape[0]
    self.dtype = dtype

  def __len__(self) -> int:
    return self._len

  def __getitem__(self, where: slice) -> UInt[np.ndarray, "ids"]:
    start, stop, step = where.indices(self._len)
    if step != 1:
      raise ValueError(f"ids are read in runs, not by a step of {step}")
    count = max(stop - start, 0)
    try:
      with open(self.path, "rb", buffering=0) as file:
        ids = np.fromfile(
          file,
          self.dtype,
          count,
          offset=self._offset + start * self.dtype.itemsize,
        )
    except OSError as error:
      raise ValueError(
        f"the token ids in {self.path} are gone ({error}): {_remedy(self.path)}"
      ) from error
    if len(ids) != count:
      raise ValueError(
        f"{self.path} was cut short: ids {start} to {stop} are not there;"
        f" {_remedy(self.path)}"
      )
    if count and ids.max() >= self._vocab_size:
      raise ValueError(
        f"{self.path} is damaged: among ids {start} to {stop} is {ids.max()},"
        f" of a vocabulary of {self._vocab_size}; {_remedy(self.path)}"
      )
    return ids


class TokenWriter:
  """Writes ids to a new .npy file whose length is known at the end."""

  def __init__(self, file: BinaryIO, *, vocab_size: int):
    """Begins the file.

    Args:
      file: Open for writing, at its beginning.
      vocab_size: Decides whether an id takes 16 bits or 32.
    """
    self._file = file
    narrow, wide = _DTYPES
    self._dtype = narrow if vocab_size <= 2**16 else wide
    self.num_tokens = 0
    self._write_header()
    self._header_bytes = file.tell()

  def write(self, ids: Sequence[int]) -> None:
    """Appends ids."""
    self._file.write(np.asarray(ids, self._dtype).tobytes())
    self.num_tokens += len(ids)

  def finish(self) -> None:
    """Writes the length; the file is complete then."""
    # numpy leaves room in the header for a longer first axis.
    self._file.seek(0)
    self._write_header()
    if self._file.tell() != self._header_bytes:
      raise RuntimeError("the .npy header has outgrown its place")

  def _write_header(self) -> None:
    np.lib.format.write_array_header_1_0(
      self._file,
      {
        "descr": np.lib.format.dtype_to_descr(self._dtype),
        "fortran_order": False,
        "shape": (self.num_tokens,),
      },
    )


def _remedy(path: pathlib.Path) -> str:
  return f"bring it back, or delete {path.parent} to tokenise the text again"
