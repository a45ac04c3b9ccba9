"""Token shards: a corpus too large for one array, or for one machine to make.

One shard holds the tokens of one source, a file or as much of a TFDS set, and
is a directory of its own, complete or absent:

  DIRECTORY/
    tokenizer.json, manifest.json     what all shards are made with and from
    shard-00000-of-00002/
      train.npy                       document, end of text, document, ...
      held_out.npy                    the same, of the documents held out
      summary.json                    from what, and how much went into each
    shard-00001-of-00002/...

Shards are made by as many processes as are wanted, on one machine or on several
that share the file system, each of which takes every n-th; what was finished
when one is interrupted stays. Windows do not span shards. The text itself is
read once and not copied.
"""

import concurrent.futures
import concurrent.futures.process
import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import logging

from twell_jax.data import (
  builder,
  storage,
  token_file,
  tokens,
)
from twell_jax.data import sources as sources_lib
from twell_jax.data import tokenizer as tokenizer_lib

_MANIFEST, _TOKENIZER, _SUMMARY = (
  "manifest.json",
  "tokenizer.json",
  "summary.json",
)
# Raised when the same sources would be tokenised otherwise than before.
_FORMAT_VERSION = 1


class Shards(NamedTuple):
  """A tokenised corpus.

  Attributes:
    tokenizer: Gave the ids.
    train: The shards to learn from, without empty ones.
    held_out: The shards to evaluate on; none if nothing was held out.
  """

  tokenizer: tokenizer_lib.TextTokenizer
  train: Sequence[tokens.TokenizedSplit]
  held_out: Sequence[tokens.TokenizedSplit]


class Part(NamedTuple):
  """The share of a machine: shards first, first + step, first + 2·step, ..."""

  first: int = 0
  step: int = 1


def shards_directory(
  sources: Sequence[sources_lib.Source],
  tokenizer: tokenizer_lib.TextTokenizer,
  *,
  cache_dir: str | os.PathLike[str],
  text_field: str,
  held_out_fraction: float,
) -> pathlib.Path:
  """Where the shards of exactly this text and tokenizer belong."""
  key = storage.fingerprint(
    _FORMAT_VERSION,
    [(source.location, source.version) for source in sources],
    text_field,
    held_out_fraction,
    tokenizer.key,
  )
  return pathlib.Path(cache_dir) / "shards" / key


def make_shards(
  sources: Sequence[sources_lib.Source],
  tokenizer: tokenizer_lib.TextTokenizer,
  *,
  directory: pathlib.Path,
  text_field: str = "text",
  held_out_fraction: float = 0.0,
  workers: int = 1,
  part: Part | None = None,
) -> None:
  """Tokenises sources to shards, but for those that are there.

  A document is held out by the hash of its text (see `builder.LocalText`),
  whichever source it is in.

  Args:
    sources: One for each shard, in their order.
    tokenizer: Gives the ids, and the one put after each document.
    directory: Belongs to exactly these arguments (`shards_directory`).
    text_field: The field of records that holds the text.
    held_out_fraction: The expected part of documents to hold out; in [0, 1).
    workers: Processes that tokenise, each a source at a time; they share the
      cores. One uses all cores.
    part: Which of the shards are made here; all if None.

  Raises:
    ValueError: A number out of range, or a source that cannot be read.
    ChildProcessError: A worker died. Shards that are finished remain.
  """
  part = part or Part()
  if not 0 <= held_out_fraction < 1:
    raise ValueError(f"{held_out_fraction=} must be at least 0 and below 1")
  if workers < 1:
    raise ValueError(f"{workers=} must be at least 1")
  if not 0 <= part.first < part.step:
    raise ValueError(
      f"part {part.first} of {part.step}: it must be at least 0 and below the"
      " number of parts"
    )
  _write_manifest(
    directory,
    tokenizer,
    num_shards=len(sources),
    held_out=held_out_fraction > 0,
  )
  names = sources_lib.short_names([source.location for source in sources])
  jobs = [
    _Job(
      source,
      name,
      directory / _shard_name(index, len(sources)),
      text_field,
      held_out_fraction,
    )
    for index, (source, name) in enumerate(zip(sources, names, strict=True))
    if index % part.step == part.first
  ]
  missing = [job for job in jobs if not job.directory.exists()]
  logging.info("%d of %d shards to tokenise", len(missing), len(jobs))
  if workers == 1 or len(missing) < 2:
    for job in missing:
      _make_shard(job)
    return
  # Not forked: the tokenizer has threads.
  with concurrent.futures.ProcessPoolExecutor(
    min(workers, len(missing)),
    mp_context=multiprocessing.get_context("spawn"),
    initializer=_share_cores,
    initargs=(min(workers, len(missing)),),
  ) as executor:
    try:
      for done in concurrent.futures.as_completed(
        [executor.submit(_make_shard, job) for job in missing]
      ):
        done.result()
    except concurrent.futures.process.BrokenProcessPool as error:
      raise ChildProcessError(
        f"one of {workers=} died, as it does when memory runs out: start again"
        " with fewer, which keeps the shards that are finished"
      ) from error
    except BaseException:
      executor.shutdown(cancel_futures=True)
      raise


