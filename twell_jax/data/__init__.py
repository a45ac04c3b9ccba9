"""From text to batches: TFDS, a byte-pair tokenizer and a grain pipeline.

`load_data` does everything. Its stages, each of which can be used alone:

  prepare_corpus       text files, URLs, TFDS sets -> documents in two splits
  train_tokenizer      documents -> a byte-level BPE (or `load_tokenizer`)
  tokenize_split       documents -> one array of ids on disk, or
  make_shards          files -> a shard of ids for each, by many processes
  TokenWindows         ids -> windows of inputs, targets and weights
  make_train_pipeline  windows -> shuffled, sharded, resumable batches
  make_eval_pipeline   windows -> one pass in order
"""

from twell_jax.data.corpus import Corpus, Documents, prepare_corpus
from twell_jax.data.loading import Data, load_data, tokenize_corpus
from twell_jax.data.pipeline import make_eval_pipeline, make_train_pipeline
from twell_jax.data.shards import Part, Shards, make_shards, open_shards
from twell_jax.data.tokenizer import (
  TextTokenizer,
  load_tokenizer,
  train_tokenizer,
)
from twell_jax.data.tokens import (
  JoinedWindows,
  TokenizedSplit,
  TokenWindows,
  Window,
  tokenize_split,
)

__all__ = [
  "Corpus",
  "Data",
  "Documents",
  "JoinedWindows",
  "Part",
  "Shards",
  "TextTokenizer",
  "TokenWindows",
  "TokenizedSplit",
  "Window",
  "load_data",
  "load_tokenizer",
  "make_eval_pipeline",
  "make_shards",
  "make_train_pipeline",
  "open_shards",
  "prepare_corpus",
  "tokenize_corpus",
  "tokenize_split",
  "train_tokenizer",
]
