"""Tokens per second of the input pipeline, against what eight GPUs take.

    python -m experiments.bench_data --output=experiments/results/bench_data

Writes OUTPUT.md and OUTPUT.json: how many tokens a second one process

    reads      from token shards that exist, shuffled, in batches of 64
               sequences of 2048, as training does (data.make_train_pipeline);
               with documents joined and separate
    tokenises  from Parquet files to such shards (data.make_shards), by one
               process, whose threads use all cores, and by one for each core,
               which is faster only where cores are many: their start counts

The text is the interpreter's own, several times over, and the tokenizer is
trained on it. Files are in the page cache, since they have just been written:
a disk must give 2 bytes for each token besides.

One host with 8 H100s trains the 0.5B model, the fastest, at 8 x 97.3 tokens a
millisecond (arXiv 2603.23198): 0.78 million tokens a second.
"""

import itertools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import flags

from experiments import cli, environment
from twell_jax import data
from twell_jax.data import sources as sources_lib

NEEDED_PER_S = 8 * 97_300
VOCAB_SIZE = 16_384
SEQ_LEN = 2048
BATCH_SIZE = 64
_TURNS = 5


def _write_parquet(
  texts: Sequence[str], folder: pathlib.Path, *, files: int
) -> None:
  """Writes files that all hold these texts."""
  folder.mkdir()
  for number in range(files):
    path = folder / f"{number:03d}.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)


def _read_seconds(
  windows: data.JoinedWindows, *, batches: int, seed: int
) -> float:
  """How long it takes to read so many batches, after the first."""
  pipeline = data.make_train_pipeline(windows, batch_size=BATCH_SIZE, seed=seed)
  iterator = iter(pipeline)
  next(iterator)
  start = time.perf_counter()
  for batch in itertools.islice(iterator, batches):
    assert batch["inputs"].shape == (BATCH_SIZE, SEQ_LEN)
  return time.perf_counter() - start


def _median_rate(tokens: int, seconds: Callable[[int], float]) -> int:
  """Tokens a second, by the median of several turns."""
  times = [seconds(turn) for turn in range(_TURNS)]
  return round(tokens / float(np.median(times)))


def measure(
  folder: pathlib.Path, *, files: int, batches: int
) -> dict[str, Any]:
  """Tokens a second, of everything.

  Args:
    folder: An empty one, for the files.
    files: Parquet files, and shards.
    batches: How many are read in a turn.
  """
  corpus = data.prepare_corpus(
    "python", cache_dir=folder / "cache", held_out_fraction=0.0
  )
  texts = list(corpus.train)
  tokenizer = data.train_tokenizer(texts, vocab_size=VOCAB_SIZE)
  _write_parquet(texts, folder / "text", files=files)
  found = sources_lib.find_files(str(folder / "text"))
  rates = {}
  for workers in sorted({1, len(os.sched_getaffinity(0))}):
    directory = folder / f"shards-{workers}"
    start = time.perf_counter()
    data.make_shards(found, tokenizer, directory=directory, workers=workers)
    seconds = time.perf_counter() - start
    shards = data.open_shards(directory)
    tokens = sum(len(shard.tokens) for shard in shards.train)
    rates[f"tokenise, {workers} process{'es' * (workers > 1)}"] = round(
      tokens / seconds
    )
  for documents in ("joined", "separate"):
    windows = data.JoinedWindows(
      [
        data.TokenWindows(
          shard.tokens,
          seq_len=SEQ_LEN,
          pad_id=tokenizer.eos_id,
          documents=documents,
        )
        for shard in shards.train
      ]
    )

    def read(seed: int, windows: data.JoinedWindows = windows) -> float:
      return _read_seconds(windows, batches=batches, seed=seed)

    rates[f"read, documents {documents}"] = _median_rate(
      batches * BATCH_SIZE * SEQ_LEN, read
    )
  return {
    "tokens_per_s": rates,
    "needed_per_s": NEEDED_PER_S,
    "shards": files,
    "tokens_in_shards": tokens,
    "bytes_per_token": round(
      sum(shard.num_bytes for shard in shards.train) / tokens, 2
    ),
    **environment.describe(),
  }


def markdown(figures: dict[str, Any]) -> str:
  """The table, and where it was made."""
  lines = [
    "# Tokens per second of the input pipeline",
    "",
    f"Of one process, on {figures['shards']} shards of"
    f" {figures['tokens_in_shards']:,} tokens in all"
    f" ({figures['bytes_per_token']} bytes of text each), batches of"
    f" {BATCH_SIZE} x {SEQ_LEN}, files in the page cache. Needed by a host with"
    f" 8 H100s that train 0.5B: {figures['needed_per_s'] / 1e6:.2f} million"
    " (8 x 97.3 a millisecond, arXiv 2603.23198). One process tokenises with"
    " threads on all cores; the start of several, which pays on many cores, is"
    " counted.",
    "",
    "| | million tokens/s | of what is needed |",
    "|---|---|---|",
  ]
  for name, rate in figures["tokens_per_s"].items():
    lines.append(
      f"| {name} | {rate / 1e6:.2f} | {rate / figures['needed_per_s']:.2f} |"
    )
  return "\n".join(
    [
      *lines,
      "",
      environment.sentence(figures),
      "",
      "    python -m experiments.bench_data"
      " --output=experiments/results/bench_data",
      "",
    ]
  )


def main() -> int:
  """Measures and writes the files."""
  output = pathlib.Path(flags.FLAGS.output)
  output.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory() as folder:
    figures = measure(
      pathlib.Path(folder),
      files=flags.FLAGS.files,
      batches=flags.FLAGS.batches,
    )
  output.with_suffix(".json").write_text(
    json.dumps(figures, indent=1) + "\n", encoding="utf-8"
  )
  text = markdown(figures)
  output.with_suffix(".md").write_text(text, encoding="utf-8")
  print(text)
  return 0


if __name__ == "__main__":
  flags.DEFINE_string("output", None, "Where to write, without suffix.")
  flags.DEFINE_integer("files", 8, "Parquet files.", lower_bound=1)
  flags.DEFINE_integer("batches", 60, "Batches of a turn.", lower_bound=1)
  flags.mark_flag_as_required("output")
  cli.run(main)