def open_shards(directory: str | os.PathLike[str]) -> Shards:
  """Opens a directory of shards, all of which must be there and whole.

  Raises:
    ValueError: It is no such directory, a shard is missing or damaged, or a
      split is empty.
  """
  directory = pathlib.Path(directory)
  manifest = _read_json(directory / _MANIFEST)
  tokenizer = tokenizer_lib.load_tokenizer(directory / _TOKENIZER)
  num_shards = manifest["num_shards"]
  found: dict[str, list[tokens.TokenizedSplit]] = {
    builder.TRAIN: [],
    builder.HELD_OUT: [],
  }
  paths = [directory / _shard_name(i, num_shards) for i in range(num_shards)]
  missing = [path.name for path in paths if not path.exists()]
  if missing:
    named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    raise ValueError(
      f"{len(missing)} of {num_shards} shards are not in {directory}: {named};"
      " tokenise the corpus to its end (experiments.tokenize_corpus)"
    )
  splits = [builder.TRAIN] + [builder.HELD_OUT] * manifest["held_out"]
  for path in paths:
    summary = _read_json(path / _SUMMARY)
    for split in splits:
      ids = token_file.TokenFile(
        path / f"{split}.npy", vocab_size=tokenizer.vocab_size
      )
      if len(ids) >= 2:  # Otherwise there is nothing to predict.
        found[split].append(tokens.TokenizedSplit(ids, **summary[split]))
  for split in splits:
    if not found[split]:
      raise ValueError(
        f"the {split} split of {directory} is empty: give more text, or another"
        " held_out_fraction"
      )
  return Shards(tokenizer, found[builder.TRAIN], found[builder.HELD_OUT])


class _Job(NamedTuple):
  source: sources_lib.Source
  name: str
  directory: pathlib.Path
  text_field: str
  held_out_fraction: float


def _share_cores(workers: int) -> None:
  """Keeps the threads of the tokenizers of all workers to one for each core."""
  threads = max((os.cpu_count() or 1) // workers, 1)
  # A user's own choice stands.
  os.environ.setdefault("RAYON_NUM_THREADS", str(threads))


def _make_shard(job: _Job) -> None:
  tokenizer = _tokenizer_of(job.directory.parent)
  splits = [builder.TRAIN] + [builder.HELD_OUT] * (job.held_out_fraction > 0)
  with storage.complete_directory(job.directory) as partial:
    with contextlib.ExitStack() as files:
      writers = {
        split: tokens.DocumentWriter(
          files.enter_context(open(partial / f"{split}.npy", "xb")), tokenizer
        )
        for split in splits
      }
      for text in _texts(job):
        held_out = builder.content_fraction(text) < job.held_out_fraction
        writers[builder.HELD_OUT if held_out else builder.TRAIN].add(text)
      summary = {split: writer.finish() for split, writer in writers.items()}
    (partial / _SUMMARY).write_text(json.dumps({"source": job.name, **summary}))


@functools.lru_cache(maxsize=1)
def _tokenizer_of(directory: pathlib.Path) -> tokenizer_lib.TextTokenizer:
  """Read once by a process: a large vocabulary takes half a second."""
  return tokenizer_lib.load_tokenizer(directory / _TOKENIZER)


def _texts(job: _Job) -> Iterator[str]:
  undecodable: list[str] = []
  for document in job.source.documents(
    name=job.name,
    text_field=job.text_field,
    report_undecodable=undecodable.append,
  ):
    if document.text and not document.text.isspace():
      yield document.text
  if undecodable:
    logging.warning(
      "%d documents of %s are not UTF-8 and were left out",
      len(undecodable),
      job.source.location,
    )


def _shard_name(index: int, count: int) -> str:
  return f"shard-{index:05d}-of-{count:05d}"


def _write_manifest(
  directory: pathlib.Path,
  tokenizer: tokenizer_lib.TextTokenizer,
  *,
  num_shards: int,
  held_out: bool,
) -> None:
  if (directory / _MANIFEST).exists():
    return
  with storage.complete_directory(directory) as partial:
    tokenizer.tokenizer.save(os.fspath(partial / _TOKENIZER))
    manifest = {"num_shards": num_shards, "held_out": held_out}
    (partial / _MANIFEST).write_text(json.dumps(manifest))


def _read_json(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{path} cannot be read ({error}): {path.parent} must be token shards, as"
      " experiments.tokenize_corpus makes them; delete a damaged one to make it"
      " again"
    ) from error
