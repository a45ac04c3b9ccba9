"""A split as one long array of token ids, and windows onto it.

On disk a tokenised split is a directory:

  tokens.npy     uint16 or uint32 [tokens]: document, end of text, document, ...
  summary.json   documents and UTF-8 bytes that went into it

Windows of L positions tile the array so that nothing is dropped and nothing is
seen twice: window i reads ids i·L to i·L + L, its inputs are the first L of
them and its targets the last L. Every id but the very first is a target once.

  ids      a b c d e f g        L = 3
  window 0 a b c d              inputs a b c   targets b c d
  window 1       d e f g        inputs d e f   targets e f g
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple, SupportsIndex, TypedDict

import numpy as np
from jaxtyping import Float, Int, UInt

from twell_jax.data import storage
from twell_jax.data import tokenizer as tokenizer_lib

_CHARACTERS_PER_BATCH = 2**20
# Where a long document may be cut without changing its ids: our tokenizer never
# joins characters across a line break that stands between two words.
_SEAM = re.compile(r"(?<=\S\n)(?=\S)")


class Window(TypedDict):
  """What one window holds.

  Attributes:
    inputs: ids that the model reads.
    targets: the id after each input.
    weights: 1 where the target counts, 0 on padding.
  """

  inputs: Int[np.ndarray, "seq"]
  targets: Int[np.ndarray, "seq"]
  weights: Float[np.ndarray, "seq"]


@dataclasses.dataclass(frozen=True)
class TokenizedSplit:
  """The token ids of a split.

  Attributes:
    tokens: the ids, mapped from disk.
    num_documents: how many documents they come from.
    num_bytes: the UTF-8 length of these documents.
  """

  tokens: UInt[np.ndarray, "tokens"] = dataclasses.field(repr=False)
  num_documents: int
  num_bytes: int

  @property
  def bytes_per_token(self) -> float:
    """Bytes of text per id, ends of text included."""
    return self.num_bytes / len(self.tokens)


def tokenize_split(
  documents: Iterable[str],
  tokenizer: tokenizer_lib.TextTokenizer,
  *,
  directory: pathlib.Path,
) -> TokenizedSplit:
  """Tokenises documents to disk, or reuses what is there.

  About a million characters are in memory at a time. A document longer than
  that is encoded in pieces cut between two lines, which gives the same ids with
  our own tokenizer; one that marks the beginning of a text (SentencePiece's
  leading "▁") marks each such piece.

  Args:
    documents: the texts.
    tokenizer: gives the ids, and the one put after each document.
    directory: belongs to exactly these documents and this tokenizer.

  Returns:
    The ids, memory-mapped.
  """
  if not directory.exists():
    with storage.complete_directory(directory) as partial:
      with open(partial / "tokens.npy", "xb") as file:
        summary = _write_tokens(file, documents, tokenizer)
      (partial / "summary.json").write_text(json.dumps(summary))
  return TokenizedSplit(
    tokens=np.load(directory / "tokens.npy", mmap_mode="r"),
    **json.loads((directory / "summary.json").read_text()),
  )


class TokenWindows:
  """A grain random-access source of windows onto token ids.

  The last window is filled up with `pad_id`, where weights are 0.
  """

  def __init__(
    self, tokens: UInt[np.ndarray, "tokens"], *, seq_len: int, pad_id: int
  ):
    """Makes the source.

    Args:
      tokens: at least two ids.
      seq_len: positions per window.
      pad_id: stands where the ids have ended.

    Raises:
      ValueError: there is nothing to predict, or windows have no positions.
    """
    check_seq_len(seq_len)
    if len(tokens) < 2:
      raise ValueError(
        f"{len(tokens)} tokens leave nothing to predict; at least 2 are needed"
      )
    self._tokens = tokens
    self._seq_len = seq_len
    self._pad_id = pad_id

  def __len__(self) -> int:
    return -(-(len(self._tokens) - 1) // self._seq_len)

  def __getitem__(self, index: SupportsIndex) -> Window:
    index = int(index)
    if not 0 <= index < len(self):
      raise IndexError(f"window {index} of {len(self)}")
    start = index * self._seq_len
    ids = self._tokens[start : start + self._seq_len + 1].astype(np.int32)
    return self._window(ids)

  def __repr__(self) -> str:
    return (
      f"TokenWindows({len(self._tokens)} tokens, seq_len={self._seq_len},"
      f" pad_id={self._pad_id})"
    )

  def padding(self) -> Window:
    """Returns a window of padding only."""
    return self._window(np.zeros(0, np.int32))

  def _window(self, ids: Int[np.ndarray, "ids"]) -> Window:
    inputs = np.full(self._seq_len, self._pad_id, np.int32)
    targets = np.full(self._seq_len, self._pad_id, np.int32)
    weights = np.zeros(self._seq_len, np.float32)
    num_targets = max(len(ids) - 1, 0)
    inputs[:num_targets] = ids[:-1]
    targets[:num_targets] = ids[1:]
    weights[:num_targets] = 1
    return Window(inputs=inputs, targets=targets, weights=weights)


def check_seq_len(seq_len: int) -> None:
  """Raises ValueError if windows would have no positions."""
  if seq_len < 1:
    raise ValueError(f"{seq_len=} must be at least 1")


class _Piece(NamedTuple):
  text: str
  ends_document: bool


def _write_tokens(
  file: BinaryIO,
  documents: Iterable[str],
  tokenizer: tokenizer_lib.TextTokenizer,
) -> dict[str, int]:
  dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
  _write_header(file, dtype, num_tokens=0)
  header_bytes = file.tell()
  num_tokens = num_documents = num_bytes = 0
  for batch in _batches(documents):
    ids = tokenizer.encode_batch([piece.text for piece in batch])
    for piece, piece_ids in zip(batch, ids, strict=True):
      num_bytes += len(piece.text.encode())
      if piece.ends_document:
        piece_ids.append(tokenizer.eos_id)
        num_documents += 1
      num_tokens += len(piece_ids)
      file.write(np.asarray(piece_ids, dtype).tobytes())
  # numpy leaves room in the header for a longer first axis.
  file.seek(0)
  _write_header(file, dtype, num_tokens=num_tokens)
  if file.tell() != header_bytes:
    raise RuntimeError("the .npy header has outgrown its place")
  return {"num_documents": num_documents, "num_bytes": num_bytes}


def _write_header(file: BinaryIO, dtype: np.dtype, *, num_tokens: int) -> None:
  np.lib.format.write_array_header_1_0(
    file,
    {
      "descr": np.lib.format.dtype_to_descr(dtype),
      "fortran_order": False,
      "shape": (num_tokens,),
    },
  )


def _batches(documents: Iterable[str]) -> Iterator[list[_Piece]]:
  batch: list[_Piece] = []
  num_characters = 0
  for text in documents:
    for piece in _pieces(text):
      batch.append(piece)
      num_characters += len(piece.text)
      if num_characters >= _CHARACTERS_PER_BATCH:
        yield batch
        batch, num_characters = [], 0
  if batch:
    yield batch


def _pieces(text: str) -> Iterator[_Piece]:
  start = 0
  while seam := _SEAM.search(text, start + _CHARACTERS_PER_BATCH):
    yield _Piece(text[start : seam.start()], ends_document=False)
    start = seam.start()
  yield _Piece(text[start:], ends_document=True)
