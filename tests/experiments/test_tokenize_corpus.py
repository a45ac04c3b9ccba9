"""experiments/tokenize_corpus.py, and a training on what it made."""

import json
import pathlib
import re

import pytest

from experiments import train
from tests.experiments import programs
from twell_jax import data

VOCAB_SIZE = 300


@pytest.fixture
def overrides(tmp_path):
  """Three files of short documents, and a tokenizer."""
  folder = tmp_path / "text"
  folder.mkdir()
  texts = []
  for number in range(3):
    rows = [f"row {i} of file {number}. " * 5 for i in range(30)]
    texts += rows
    lines = [json.dumps({"text": row}) for row in rows]
    (folder / f"{number}.jsonl").write_text("\n".join(lines))
  path = tmp_path / "tokenizer.json"
  # Its merges are few; a text of random bytes has as many as are wanted.
  tokenizer = data.train_tokenizer(
    [*texts, "".join(map(chr, range(97, 123))) * 50], vocab_size=VOCAB_SIZE
  )
  tokenizer.tokenizer.save(str(path))
  return {
    "data.corpus": str(folder),
    "data.tokenizer": str(path),
    "data.store": "shards",
    "data.documents": "separate",
    "steps": 3,
  }


@pytest.mark.slow
def test_shards_and_a_training_on_them(overrides, environment, tmp_path):
  workdir = tmp_path / "work"
  arguments = [
    *("-m", "experiments.tokenize_corpus", f"--workdir={workdir}"),
    *programs.tiny_flags(overrides),
  ]
  for part in ("--part=1", "--part=0"):
    made = programs.run(
      [*arguments, "--workers=1", "--parts=2", part], environment=environment
    )
    assert (made.returncode, made.stderr) == (0, "")
  (directory,) = re.findall(r"tokens:(\S+)", made.stdout)
  shards = data.open_shards(directory)
  assert sum(split.num_documents for split in shards.train) > 50

  trained = programs.run(
    [
      *("-m", "experiments.train", f"--workdir={workdir}"),
      *programs.tiny_flags(overrides),
    ],
    environment=environment,
  )
  assert trained.returncode == 0, trained.stderr
  # Found, not made again.
  assert list((workdir / "data" / "shards").iterdir()) == [
    pathlib.Path(directory)
  ]
  config = programs.tiny_config(overrides)
  config.data.update(corpus=f"tokens:{directory}", tokenizer="")
  loaded = train.load_data(config, tmp_path / "unused")
  batch = next(iter(loaded.train))
  assert batch["segment_ids"].max() > 0
  assert not (tmp_path / "unused").exists()


def test_mistakes(overrides, environment, tmp_path):
  for changes, message in (
    ({"data.tokenizer": ""}, "error: token shards need a tokenizer"),
    ({"data.corpus": str(tmp_path / "no")}, "there is no such file or folder"),
  ):
    process = programs.run(
      [
        *("-m", "experiments.tokenize_corpus", f"--workdir={tmp_path}"),
        *programs.tiny_flags(overrides | changes),
      ],
      environment=environment,
    )
    assert process.returncode == 2
    assert message in process.stderr
    assert process.stderr.count("\n") == 1
