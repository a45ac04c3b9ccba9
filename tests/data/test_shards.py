"""Token shards: exact, made in parts and by processes, checked when opened."""

import concurrent.futures
import concurrent.futures.process
import itertools
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from twell_jax import data
from twell_jax.data import builder, pipeline, shards, sources, token_file
from twell_jax.data import tokens as tokens_lib

NUM_FILES, ROWS = 3, 20
SEQ_LEN = 8


def text_of(file, row):
  return f"file {file} row {row} says {row * 7 + file}\n" * (1 + row % 4)


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory):
  """Three Parquet files, of several row groups."""
  folder = tmp_path_factory.mktemp("text")
  for file in range(NUM_FILES):
    rows = [text_of(file, row) for row in range(ROWS)]
    table = pa.table({"text": rows, "id": list(range(ROWS))})
    pq.write_table(table, folder / f"part-{file}.parquet", row_group_size=6)
  return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  texts = [text_of(f, r) for f in range(NUM_FILES) for r in range(ROWS)]
  return data.train_tokenizer(texts, vocab_size=280)


@pytest.fixture(scope="module")
def tokenizer_file(tokenizer, tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
  tokenizer.tokenizer.save(str(path))
  return str(path)


def make(text_dir, tokenizer, directory, **changes):
  found = sources.find_files(str(text_dir))
  options = {"held_out_fraction": 0.3} | changes
  shards.make_shards(found, tokenizer, directory=directory, **options)


@pytest.fixture
def made(text_dir, tokenizer, tmp_path):
  make(text_dir, tokenizer, tmp_path / "made")
  return tmp_path / "made"


def documents_of(splits, tokenizer):
  ids = np.concatenate([split.tokens[:] for split in splits])
  *documents, rest = tokenizer.decode(ids.tolist()).split("<|endoftext|>")
  assert rest == ""
  return documents


def test_every_document_once_in_the_split_of_its_hash(made, tokenizer):
  opened = shards.open_shards(made)
  assert opened.tokenizer.key == tokenizer.key
  assert len(opened.train) == NUM_FILES
  expected: dict[bool, list[str]] = {True: [], False: []}
  for file, row in itertools.product(range(NUM_FILES), range(ROWS)):
    text = text_of(file, row)
    expected[builder.content_fraction(text) < 0.3].append(text)
  for splits, texts in (
    (opened.train, expected[False]),
    (opened.held_out, expected[True]),
  ):
    assert documents_of(splits, tokenizer) == texts
    assert sum(split.num_documents for split in splits) == len(texts)
    assert sum(split.num_bytes for split in splits) == sum(map(len, texts))


def contents(directory):
  return {
    str(path.relative_to(directory)): path.read_bytes()
    for path in directory.rglob("*")
    if path.is_file()
  }


def test_made_by_processes_and_in_parts(text_dir, tokenizer, made, tmp_path):
  together = tmp_path / "together"
  make(
    text_dir, tokenizer, together, workers=2, part=shards.Part(first=0, step=2)
  )
  names = sorted(path.name for path in together.glob("shard-*"))
  assert names == ["shard-00000-of-00003", "shard-00002-of-00003"]
  with pytest.raises(ValueError, match=r"1 of 3 shards .*: shard-00001-of"):
    shards.open_shards(together)
  before = {path: path.stat().st_mtime_ns for path in together.rglob("*.npy")}
  make(text_dir, tokenizer, together, part=shards.Part(first=1, step=2))
  assert contents(together) == contents(made)
  assert all(path.stat().st_mtime_ns == old for path, old in before.items())


def test_what_is_finished_stays(text_dir, tokenizer, made, tmp_path):
  """A source that cannot be read ends the work, and leaves nothing half."""
  folder = tmp_path / "text"
  shutil.copytree(text_dir, folder)
  (folder / "part-1.parquet").write_bytes(b"no parquet")
  directory = tmp_path / "shards"
  with pytest.raises(ValueError, match=r"part-1\.parquet is not a Parquet"):
    make(folder, tokenizer, directory)
  assert [path.name for path in directory.glob("*shard-*")] == [
    "shard-00000-of-00003"
  ]
  shutil.copy(text_dir / "part-1.parquet", folder)
  make(folder, tokenizer, directory)
  assert contents(directory) == contents(made)


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda p: os.truncate(p, p.stat().st_size - 2), r"has \d+ bytes and by"),
    (lambda p: p.unlink(), "no token ids can be read"),
    (lambda p: p.write_bytes(b"x" * 200), "no token ids can be read"),
    # Python has no such character, number and sum.
    *(
      (
        lambda p, header=header: p.write_bytes(
          p.read_bytes()[:10] + header + p.read_bytes()[10 + len(header) :]
        ),
        "no token ids can be read",
      )
      for header in (b"{'a\x17", b"{'a': 01", b"{b'a': 1, ")
    ),
    (
      lambda p: np.save(p, np.zeros((3, 2), np.uint16)),
      r"uint16 \[3, 2\], not",
    ),
    (
      lambda p: np.save(p, np.zeros(9, np.float16)),
      r"float16 \[9\], not a list",
    ),
    (lambda p: (p.parent / "summary.json").unlink(), "cannot be read"),
    (lambda p: shutil.rmtree(p.parent), "1 of 3 shards are not in"),
  ],
  ids=[
    *("truncated", "absent", "overwritten"),
    *("no token", "no number", "no name", "a table", "fractions"),
    *("no summary", "no shard"),
  ],
)
def test_damaged_shards_are_named(made, damage, message):
  damage(made / "shard-00001-of-00003" / "train.npy")
  with pytest.raises(ValueError, match=message) as error:
    shards.open_shards(made)
  assert "shard-00001-of-00003" in str(error.value)
  assert "\n" not in str(error.value)


