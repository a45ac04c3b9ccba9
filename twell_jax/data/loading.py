"""From the words of a config to batches: everything in one call."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import grain
from absl import logging

from twell_jax.data import corpus as corpus_lib
from twell_jax.data import pipeline
from twell_jax.data import tokenizer as tokenizer_lib
from twell_jax.data import tokens as tokens_lib


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
  seed: int = 0,
  cache_dir: str | os.PathLike[str],
  shard_index: int = 0,
  shard_count: int = 1,
) -> Data:
  """Prepares, tokenises and batches a corpus, reusing what is cached.

  Args:
    corpus: what to read; see `corpus.prepare_corpus`.
    text_field: the field of records that holds the text.
    tokenizer: a tokenizer.json; "" trains one on the train split.
    vocab_size: the number of ids. A tokenizer.json must have exactly as many.
    seq_len: positions per sequence.
    batch_size: sequences per batch, over all shards.
    held_out_fraction: the expected part of documents to hold out.
    max_documents: how many documents to use; 0 uses all.
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
  shards = {
    "batch_size": batch_size,
    "shard_index": shard_index,
    "shard_count": shard_count,
  }
  pipeline.check_shards(**shards)
  pipeline.check_seed(seed)
  tokens_lib.check_seq_len(seq_len)
  if not tokenizer:
    tokenizer_lib.check_vocab_size(vocab_size)
  loaded = tokenizer_lib.load_tokenizer(tokenizer) if tokenizer else None
  if loaded is not None and loaded.vocab_size != vocab_size:
    raise ValueError(
      f"{vocab_size=} does not fit tokenizer={tokenizer!r}, which has"
      f" {loaded.vocab_size} ids; set vocab_size={loaded.vocab_size}"
    )
  prepared = corpus_lib.prepare_corpus(
    corpus,
    cache_dir=cache_dir,
    text_field=text_field,
    held_out_fraction=held_out_fraction,
    max_documents=max_documents,
  )
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

  def windows(split: tokens_lib.TokenizedSplit) -> tokens_lib.TokenWindows:
    return tokens_lib.TokenWindows(
      split.tokens, seq_len=seq_len, pad_id=text_tokenizer.eos_id
    )

  train = tokenized("train", prepared.train)
  train_windows = windows(train)
  train_batches = pipeline.make_train_pipeline(
    train_windows, seed=seed, **shards
  )
  held_out = held_out_batches = None
  num_held_out_batches = 0
  if prepared.held_out is not None:
    held_out = tokenized("held_out", prepared.held_out)
    held_out_windows = windows(held_out)
    held_out_batches = pipeline.make_eval_pipeline(held_out_windows, **shards)
    num_held_out_batches = -(-len(held_out_windows) // batch_size)
  data = Data(
    train=train_batches,
    held_out=held_out_batches,
    tokenizer=text_tokenizer,
    num_train_tokens=len(train.tokens),
    num_train_documents=train.num_documents,
    num_train_windows=len(train_windows),
    num_held_out_tokens=len(held_out.tokens) if held_out else 0,
    num_held_out_documents=held_out.num_documents if held_out else 0,
    num_held_out_batches=num_held_out_batches,
    held_out_bytes_per_token=held_out.bytes_per_token if held_out else None,
  )
  logging.info("%s", data)
  return data
