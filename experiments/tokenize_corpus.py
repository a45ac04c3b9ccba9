"""Tokenises the corpus of a config to shards, by many processes or machines.

    python -m experiments.tokenize_corpus --config=configs/paper.py:2b \
      --workdir=DIR --workers=32

A run of the same config with data.store="shards" and the same workdir (or
data.cache_dir) finds them there; "tokens:" and the directory that is printed
are a data.corpus for any other. On several machines that share the directory,
--part=I --parts=N takes every N-th file on each. What was finished when it is
interrupted stays.
"""

import os
import pathlib
import time

from absl import flags

from experiments import cli
from twell_jax import data


def main() -> int:
  """Tokenises what is missing and prints the directory."""
  args = flags.FLAGS
  config = args.config.data
  start_s = time.monotonic()
  directory = data.tokenize_corpus(
    corpus=config.corpus,
    tokenizer=config.tokenizer,
    vocab_size=args.config.model.vocab_size,
    text_field=config.text_field,
    held_out_fraction=config.held_out_fraction,
    max_documents=config.max_documents,
    cache_dir=config.cache_dir or pathlib.Path(args.workdir) / "data",
    workers=args.workers,
    part=data.Part(args.part, args.parts),
  )
  took_s = time.monotonic() - start_s
  print(f"{took_s:.0f} s; the shards are in\n  tokens:{directory}")
  return 0


if __name__ == "__main__":
  cli.define_config(None, "Whose corpus: a file of configs/.")
  flags.DEFINE_string("workdir", None, "Of the run that reads the shards.")
  flags.DEFINE_integer(
    "workers", os.cpu_count(), "Processes that tokenise.", lower_bound=1
  )
  flags.DEFINE_integer("part", 0, "Which part of the files is made here.")
  flags.DEFINE_integer("parts", 1, "How many parts there are.", lower_bound=1)
  flags.mark_flags_as_required(["config", "workdir"])
  cli.run(main)
