"""Prepared corpora: splits, caching, interruption, TFDS sets by name."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from twell_jax import data
from twell_jax.data import builder as builder_lib
from twell_jax.data import corpus as corpus_lib
from twell_jax.data import sources, storage


def write_texts(folder, texts):
  folder.mkdir(parents=True, exist_ok=True)
  for i, text in enumerate(texts):
    (folder / f"{i:03}.txt").write_text(text)


def prepare(tmp_path, corpus=None, **options):
  options = {"held_out_fraction": 0.3} | options
  return corpus_lib.prepare_corpus(
    str(tmp_path / "text") if corpus is None else corpus,
    cache_dir=tmp_path / "cache",
    **options,
  )


def prepared_sets(tmp_path):
  return sorted((tmp_path / "cache" / "corpora").glob("*/local_text/1.0.0"))


def test_every_document_is_in_one_split(tmp_path):
  texts = [f"text {i} ü\n" for i in range(60)]
  write_texts(tmp_path / "text", texts)
  corpus = prepare(tmp_path)
  train, held_out = list(corpus.train), list(corpus.held_out)
  assert sorted(train + held_out) == sorted(texts)
  assert len(train) == len(corpus.train)
  assert len(held_out) == len(corpus.held_out)
  assert 5 < len(held_out) < 35
  for text in held_out:
    assert builder_lib.content_fraction(text) < 0.3
  for text in train:
    assert builder_lib.content_fraction(text) >= 0.3


def test_copies_lie_on_one_side(tmp_path):
  write_texts(tmp_path / "text", [f"text {i % 20}" for i in range(60)])
  corpus = prepare(tmp_path)
  train, held_out = list(corpus.train), list(corpus.held_out)
  assert len(train) + len(held_out) == 60
  assert not set(train) & set(held_out)


def test_order_depends_on_names_only(tmp_path):
  texts = [f"text {i}" for i in range(30)]
  for where in ("here", "else/where"):
    write_texts(tmp_path / where, texts)
  first = prepare(tmp_path, str(tmp_path / "here"))
  second = prepare(tmp_path, str(tmp_path / "else/where"))
  assert list(first.train) == list(second.train)
  assert list(first.held_out) == list(second.held_out)
  assert list(first.train) != sorted(first.train)
  assert first.key != second.key


def test_second_call_reuses_and_a_change_prepares_afresh(tmp_path):
  write_texts(tmp_path / "text", [f"text {i}" for i in range(30)])
  first = prepare(tmp_path)
  (made,) = prepared_sets(tmp_path)
  made_at = made.stat().st_mtime_ns
  again = prepare(tmp_path)
  assert again.key == first.key
  assert prepared_sets(tmp_path) == [made]
  assert made.stat().st_mtime_ns == made_at
  assert list(again.train) == list(first.train)

  changed = tmp_path / "text" / "007.txt"
  changed.write_text("other text, longer than before")
  third = prepare(tmp_path)
  assert third.key != first.key
  assert "other text, longer than before" in [*third.train, *third.held_out]
  os.utime(changed, ns=(1, 1))
  keys = {first.key, third.key, prepare(tmp_path).key}
  keys.add(prepare(tmp_path, held_out_fraction=0.4).key)
  keys.add(prepare(tmp_path, text_field="body").key)
  keys.add(prepare(tmp_path, max_documents=25).key)
  assert len(keys) == 6


def test_interrupted_preparation_is_not_taken_for_complete(
  tmp_path, monkeypatch
):
  write_texts(tmp_path / "text", [f"text {i}" for i in range(30)])
  read = sources.TextFile.documents
  calls = []

  def interrupted(self, **options):
    calls.append(self)
    if len(calls) == 20:
      raise KeyboardInterrupt
    return read(self, **options)

  monkeypatch.setattr(sources.TextFile, "documents", interrupted)
  with pytest.raises(KeyboardInterrupt):
    prepare(tmp_path)
  assert prepared_sets(tmp_path) == []
  corpus = prepare(tmp_path)
  assert len(corpus.train) + len(corpus.held_out) == 30


def test_preparation_killed_outright_is_not_taken_for_complete(tmp_path):
  write_texts(tmp_path / "text", [f"text {i}" for i in range(30)])
  program = f"""
import os, signal
from twell_jax.data import corpus, sources
read = sources.TextFile.documents
def killed(self, **options):
  if self.path.endswith("020.txt"):
    os.kill(os.getpid(), signal.SIGKILL)
  return read(self, **options)
