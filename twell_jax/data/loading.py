"""From the words of a config to batches: everything in one call."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import grain
import numpy as np
from absl import logging

from twell_jax.data import corpus as corpus_lib
from twell_jax.data import pipeline, shards, storage
from twell_jax.data import sources as sources_lib
from twell_jax.data import tokenizer as tokenizer_lib
from twell_jax.data import tokens as tokens_lib

Store = Literal["array", "shards"]
# Share of training positions that is worth a warning.
_MUCH_PADDING = 0.1
# What is read of each shard to tell one text from another.
_SAMPLES, _SAMPLE_TOKENS = 8, 32


@dataclasses.dataclass(frozen=True)
class Data:
  """What a training run reads.

  Attributes:
    train: endless shuffled batches; `iter(data.train)` gives a grain iterator
      with `get_state` and `set_state`.
    held_out: batches of one pass over the held-out documents; None if nothing
      was held out.
    tokenizer: gives the ids of both.
    num_train_tokens: ids in the train split.
    num_train_documents: documents in the train split.
    num_train_windows: sequences in one epoch.
    num_held_out_tokens: ids in the held-out split.
    num_held_out_documents: documents in the held-out split.
    num_held_out_batches: batches in `held_out`.
    held_out_bytes_per_token: UTF-8 bytes of held-out text per id, which turns
      a loss per token into one per byte; None if nothing was held out.
    train_key: tells the train text from another one, wherever it lies: from the
      tokenizer, the number of ids, documents and bytes of each shard, and
      samples of its ids.
  """

  train: grain.IterDataset = dataclasses.field(repr=False)
  held_out: grain.IterDataset | None = dataclasses.field(repr=False)
  tokenizer: tokenizer_lib.TextTokenizer
  num_train_tokens: int
  num_train_documents: int
  num_train_windows: int
  num_held_out_tokens: int
  num_held_out_documents: int
  num_held_out_batches: int
  held_out_bytes_per_token: float | None
  train_key: str


def load_data(
  *,
  corpus: str | Sequence[str] = "python",
  text_field: str = "text",
  tokenizer: str = "",
  vocab_size: int,
  seq_len: int,
  batch_size: int,
  held_out_fraction: float = 0.05,
  max_documents: int = 0,
  store: Store = "array",
  documents: tokens_lib.Joining = "joined",
  seed: int = 0,
  cache_dir: str | os.PathLike[str],
  shard_index: int = 0,
  shard_count: int = 1,
) -> Data:
  """Prepares, tokenises and batches a corpus, reusing what is cached.

  Args:
    corpus: what to read; see `corpus.prepare_corpus`. "tokens:DIRECTORY" are
      token shards made before (`shards.make_shards`), with their tokenizer.
    text_field: the field of records that holds the text.
    tokenizer: a tokenizer.json, or a URL of one; "" trains one on the train
      split.
    vocab_size: the number of ids. A tokenizer.json must have exactly as many.
    seq_len: positions per sequence.
    batch_size: sequences per batch, over all shards.
    held_out_fraction: the expected part of documents to hold out; of token
      shards made before, whether there must be such a part.
    max_documents: how many documents to use; 0 uses all.
    store: "array" copies the text and keeps all ids in one file; "shards" reads
      the text once, into a file of ids for each of its own (see `shards`), and
      needs a tokenizer.
    documents: whether those in a sequence are "joined" or "separate", which
      adds segment_ids and positions to batches (see `tokens`).
    seed: decides the order of the batches.
    cache_dir: where prepared documents, tokenizers and ids are kept.
    shard_index: which shard (host) this is.
    shard_count: how many shards there are.

  Returns:
    The batches and what is known of them.

  Raises:
    ValueError: an argument is out of range or does not fit another one; the
      message says which and what to do.
  """
  # Before anything is prepared, which takes time and leaves files.
  split_among = {
    "batch_size": batch_size,
    "shard_index": shard_index,
    "shard_count": shard_count,
  }
  pipeline.check_shards(**split_among)
  pipeline.check_seed(seed)
  tokens_lib.check_seq_len(seq_len)
  tokens_lib.check_joining(documents)
  if store not in get_args(Store):
    raise ValueError(
      f"{store=} is unknown: choose one of {', '.join(get_args(Store))}"
    )
  source = _Source(corpus, text_field, held_out_fraction, max_documents)
  if isinstance(corpus, str) and corpus.startswith(corpus_lib.TOKENS):
    directory = os.path.expanduser(corpus.removeprefix(corpus_lib.TOKENS))
    splits = _open_shards(source, directory, tokenizer)
    _check_vocab_size(vocab_size, splits.tokenizer, corpus)
  elif store == "shards":
    splits = _make_shards(source, tokenizer, vocab_size, cache_dir=cache_dir)
  else:
    splits = _make_arrays(source, tokenizer, vocab_size, cache_dir=cache_dir)

  def windows(split: Sequence[tokens_lib.TokenizedSplit]) -> pipeline.Windows:
    each = [
      tokens_lib.TokenWindows(
        part.tokens,
        seq_len=seq_len,
        pad_id=splits.tokenizer.eos_id,
        documents=documents,
      )
      for part in split
    ]
    return tokens_lib.JoinedWindows(each) if len(each) > 1 else each[0]

  train_windows = windows(splits.train)
  _warn_of_padding(splits.train, seq_len * len(train_windows))
  held_out_batches = None
  num_held_out_batches = 0
  if splits.held_out:
    held_out_windows = windows(splits.held_out)
    held_out_batches = pipeline.make_eval_pipeline(
      held_out_windows, **split_among
    )
    num_held_out_batches = -(-len(held_out_windows) // batch_size)
  num_held_out_tokens = _num_tokens(splits.held_out)
  data = Data(
    train=pipeline.make_train_pipeline(train_windows, seed=seed, **split_among),
    held_out=held_out_batches,
    tokenizer=splits.tokenizer,
    num_train_tokens=_num_tokens(splits.train),
    num_train_documents=_num_documents(splits.train),
    num_train_windows=len(train_windows),
    num_held_out_tokens=num_held_out_tokens,
    num_held_out_documents=_num_documents(splits.held_out),
    num_held_out_batches=num_held_out_batches,
    held_out_bytes_per_token=(
      sum(split.num_bytes for split in splits.held_out) / num_held_out_tokens
      if splits.held_out
      else None
    ),
    train_key=_key(splits.tokenizer, splits.train),
  )
  logging.info("%s", data)
  return data


def tokenize_corpus(
  *,
  corpus: str | Sequence[str],
  tokenizer: str,
  vocab_size: int,
  text_field: str = "text",
  held_out_fraction: float = 0.05,
  max_documents: int = 0,
  cache_dir: str | os.PathLike[str],
  workers: int = 1,
  part: shards.Part | None = None,
) -> pathlib.Path:
  """Makes the token shards that `load_data` with store="shards" reads.

  Args:
    corpus: what to read; see `corpus.prepare_corpus`.
    tokenizer: a tokenizer.json, or a URL of one.
    vocab_size: the number of ids it must have.
    text_field: the field of records that holds the text.
    held_out_fraction: the expected part of documents to hold out.
    max_documents: only 0, all: shards do not know of each other.
    cache_dir: where the shards are kept.
    workers: processes that tokenise, each one source at a time.
    part: which of the shards are made here; all if None.

  Returns:
    Their directory, which may be moved: "tokens:DIRECTORY" is a corpus.

  Raises:
    ValueError: an argument is out of range, or a source cannot be read.
  """
  _check_no_max_documents(max_documents)
  loaded = _load_tokenizer(tokenizer, vocab_size)
  if loaded is None:
    raise ValueError(
      "token shards need a tokenizer that is not trained on them: set"
      " data.tokenizer to a tokenizer.json"
    )
  locations = [corpus] if isinstance(corpus, str) else list(corpus)
  sources = sources_lib.in_parts(corpus_lib.find_sources(locations))
  directory = shards.shards_directory(
    sources,
    loaded,
    cache_dir=cache_dir,
    text_field=text_field,
    held_out_fraction=held_out_fraction,
  )
  shards.make_shards(
    sources,
    loaded,
    directory=directory,
    text_field=text_field,
    held_out_fraction=held_out_fraction,
    workers=workers,
    part=part,
  )
  return directory


class _Source(NamedTuple):
  corpus: str | Sequence[str]
  text_field: str
  held_out_fraction: float
  max_documents: int


def _open_shards(
  source: _Source, directory: str, tokenizer: str
) -> shards.Shards:
  _check_no_max_documents(source.max_documents)
  opened = shards.open_shards(directory)
  if source.held_out_fraction > 0 and not opened.held_out:
    raise ValueError(
      f"held_out_fraction = {source.held_out_fraction}, and the token shards in"
      f" {directory} hold out nothing: set it to 0, or tokenise the corpus"
      " again with a part held out"
    )
  if tokenizer:
    given = tokenizer_lib.load_tokenizer(tokenizer)
    if given.key != opened.tokenizer.key:
      raise ValueError(
        f"{tokenizer=} is not the one that the token shards in {directory} were"
        " made with: leave it empty to use theirs"
      )
  return opened


def _make_shards(
  source: _Source,
  tokenizer: str,
  vocab_size: int,
  *,
  cache_dir: str | os.PathLike[str],
) -> shards.Shards:
  directory = tokenize_corpus(
    **source._asdict(),
    tokenizer=tokenizer,
    vocab_size=vocab_size,
    cache_dir=cache_dir,
  )
  return shards.open_shards(directory)


def _check_no_max_documents(max_documents: int) -> None:
  if max_documents:
    raise ValueError(
      f"{max_documents=} does not go with token shards, which are made apart"
      " from each other: set it to 0 and name fewer files"
    )


def _make_arrays(
  source: _Source,
  tokenizer: str,
  vocab_size: int,
  *,
  cache_dir: str | os.PathLike[str],
) -> shards.Shards:
  """All ids of a split in one array."""
  loaded = _load_tokenizer(tokenizer, vocab_size)
  prepared = corpus_lib.prepare_corpus(**source._asdict(), cache_dir=cache_dir)
  text_tokenizer = loaded or tokenizer_lib.cached_tokenizer(
    prepared.train,
    corpus_key=prepared.key,
    vocab_size=vocab_size,
    cache_dir=cache_dir,
  )

  def tokenized(
    split: str, documents: corpus_lib.Documents
  ) -> tokens_lib.TokenizedSplit:
    name = f"{prepared.key}-{split}-{text_tokenizer.key}"
    return tokens_lib.tokenize_split(
      documents,
      text_tokenizer,
      directory=pathlib.Path(cache_dir) / "tokens" / name,
    )

  return shards.Shards(
    text_tokenizer,
    [tokenized("train", prepared.train)],
    [tokenized("held_out", prepared.held_out)] if prepared.held_out else [],
  )


def _load_tokenizer(
  tokenizer: str, vocab_size: int
) -> tokenizer_lib.TextTokenizer | None:
  """The tokenizer of that name, None if one is to be trained; checked."""
  if not tokenizer:
    tokenizer_lib.check_vocab_size(vocab_size)
    return None
  loaded = tokenizer_lib.load_tokenizer(tokenizer)
  _check_vocab_size(vocab_size, loaded, f"tokenizer={tokenizer!r}")
  return loaded


def _check_vocab_size(
  vocab_size: int, loaded: tokenizer_lib.TextTokenizer, whose: str
) -> None:
  if loaded.vocab_size != vocab_size:
    raise ValueError(
      f"{vocab_size=} does not fit {whose}, which has {loaded.vocab_size} ids;"
      f" set vocab_size={loaded.vocab_size}"
    )


def _warn_of_padding(
  splits: Sequence[tokens_lib.TokenizedSplit], num_positions: int
) -> None:
  """Says so if shards are too short for their windows."""
  padding = 1 - _num_tokens(splits) / num_positions
  if len(splits) > 1 and padding > _MUCH_PADDING:
    logging.warning(
      "%.0f %% of training positions are padding, since sequences do not span"
      " the %d shards, one for each file: join small files, or read them with"
      ' store="array"',
      100 * padding,
      len(splits),
    )


def _key(
  tokenizer: tokenizer_lib.TextTokenizer,
  splits: Sequence[tokens_lib.TokenizedSplit],
) -> str:
  """Another text hardly has the same sizes; the samples find one that does."""
  parts: list[object] = [tokenizer.key]
  for split in splits:
    last = max(len(split.tokens) - _SAMPLE_TOKENS, 0)
    starts = np.linspace(0, last, _SAMPLES).astype(int).tolist()
    samples = [
      split.tokens[start : start + _SAMPLE_TOKENS].tolist() for start in starts
    ]
    sizes = [len(split.tokens), split.num_documents, split.num_bytes]
    parts.append([sizes, samples])
  return storage.fingerprint(*parts)


def _num_tokens(splits: Sequence[tokens_lib.TokenizedSplit]) -> int:
  return sum(len(split.tokens) for split in splits)


def _num_documents(splits: Sequence[tokens_lib.TokenizedSplit]) -> int:
  return sum(split.num_documents for split in splits)
