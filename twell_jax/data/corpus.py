"""A corpus: prepared documents in two splits, cached by what they come from."""

import dataclasses
import hashlib
import os
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from twell_jax.data import builder as builder_lib
from twell_jax.data import python_corpus, storage
from twell_jax.data import sources as sources_lib

# Raised when the same sources would be prepared otherwise than before.
_FORMAT_VERSION = 1
# What the location of token shards begins with.
TOKENS = "tokens:"
_DOCUMENTS_PER_READ = 64


@dataclasses.dataclass(frozen=True)
class Documents:
  """The texts of one split, in a fixed pseudo-random order.

  Attributes:
    data: a TFDS data source with the feature `text`.
  """

  data: Any = dataclasses.field(repr=False)

  def __len__(self) -> int:
    return len(self.data)

  def __iter__(self) -> Iterator[str]:
    for start in range(0, len(self), _DOCUMENTS_PER_READ):
      stop = min(start + _DOCUMENTS_PER_READ, len(self))
      for example in self.data.__getitems__(range(start, stop)):
        yield example["text"].decode()


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Prepared documents.

  Attributes:
    key: a fingerprint of everything the documents depend on.
    train: the documents to learn from.
    held_out: the documents to evaluate on; None if none were held out.
  """

  key: str
  train: Documents
  held_out: Documents | None


def prepare_corpus(
  corpus: str | Sequence[str] = "python",
  *,
  cache_dir: str | os.PathLike[str],
  text_field: str = "text",
  held_out_fraction: float = 0.05,
  max_documents: int = 0,
) -> Corpus:
  """Prepares a corpus with TFDS, or reuses it if nothing has changed.

  Sources are read in the order of a hash of their names, so that
  `max_documents` of a folder of files takes a cross-section of it. Within one
  file of many documents it takes the first ones.

  Args:
    corpus: one of these, or several:
      "python": the running interpreter's library sources and reference;
      a file, a folder (searched recursively), a glob, or a URL of these that
      fsspec understands, e.g. "hf://datasets/ORG/NAME/*.parquet";
      "tfds:NAME": the train split of a data set of TFDS, whose documents are
      copied into the cache.
    cache_dir: where the prepared set is kept. A change of the files (size,
      time), of the arguments, or of the interpreter ("python") makes a new one.
    text_field: the field of .jsonl, .parquet and TFDS records with the text.
    held_out_fraction: the expected part of documents in `held_out`, decided by
      a hash of the content; in [0, 1).
    max_documents: how many documents to use; 0 uses all.

  Returns:
    The documents.

  Raises:
    ValueError: an argument is out of range, a location holds no text, or a
      split would be empty.
  """
  if not 0 <= held_out_fraction < 1:
    raise ValueError(f"{held_out_fraction=} must be at least 0 and below 1")
  if max_documents < 0:
    raise ValueError(f"{max_documents=} must be at least 0 (0 = all)")
  locations = [corpus] if isinstance(corpus, str) else list(corpus)
  sources = find_sources(locations)
  key = storage.fingerprint(
    _FORMAT_VERSION,
    str(builder_lib.LocalText.VERSION),
    [(source.location, source.version) for source in sources],
    platform.python_version() if "python" in locations else None,
    text_field,
    held_out_fraction,
    max_documents,
  )
  logging.info("corpus %s: %d sources, key %s", corpus, len(sources), key)
  builder = builder_lib.prepare(
    sources,
    text_field=text_field,
    held_out_fraction=held_out_fraction,
    max_documents=max_documents,
    directory=pathlib.Path(cache_dir) / "corpora" / key,
  )

  def split(name: str) -> Documents:
    return Documents(builder.as_data_source(split=name))

  return Corpus(
    key=key,
    train=split(builder_lib.TRAIN),
    held_out=split(builder_lib.HELD_OUT) if held_out_fraction else None,
  )


def find_sources(locations: Sequence[str]) -> list[sources_lib.Source]:
  """Returns the sources at some locations, each once, in reading order.

  Raises:
    ValueError: a location holds no text or is of token shards, or there is no
      location.
  """
  # An empty path would be that of the working directory.
  if not all(locations):
    raise ValueError(
      f"corpus={locations!r}: an empty location; 'python' is the default"
    )
  for location in locations:
    if location.startswith(TOKENS):
      raise ValueError(
        f"corpus={location!r} is tokenised already and cannot be read beside"
        " other text: give it alone, not in a list, to what trains"
      )
  found: dict[str, sources_lib.Source] = {}
  for location in locations:
    here: Sequence[sources_lib.Source]
    if location == "python":
      here = python_corpus.python_sources()
    elif location.startswith("tfds:"):
      here = [sources_lib.find_named_set(location.removeprefix("tfds:"))]
    else:
      here = sources_lib.find_files(location)
    found |= {source.location: source for source in here}
  if not found:
    raise ValueError("corpus=() names no location; 'python' is the default")
  sources = list(found.values())
  names = sources_lib.short_names([source.location for source in sources])
  order = sorted(range(len(sources)), key=lambda i: (_rank(names[i]), names[i]))
  return [sources[i] for i in order]


def _rank(name: str) -> bytes:
  return hashlib.blake2b(name.encode(), digest_size=8).digest()
