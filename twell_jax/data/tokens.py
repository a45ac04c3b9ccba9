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

Documents that follow each other in a window are joined, as published models
have them, or kept separate: then windows also hold, for each input, which
document it is of and its place therein, and the end of a document does not
predict the beginning of the next, which has nothing to do with it. With "." as
end of text:

  inputs       a b . c d e      weights  1 1 0 1 1 1
  segment_ids  0 0 0 1 1 1      positions  0 1 2 0 1 2
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import (
  BinaryIO,
  Literal,
  NamedTuple,
  NotRequired,
  Protocol,
  SupportsIndex,
  TypedDict,
)

import numpy as np
from jaxtyping import Float, Int, UInt

from twell_jax.data import storage, token_file
from twell_jax.data import tokenizer as tokenizer_lib

Joining = Literal["joined", "separate"]
JOININGS: tuple[Joining, ...] = ("joined", "separate")

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
    segment_ids: of separate documents, which of the window's an input is of.
    positions: of separate documents, the place of an input in its document, or
      in what the window holds of it.
  """

  inputs: Int[np.ndarray, "seq"]
  targets: Int[np.ndarray, "seq"]
  weights: Float[np.ndarray, "seq"]
  segment_ids: NotRequired[Int[np.ndarray, "seq"]]
  positions: NotRequired[Int[np.ndarray, "seq"]]


class Ids(Protocol):
  """Token ids of which runs can be read: an array or a `TokenFile`."""

  def __len__(self) -> int: ...

  def __getitem__(self, where: slice, /) -> UInt[np.ndarray, "ids"]: ...


@dataclasses.dataclass(frozen=True)
class TokenizedSplit:
  """The token ids of a split.

  Attributes:
    tokens: the ids, read from disk where they are needed.
    num_documents: how many documents they come from.
    num_bytes: the UTF-8 length of these documents.
  """

  tokens: token_file.TokenFile = dataclasses.field(repr=False)
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
    The ids.
  """
  if not directory.exists():
    with storage.complete_directory(directory) as partial:
      with open(partial / "tokens.npy", "xb") as file:
        writer = DocumentWriter(file, tokenizer)
        for text in documents:
          writer.add(text)
        summary = writer.finish()
      (partial / "summary.json").write_text(json.dumps(summary))
  path = directory / "summary.json"
  try:
    summary = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{path} cannot be read ({error}): delete {directory} to tokenise the"
      " text again"
    ) from error
  return TokenizedSplit(
    tokens=token_file.TokenFile(
      directory / "tokens.npy", vocab_size=tokenizer.vocab_size
    ),
    **summary,
  )


class TokenWindows:
  """A grain random-access source of windows onto token ids.

  The last window is filled up with `pad_id`, where weights are 0.
  """

  def __init__(
    self,
    tokens: Ids,
    *,
    seq_len: int,
    pad_id: int,
    documents: Joining = "joined",
  ):
    """Makes the source.

    Args:
      tokens: at least two ids.
      seq_len: positions per window.
      pad_id: stands where the ids have ended; the end of text.
      documents: whether those in a window are "joined", or "separate" where
        pad_id ends one.

    Raises:
      ValueError: there is nothing to predict, or windows have no positions.
    """
    check_seq_len(seq_len)
    check_joining(documents)
    if len(tokens) < 2:
      raise ValueError(
        f"{len(tokens)} tokens leave nothing to predict; at least 2 are needed"
      )
    self._tokens = tokens
    self._seq_len = seq_len
    self._pad_id = pad_id
    self._documents = documents

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
    window = Window(inputs=inputs, targets=targets, weights=weights)
    if self._documents == "separate":
      ends = inputs == self._pad_id
      weights[ends] = 0
      begins = np.concatenate([[False], ends[:-1]])
      window["segment_ids"] = np.cumsum(begins, dtype=np.int32)
      places = np.arange(self._seq_len, dtype=np.int32)
      firsts = np.maximum.accumulate(np.where(begins, places, 0))
      window["positions"] = (places - firsts).astype(np.int32)
    return window


class JoinedWindows:
  """The windows of several sources, one source after the other."""

  def __init__(self, sources: Sequence[TokenWindows]):
    """Makes the source; it has those windows, and no others."""
    self._sources = sources
    self._ends = np.cumsum([len(source) for source in sources])

  def __len__(self) -> int:
    return int(self._ends[-1])

  def __getitem__(self, index: SupportsIndex) -> Window:
    index = int(index)
    if not 0 <= index < len(self):
      raise IndexError(f"window {index} of {len(self)}")
    number = int(np.searchsorted(self._ends, index, side="right"))
    source = self._sources[number]
    return source[index - int(self._ends[number]) + len(source)]

  def __repr__(self) -> str:
    return f"JoinedWindows({len(self._sources)} of {self._sources[0]!r}, ...)"

  def padding(self) -> Window:
    """Returns a window of padding only."""
    return self._sources[0].padding()


def check_seq_len(seq_len: int) -> None:
  """Raises ValueError if windows would have no positions."""
  if seq_len < 1:
    raise ValueError(f"{seq_len=} must be at least 1")


def check_joining(documents: str) -> None:
  """Raises ValueError for a word that is none of `JOININGS`."""
  if documents not in JOININGS:
    raise ValueError(
      f"{documents=} is unknown: choose one of {', '.join(JOININGS)}"
    )


class _Piece(NamedTuple):
  text: str
  ends_document: bool


class DocumentWriter:
  """Tokenises documents into a new .npy file, as they come.

  About a million characters wait in memory to be tokenised together.
  """

  def __init__(self, file: BinaryIO, tokenizer: tokenizer_lib.TextTokenizer):
    """Begins the file, which is open for writing and empty."""
    self._writer = token_file.TokenWriter(file, vocab_size=tokenizer.vocab_size)
    self._tokenizer = tokenizer
    self._waiting: list[_Piece] = []
    self._num_characters = 0
    self._num_documents = 0
    self._num_bytes = 0

  def add(self, text: str) -> None:
    """Appends a document and the end of it."""
    for piece in _pieces(text):
      self._waiting.append(piece)
      self._num_characters += len(piece.text)
      if self._num_characters >= _CHARACTERS_PER_BATCH:
        self._write()

  def finish(self) -> dict[str, int]:
    """Completes the file; returns `num_documents` and `num_bytes`."""
    self._write()
    self._writer.finish()
    return {"num_documents": self._num_documents, "num_bytes": self._num_bytes}

  def _write(self) -> None:
    ids = self._tokenizer.encode_batch([piece.text for piece in self._waiting])
    for piece, piece_ids in zip(self._waiting, ids, strict=True):
      self._num_bytes += len(piece.text.encode())
      if piece.ends_document:
        piece_ids.append(self._tokenizer.eos_id)
        self._num_documents += 1
      self._writer.write(piece_ids)
    self._waiting, self._num_characters = [], 0


def _pieces(text: str) -> Iterator[_Piece]:
  start = 0
  while seam := _SEAM.search(text, start + _CHARACTERS_PER_BATCH):
    yield _Piece(text[start : seam.start()], ends_document=False)
    start = seam.start()
  yield _Piece(text[start:], ends_document=True)