sources.TextFile.documents = killed
corpus.prepare_corpus({str(tmp_path / "text")!r},
  cache_dir={str(tmp_path / "cache")!r}, held_out_fraction=0.3)
"""
  killed = subprocess.run([sys.executable, "-c", program], check=False)
  assert killed.returncode == -9
  assert prepared_sets(tmp_path) == []
  corpus = prepare(tmp_path)
  assert len(corpus.train) + len(corpus.held_out) == 30


def test_another_process_that_was_faster_is_believed(tmp_path, monkeypatch):
  write_texts(tmp_path / "text", [f"text {i}" for i in range(30)])
  original = builder_lib.LocalText.download_and_prepare

  def twice(self, **options):
    # The first is the other process; the second finds its place taken.
    other = builder_lib.LocalText(
      sources=self._sources,
      text_field="text",
      held_out_fraction=0.0,
      max_documents=0,
      spool=self._spool,
      data_dir=self._data_dir_root,
      file_format="array_record",
    )
    documents = self._documents

    def late_documents():
      original(other, **options)
      return documents()

    self._documents = late_documents
    original(self, **options)

  monkeypatch.setattr(builder_lib.LocalText, "download_and_prepare", twice)
  corpus = prepare(tmp_path, held_out_fraction=0.0)
  assert len(corpus.train) == 30
  assert len(prepared_sets(tmp_path)) == 1


def test_max_documents_takes_a_cross_section(tmp_path):
  write_texts(tmp_path / "text", [f"text {i:03}" for i in range(60)])
  corpus = prepare(tmp_path, max_documents=20)
  texts = sorted([*corpus.train, *corpus.held_out])
  assert len(texts) == 20
  assert texts != [f"text {i:03}" for i in range(20)]


def test_nothing_held_out(tmp_path):
  write_texts(tmp_path / "text", ["one", "two"])
  corpus = prepare(tmp_path, held_out_fraction=0.0)
  assert corpus.held_out is None
  assert sorted(corpus.train) == ["one", "two"]


def test_blank_documents_are_left_out(tmp_path):
  write_texts(tmp_path / "text", ["", " \n\t", "one"])
  assert list(prepare(tmp_path, held_out_fraction=0.0).train) == ["one"]


def test_file_that_is_not_utf8_is_reported(tmp_path, caplog):
  write_texts(tmp_path / "text", ["one", "two"])
  (tmp_path / "text" / "latin.txt").write_bytes("Grüße".encode("latin-1"))
  with caplog.at_level("WARNING", logger="absl"):
    corpus = prepare(tmp_path, held_out_fraction=0.0)
  assert sorted(corpus.train) == ["one", "two"]
  assert "1 documents are not UTF-8 and were left out: latin.txt#0" in (
    caplog.text
  )


@pytest.mark.parametrize(
  ("texts", "options", "message"),
  [
    (["one"], {"held_out_fraction": 1e-9}, "leaves the held_out split empty"),
    (
      ["one"],
      {"held_out_fraction": 1 - 1e-9},
      "of 1 documents leaves the train split empty",
    ),
    ([" "], {}, "holds no text"),
    (["one"], {"held_out_fraction": 1.0}, "held_out_fraction=1.0 must be"),
    (["one"], {"held_out_fraction": -0.1}, "held_out_fraction=-0.1 must be"),
    (["one"], {"max_documents": -1}, "max_documents=-1 must be"),
    (["one"], {"corpus": ()}, "names no location"),
    (["one"], {"corpus": ("python", "")}, "an empty location"),
    (["one"], {"corpus": ("python", "tokens:a")}, "'tokens:a' is tokenised"),
    (["one"], {"corpus": "tfds:no_such_set"}, "tfds:no_such_set.*TFDS_DATA_DI"),
  ],
)
def test_errors_are_one_line_and_leave_nothing(
  tmp_path, texts, options, message
):
  write_texts(tmp_path / "text", texts)
  with pytest.raises(ValueError, match=message) as error:
    prepare(tmp_path, **options)
  assert "\n" not in str(error.value)
  assert prepared_sets(tmp_path) == []


def test_several_locations_each_file_once(tmp_path):
  write_texts(tmp_path / "text", ["one", "two"])
  write_texts(tmp_path / "more", ["three"])
  locations = (
    str(tmp_path / "text"),
    str(tmp_path / "text" / "*.txt"),
    str(tmp_path / "more"),
  )
  corpus = prepare(tmp_path, locations, held_out_fraction=0.0)
  assert sorted(corpus.train) == ["one", "three", "two"]


class NamedTexts(tfds.core.GeneratorBasedBuilder):
  """What somebody else prepared with TFDS."""

  VERSION = tfds.core.Version("2.0.0")

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(
        {"body": tfds.features.Text(), "n": tfds.features.Scalar(np.int32)}
      ),
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    return {self.split: self._generate_examples()}

  def _generate_examples(self):
    for i in range(40):
      yield i, {"body": f"named {i}", "n": i}


@pytest.fixture
def prepare_named(tmp_path, monkeypatch):
  """Prepares NamedTexts with one split where TFDS looks for data sets."""
  place = tmp_path / "tfds"
  monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(place))

  def named(split):
    tfds.disable_progress_bar()
    monkeypatch.setattr(NamedTexts, "split", split, raising=False)
    NamedTexts(
      data_dir=place, file_format="array_record"
    ).download_and_prepare()

  return named


def test_tfds_set_by_name(tmp_path, prepare_named):
  prepare_named("train")
  corpus = prepare(tmp_path, "tfds:named_texts", text_field="body")
  texts = [*corpus.train, *corpus.held_out]
  assert sorted(texts) == sorted(f"named {i}" for i in range(40))
  with pytest.raises(
    ValueError, match="no text_field='text'; its fields are b"
  ):
    prepare(tmp_path, "tfds:named_texts")
  with pytest.raises(ValueError, match="text_field='n' holds int, not text"):
    prepare(tmp_path, "tfds:named_texts", text_field="n")


def test_token_shards_of_a_tfds_set(tmp_path, prepare_named):
  prepare_named("train")
  named = sources.find_named_set("named_texts")
  # As if it were larger: this one is in one file.
  parts = sources.in_parts([dataclasses.replace(named, num_files=3)])
  assert [part.location.rpartition("[")[2] for part in parts] == [
    *("0:13]", "13:26]", "26:40]")
  ]
  tokenizer = data.train_tokenizer(["named 0123456789"], vocab_size=257)
  directory = tmp_path / "shards"
  data.make_shards(parts, tokenizer, directory=directory, text_field="body")
  made = data.open_shards(directory)
  assert [split.num_documents for split in made.train] == [13, 13, 14]
  ids = np.concatenate([split.tokens[:] for split in made.train])
  assert tokenizer.decode(ids.tolist()) == "".join(
    f"named {document['n']}<|endoftext|>" for document in named.data
  )


def test_tfds_set_without_train_split(tmp_path, prepare_named):
  prepare_named("validation")
  with pytest.raises(ValueError, match=r"no train split; .* are validation"):
    prepare(tmp_path, "tfds:named_texts", text_field="body")


def test_no_tensorflow_no_output_no_warning(tmp_path):
  write_texts(tmp_path / "text", [f"text {i}" for i in range(30)])
  program = f"""
