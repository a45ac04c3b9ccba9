"""Text to token ids and back, by the `tokenizers` library.

Our own tokenizer is a byte-level BPE: its smallest pieces are the 256 bytes, so
every text has ids and decodes to exactly itself, and no id means "unknown".
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import fsspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from twell_jax.data import remote, storage

END_OF_TEXT = "<|endoftext|>"
# How published tokenizers call the end of a document, commonest first.
_END_OF_TEXT_NAMES = (
  END_OF_TEXT,
  "</s>",
  "<|end_of_text|>",
  "<eos>",
  "<|eot_id|>",
  "<|im_end|>",
  "<\uff5cend\u2581of\u2581sentence\uff5c>",  # with full-width bars
  "[EOS]",
  "<EOS>",
)
MIN_VOCAB_SIZE = 257  # The bytes and END_OF_TEXT.
SAMPLE_BYTES = 8 * 2**20

# Raised when the same text would be trained on otherwise than before.
_FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
  """A tokenizer and the id that ends a document.

  Attributes:
    tokenizer: the library's object.
    eos_id: the id put after each document.
  """

  tokenizer: tokenizers.Tokenizer = dataclasses.field(repr=False)
  eos_id: int

  @functools.cached_property
  def vocab_size(self) -> int:
    """One more than the largest id."""
    return max(self.tokenizer.get_vocab().values()) + 1

  @functools.cached_property
  def key(self) -> str:
    """A fingerprint: equal keys tokenise alike."""
    serialized = f"{self.eos_id} {self.tokenizer.to_str()}"
    return hashlib.sha256(serialized.encode()).hexdigest()[:16]

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without an end-of-text id."""
    return self.tokenizer.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of several texts, computed on all cores."""
    encodings = self.tokenizer.encode_batch_fast(
      list(texts), add_special_tokens=False
    )
    return [encoding.ids for encoding in encodings]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of some ids; special tokens show under their names."""
    return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def train_tokenizer(
  documents: Iterable[str],
  *,
  vocab_size: int,
  sample_bytes: int = SAMPLE_BYTES,
) -> TextTokenizer:
  """Trains a byte-level BPE.

  Args:
    documents: texts to learn merges from. Only the first `sample_bytes` bytes
      are used: more text hardly changes a small vocabulary, and the documents
      of a prepared corpus come in pseudo-random order. The result depends on
      nothing else.
    vocab_size: how many ids there are in the end, at least 257.
    sample_bytes: how much text to train on.

  Returns:
    The tokenizer; its end of text is END_OF_TEXT, id 0.

  Raises:
    ValueError: the vocabulary is smaller than the byte alphabet, or larger
      than the text has merges for.
  """
  check_vocab_size(vocab_size)
  _use_all_cores()
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator(
    _sample(documents, sample_bytes),
    trainer=trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=[END_OF_TEXT],
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
    ),
  )
  trained_size = tokenizer.get_vocab_size()
  if trained_size != vocab_size:
    raise ValueError(
      f"{vocab_size=}: this text has merges for {trained_size} ids only; give"
      " more text or a smaller vocab_size"
    )
  return _with_end_of_text(tokenizer, END_OF_TEXT)


def load_tokenizer(path: str | os.PathLike[str]) -> TextTokenizer:
  """Loads a tokenizer.json.

  Args:
    path: the file, or a URL that fsspec understands, such as
      "hf://HuggingFaceTB/SmolLM2-360M/tokenizer.json".

  Returns:
    The tokenizer; its end of text is found by the names in common use.

  Raises:
    ValueError: the file is missing, is no tokenizer, or names no end of text.
  """
  path = os.fspath(path)
  content = _read(path)
  _use_all_cores()
  try:
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
  except Exception as error:  # The library raises plain Exception only.
    raise ValueError(
      f"tokenizer={path!r} is not a tokenizer.json: {error}"
    ) from error
  # A length limit or padding, which some published files carry, would drop
  # text or add ids.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  vocab = tokenizer.get_vocab()
  for name in _END_OF_TEXT_NAMES:
    if name in vocab:
      return _with_end_of_text(tokenizer, name)
  raise ValueError(
    f"tokenizer={path!r} has no end-of-text token; add one of"
    f" {' '.join(_END_OF_TEXT_NAMES)} to its added_tokens"
  )


def cached_tokenizer(
  documents: Iterable[str],
  *,
  corpus_key: str,
  vocab_size: int,
  cache_dir: str | os.PathLike[str],
) -> TextTokenizer:
  """Trains a tokenizer, or loads it if this corpus was trained on before.

  Args:
    documents: see `train_tokenizer`.
    corpus_key: the fingerprint of the documents.
    vocab_size: see `train_tokenizer`.
    cache_dir: where the tokenizer.json is kept.

  Returns:
    The tokenizer.

  Raises:
    ValueError: see `train_tokenizer`.
  """
  key = storage.fingerprint(
    _FORMAT_VERSION,
    tokenizers.__version__,
    corpus_key,
    vocab_size,
    SAMPLE_BYTES,
  )
  directory = pathlib.Path(cache_dir) / "tokenizers" / key
  if not directory.exists():
    trained = train_tokenizer(documents, vocab_size=vocab_size)
    with storage.complete_directory(directory) as partial:
      trained.tokenizer.save(os.fspath(partial / "tokenizer.json"))
  return load_tokenizer(directory / "tokenizer.json")


def check_vocab_size(vocab_size: int) -> None:
  """Raises ValueError if a byte-level BPE cannot have so few ids."""
  if vocab_size < MIN_VOCAB_SIZE:
    raise ValueError(
      f"{vocab_size=} must be at least {MIN_VOCAB_SIZE}: the 256 bytes and"
      f" {END_OF_TEXT}"
    )


def _read(path: str) -> bytes:
  if "://" not in path:
    # A shell leaves it as it is in --config.data.tokenizer=~/tokenizer.json.
    local = pathlib.Path(path).expanduser()
    if not local.is_file():
      raise ValueError(f"tokenizer={path!r}: there is no such tokenizer.json")
    return local.read_bytes()
  with (
    remote.read_errors(
      f"tokenizer={path!r}", remedy="bring the file here and give its path"
    ),
    fsspec.open(path, "rb") as file,
  ):
    return file.read()


def _with_end_of_text(
  tokenizer: tokenizers.Tokenizer, name: str
) -> TextTokenizer:
  # A document that spells "<|endoftext|>" must not end there.
  tokenizer.encode_special_tokens = True
  return TextTokenizer(tokenizer, eos_id=tokenizer.get_vocab()[name])


def _sample(documents: Iterable[str], sample_bytes: int) -> Iterator[str]:
  left = sample_bytes
  for text in documents:
    if left <= 0:
      return
    # A character is at least one byte: this bounds one huge document.
    piece = text[:left]
    left -= len(piece.encode())
    yield piece


def _use_all_cores() -> None:
  # Said outright, because the library otherwise warns in every process that is
  # forked after it has used threads. A user's own choice stands.
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
