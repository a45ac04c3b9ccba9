"""Everything in one call, from plain arguments."""

import itertools
import pathlib

import numpy as np
import pytest

from twell_jax import data


@pytest.fixture
def text_dir(tmp_path):
  folder = tmp_path / "text"
  folder.mkdir()
  for i in range(40):
    (folder / f"{i}.txt").write_text(f"This is document number {i}.\n" * 9)
  return folder


@pytest.fixture
def options(tmp_path, text_dir):
  return {
    "corpus": str(text_dir),
    "vocab_size": 270,
    "seq_len": 16,
    "batch_size": 4,
    "held_out_fraction": 0.25,
    "cache_dir": tmp_path / "cache",
  }


def documents_of(batches, tokenizer):
  """Puts a pass over ids in order back into documents."""
  targets = np.concatenate([batch["targets"].ravel() for batch in batches])
  weights = np.concatenate([batch["weights"].ravel() for batch in batches])
  first = batches[0]["inputs"][0, 0]
  text = tokenizer.decode([first, *targets[weights > 0]])
  *documents, rest = text.split("<|endoftext|>")
  assert rest == ""
  return documents


def test_from_text_to_batches(options):
  loaded = data.load_data(**options)
  assert loaded.tokenizer.vocab_size == 270
  assert loaded.num_train_documents + loaded.num_held_out_documents == 40
  (batch,) = itertools.islice(loaded.train, 1)
  assert batch["inputs"].shape == (4, 16)
  assert loaded.held_out is not None
  held_out = list(loaded.held_out)
  assert len(held_out) == loaded.num_held_out_batches
  texts = documents_of(held_out, loaded.tokenizer)
  assert len(texts) == loaded.num_held_out_documents
  folder = pathlib.Path(options["corpus"])
  assert set(texts) <= {path.read_text() for path in folder.iterdir()}
  num_bytes = sum(len(text.encode()) for text in texts)
  assert loaded.held_out_bytes_per_token == pytest.approx(
    num_bytes / loaded.num_held_out_tokens
  )
  total_weight = sum(batch["weights"].sum() for batch in held_out)
  assert total_weight == loaded.num_held_out_tokens - 1
  assert loaded.num_train_windows == -(-(loaded.num_train_tokens - 1) // 16)


def test_second_call_is_the_same_and_makes_nothing(options):
  def listing():
    return {
      path: path.stat().st_mtime_ns for path in options["cache_dir"].rglob("*")
    }

  first = data.load_data(**options)
  made = listing()
  second = data.load_data(**options)
  assert listing() == made
  assert not [path for path in made if "incomplete" in path.name]
  for a, b in itertools.islice(zip(first.train, second.train), 5):
    for name in a:
      np.testing.assert_array_equal(a[name], b[name])


def test_tokenizer_file(options, tmp_path):
  trained = data.load_data(**options).tokenizer
  path = tmp_path / "mine.json"
  trained.tokenizer.save(str(path))
  loaded = data.load_data(**options, tokenizer=str(path))
  assert loaded.tokenizer.key == trained.key
  options["vocab_size"] = 300
  with pytest.raises(ValueError, match=r"vocab_size=300 .* set vocab_size=270"):
    data.load_data(**options, tokenizer=str(path))


def test_nothing_held_out(options):
  options["held_out_fraction"] = 0.0
  loaded = data.load_data(**options)
  assert loaded.held_out is None
  assert loaded.held_out_bytes_per_token is None
  assert loaded.num_train_documents == 40
  assert loaded.num_held_out_batches == loaded.num_held_out_tokens == 0


def test_shards_read_what_one_would(options):
  def batch(**shard):
    return next(iter(data.load_data(**options, **shard).train))["inputs"]

  np.testing.assert_array_equal(
    np.concatenate([batch(shard_index=i, shard_count=2) for i in range(2)]),
    batch(),
  )


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"vocab_size": 256}, "vocab_size=256 must be at least 257"),
    ({"seq_len": 0}, "seq_len=0 must be at least 1"),
    ({"batch_size": 3, "shard_count": 2}, "batch_size=3 must be a positive"),
    ({"seed": -1}, "seed=-1 must be"),
    ({"tokenizer": "absent.json"}, "there is no such tokenizer.json"),
    ({"corpus": "absent"}, "corpus='absent': there is no such file"),
    ({"held_out_fraction": 2}, "held_out_fraction=2 must be"),
  ],
)
def test_errors_come_before_anything_is_written(options, wrong, message):
  with pytest.raises(ValueError, match=message) as error:
    data.load_data(**(options | wrong))
  assert "\n" not in str(error.value)
  assert not options["cache_dir"].exists()


def test_default_corpus(tmp_path):
  loaded = data.load_data(
    max_documents=40,
    held_out_fraction=0.2,
    vocab_size=512,
    seq_len=64,
    batch_size=2,
    cache_dir=tmp_path,
  )
  assert loaded.num_train_documents + loaded.num_held_out_documents == 40
  assert loaded.num_train_tokens > 50_000
  assert loaded.held_out_bytes_per_token is not None
  assert loaded.held_out_bytes_per_token > 1.5