def test_no_shards_at_all(tmp_path):
  with pytest.raises(ValueError, match="must be token shards"):
    shards.open_shards(tmp_path)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"held_out_fraction": 1.0}, "held_out_fraction=1.0 must be"),
    ({"workers": 0}, "workers=0 must be at least 1"),
    ({"part": shards.Part(2, 2)}, "part 2 of 2"),
  ],
)
def test_mistakes(text_dir, tokenizer, tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    make(text_dir, tokenizer, tmp_path / "none", **changes)
  assert not (tmp_path / "none").exists()


def test_a_split_of_nothing(text_dir, tokenizer, tmp_path):
  make(text_dir, tokenizer, tmp_path / "made", held_out_fraction=1e-9)
  with pytest.raises(ValueError, match=r"the held_out split of .* is empty"):
    shards.open_shards(tmp_path / "made")


def windows_of(made, documents="joined"):
  opened = shards.open_shards(made)
  return tokens_lib.JoinedWindows(
    [
      tokens_lib.TokenWindows(
        split.tokens, seq_len=SEQ_LEN, pad_id=0, documents=documents
      )
      for split in opened.train
    ]
  )


def test_windows_of_all_shards(made):
  windows = windows_of(made)
  opened = shards.open_shards(made)
  targets = [
    window["targets"][window["weights"] > 0]
    for window in (windows[i] for i in range(len(windows)))
  ]
  # All ids but the first of each shard.
  np.testing.assert_array_equal(
    np.concatenate(targets),
    np.concatenate([split.tokens[1:] for split in opened.train]),
  )
  for index in (-1, len(windows)):
    with pytest.raises(IndexError):
      windows[index]
  assert windows.padding()["weights"].sum() == 0


def test_batches_are_sharded_and_resumed_exactly(made):
  def batches(**shard):
    return iter(
      pipeline.make_train_pipeline(
        windows_of(made, "separate"), batch_size=6, seed=3, **shard
      )
    )

  whole = list(itertools.islice(batches(), 40))
  rows = [
    list(itertools.islice(batches(shard_index=i, shard_count=3), 40))
    for i in range(3)
  ]
  resumed = batches()
  for _ in range(17):
    next(resumed)
  state = json.loads(json.dumps(resumed.get_state()))
  resumed = batches()
  resumed.set_state(state)
  rest = list(itertools.islice(resumed, 23))
  for number, batch in enumerate(whole):
    assert set(batch) == {
      *("inputs", "targets", "weights", "segment_ids", "positions")
    }
    for name, value in batch.items():
      parts = np.concatenate([part[number][name] for part in rows])
      np.testing.assert_array_equal(parts, value)
      if number >= 17:
        np.testing.assert_array_equal(rest[number - 17][name], value)


def test_a_file_that_vanishes(made):
  windows = windows_of(made)
  assert windows[0]["inputs"].shape == (SEQ_LEN,)
  path = made / "shard-00000-of-00003" / "train.npy"
  os.truncate(path, 140)
  with pytest.raises(ValueError, match=r"shard-00000.*was cut short"):
    windows[1]
  path.unlink()
  with pytest.raises(ValueError, match=r"shard-00000-of-00003/train.npy are g"):
    windows[1]
  # In a pipeline, too, where threads read ahead.
  batches = pipeline.make_train_pipeline(windows, batch_size=200, seed=0)
  with pytest.raises(ValueError, match=r"delete .* to tokenise"):
    next(iter(batches))


def test_ids_that_the_vocabulary_has_not(made):
  """Would be another token's, silently: an embedding is looked up by it."""
  windows = windows_of(made)
  path = made / "shard-00000-of-00003" / "train.npy"
  ids = np.load(path)
  ids[3] = 280
  np.save(path, ids)
  with pytest.raises(
    ValueError, match=r"shard-00000.* is 280, of a vocab.*280"
  ):
    windows[0]
  assert windows[1]["inputs"].max() < 280


class DyingPool(concurrent.futures.Executor):
  """Begins a worker in this process; there it is killed."""

  def __init__(self, workers, *, mp_context, initializer, initargs):
    del mp_context
    assert workers == 2
    initializer(*initargs)

  def submit(self, fn, /, *args, **kwargs):
    del fn, args, kwargs
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_exception(concurrent.futures.process.BrokenProcessPool("dead"))
    return future


def test_a_worker_that_dies(text_dir, tokenizer, tmp_path, monkeypatch):
  monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", DyingPool)
  monkeypatch.setattr(shards.os, "cpu_count", lambda: 7)
  # What is set in this test is taken back.
  monkeypatch.setenv("RAYON_NUM_THREADS", "")
  monkeypatch.delenv("RAYON_NUM_THREADS")
  with pytest.raises(ChildProcessError, match="one of workers=2 died"):
    make(text_dir, tokenizer, tmp_path / "made", workers=2)
  assert os.environ["RAYON_NUM_THREADS"] == "3"


def test_loading(text_dir, tokenizer_file, tmp_path):
  options = {
    "vocab_size": 280,
    "seq_len": SEQ_LEN,
    "batch_size": 4,
    "cache_dir": tmp_path / "cache",
  }
  corpus = {
    "corpus": str(text_dir),
    "held_out_fraction": 0.3,
    "tokenizer": tokenizer_file,
  }
  loaded = data.load_data(**options, **corpus, store="shards")
  one_array = data.load_data(**options, **corpus)
  for name in (
    *("num_train_tokens", "num_train_documents", "num_held_out_documents"),
    *("num_held_out_tokens", "held_out_bytes_per_token"),
  ):
    assert getattr(loaded, name) == getattr(one_array, name), name
  assert loaded.held_out is not None
  assert len(list(loaded.held_out)) == loaded.num_held_out_batches
  # Made before, elsewhere; the tokenizer comes with them.
  directory = data.tokenize_corpus(
    **corpus, vocab_size=280, cache_dir=tmp_path / "cache"
  )
  moved = shutil.copytree(directory, tmp_path / "moved")
  again = data.load_data(**options, corpus=f"tokens:{moved}")
  for a, b in itertools.islice(zip(loaded.train, again.train), 5):
    np.testing.assert_array_equal(a["inputs"], b["inputs"])
  with pytest.raises(ValueError, match="set vocab_size=280"):
    data.load_data(**(options | {"vocab_size": 300}), corpus=f"tokens:{moved}")


def test_shards_that_do_not_fit_the_arguments(text_dir, tokenizer, tmp_path):
  make(text_dir, tokenizer, tmp_path / "made", held_out_fraction=0.0)
  options = {
    "corpus": f"tokens:{tmp_path / 'made'}",
    "vocab_size": 280,
    "seq_len": 4,
    "batch_size": 1,
    "cache_dir": tmp_path / "cache",
  }
  with pytest.raises(
    ValueError, match=r"held_out_fraction = 0\.1, and the tok"
  ):
    data.load_data(**options, held_out_fraction=0.1)
  with pytest.raises(ValueError, match="max_documents=2 does not go with"):
    data.load_data(**options, held_out_fraction=0.0, max_documents=2)
  assert data.load_data(**options, held_out_fraction=0.0).held_out is None


def test_another_tokenizer_than_that_of_the_shards(
  made, tokenizer_file, tmp_path
):
  other = tmp_path / "other.json"
  data.train_tokenizer(["abc" * 50], vocab_size=258).tokenizer.save(str(other))
  options = {"seq_len": 4, "batch_size": 1, "cache_dir": tmp_path}
  corpus = f"tokens:{made}"
  loaded = data.load_data(
    **options, corpus=corpus, vocab_size=280, tokenizer=tokenizer_file
  )
  assert loaded.num_train_documents > 0
  with pytest.raises(ValueError, match="is not the one that the token shards"):
    data.load_data(
      **options, corpus=corpus, vocab_size=280, tokenizer=str(other)
    )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"tokenizer": ""}, "token shards need a tokenizer"),
    ({"max_documents": 3}, "max_documents=3 does not go with token shards"),
    ({"store": "pile"}, "store='pile' is unknown"),
    ({"documents": "apart"}, "documents='apart' is unknown"),
    ({"corpus": ""}, "an empty location"),
  ],
)
def test_choices_that_do_not_go(
  text_dir, tokenizer_file, tmp_path, changes, message
):
  options = {
    "corpus": str(text_dir),
    "tokenizer": tokenizer_file,
    "vocab_size": 280,
    "seq_len": 4,
    "batch_size": 1,
    "cache_dir": tmp_path / "cache",
    "store": "shards",
  }
  with pytest.raises(ValueError, match=message):
    data.load_data(**(options | changes))
  assert not (tmp_path / "cache").exists()