import sys
from twell_jax import data
corpus = data.prepare_corpus({str(tmp_path / "text")!r},
  cache_dir={str(tmp_path / "cache")!r}, held_out_fraction=0.3)
assert len(list(corpus.train)) == len(corpus.train)
assert "tensorflow" not in sys.modules
assert "huggingface_hub" not in sys.modules
"""
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", program],
    capture_output=True,
    check=True,
    text=True,
  )
  assert done.stdout == ""
  assert done.stderr == ""


def test_complete_directory(tmp_path):
  target = tmp_path / "made" / "here"
  with storage.complete_directory(target) as partial:
    (partial / "a").write_text("first")
    assert not target.exists()
  assert (target / "a").read_text() == "first"
  with storage.complete_directory(target) as partial:
    (partial / "a").write_text("second")
  assert (target / "a").read_text() == "first"
  with (
    pytest.raises(KeyboardInterrupt),
    storage.complete_directory(tmp_path / "made" / "not") as partial,
  ):
    raise KeyboardInterrupt
  assert [path.name for path in target.parent.iterdir()] == ["here"]


def test_fingerprint_tells_values_apart():
  assert storage.fingerprint("a", 1) == storage.fingerprint("a", 1)
  assert storage.fingerprint("a", 1) != storage.fingerprint("a", "1")
  assert len(storage.fingerprint(None)) == 16
  assert not pathlib.Path(storage.fingerprint("../..")).is_absolute()