def test_runs_of_ids_only(made):
  path = made / "shard-00000-of-00003" / "train.npy"
  ids = token_file.TokenFile(path, vocab_size=280)
  np.testing.assert_array_equal(ids[:][3:7], ids[3:7])
  assert ids[5:5].size == ids[9:2].size == 0
  with pytest.raises(ValueError, match="not by a step of 2"):
    ids[::2]


def test_shards_that_are_mostly_padding(made, tmp_path, caplog):
  options = {"vocab_size": 280, "batch_size": 1, "cache_dir": tmp_path}
  for seq_len, warnings in ((4, 0), (10_000, 1)):
    caplog.clear()
    data.load_data(corpus=f"tokens:{made}", seq_len=seq_len, **options)
    said = [r for r in caplog.records if "are padding" in r.getMessage()]
    assert len(said) == warnings


def test_paths_of_the_home_directory(
  made, tokenizer_file, tmp_path, monkeypatch
):
  home = made.parent
  shutil.copy(tokenizer_file, home / "mine.json")
  monkeypatch.setenv("HOME", str(home))
  loaded = data.load_data(
    corpus=f"tokens:~/{made.name}",
    tokenizer="~/mine.json",
    vocab_size=280,
    seq_len=4,
    batch_size=1,
    cache_dir=tmp_path,
  )
  assert loaded.num_train_documents > 0


def test_others_may_read_what_is_made(made):
  """As far as the user's umask lets them, as with any file."""
  (made.parent / "any").mkdir()
  expected = (made.parent / "any").stat().st_mode
  assert made.stat().st_mode == expected
  assert (made / "shard-00000-of-00003").stat().st_mode == expected
