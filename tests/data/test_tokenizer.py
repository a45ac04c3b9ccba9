"""The byte-pair tokenizer: exact, deterministic, loadable."""

import itertools
import os
import subprocess
import sys

import fsspec
import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from twell_jax.data import tokenizer as tokenizer_lib

TEXTS = [
  f"def function_{i}(argument):\n  return {i} * argument  # größer\n"
  for i in range(50)
]


@pytest.fixture(scope="module")
def trained():
  return tokenizer_lib.train_tokenizer(TEXTS, vocab_size=300)


def test_vocabulary(trained):
  assert trained.vocab_size == 300
  assert trained.eos_id == 0
  assert trained.decode([0]) == tokenizer_lib.END_OF_TEXT
  assert len(trained.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2


@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"])))
@hypothesis.example("<|endoftext|> \x00\r\n\t  e\u0301 ﬁ 𝄞 \u200b\ufeff")
def test_round_trip_is_exact(trained, text):
  ids = trained.encode(text)
  assert trained.decode(ids) == text
  assert trained.eos_id not in ids
  assert all(0 <= i < trained.vocab_size for i in ids)
  assert trained.encode_batch([text, "", text]) == [ids, [], ids]


def test_training_is_deterministic(trained):
  again = tokenizer_lib.train_tokenizer(iter(TEXTS), vocab_size=300)
  assert again.key == trained.key
  assert again.tokenizer.to_str() == trained.tokenizer.to_str()
  other = tokenizer_lib.train_tokenizer(TEXTS, vocab_size=301)
  assert other.key != trained.key


def test_training_reads_the_sample_only(trained):
  endless = itertools.chain(TEXTS, itertools.repeat("zebra " * 1000))
  sample_bytes = sum(len(text.encode()) for text in TEXTS)
  sampled = tokenizer_lib.train_tokenizer(
    endless, vocab_size=300, sample_bytes=sample_bytes
  )
  assert sampled.key == trained.key
  one_huge = tokenizer_lib.train_tokenizer(
    ["".join(TEXTS) + "zebra " * 1000],
    vocab_size=300,
    sample_bytes=len("".join(TEXTS)),
  )
  assert "zebra" not in one_huge.tokenizer.get_vocab()


@pytest.mark.parametrize(
  ("vocab_size", "message"),
  [
    (256, "vocab_size=256 must be at least 257"),
    (100_000, "vocab_size=100000: .* merges for [0-9]+ ids only"),
  ],
)
def test_vocabulary_size_errors(vocab_size, message):
  with pytest.raises(ValueError, match=message):
    tokenizer_lib.train_tokenizer(TEXTS, vocab_size=vocab_size)


def test_bytes_alone_are_a_vocabulary():
  smallest = tokenizer_lib.train_tokenizer(
    [], vocab_size=tokenizer_lib.MIN_VOCAB_SIZE
  )
  assert len(smallest.encode("größer")) == len("größer".encode())


def test_cache(tmp_path, trained):
  options = {"corpus_key": "k", "vocab_size": 300, "cache_dir": tmp_path}
  first = tokenizer_lib.cached_tokenizer(TEXTS, **options)
  assert first.key == trained.key
  # No document is looked at the second time.
  assert tokenizer_lib.cached_tokenizer([], **options).key == trained.key
  other = tokenizer_lib.cached_tokenizer(
    TEXTS[:40], **(options | {"corpus_key": "l"})
  )
  assert other.vocab_size == 300
  assert len(list(tmp_path.glob("tokenizers/*/tokenizer.json"))) == 2


@pytest.mark.parametrize(
  "name", ["</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"]
)
def test_end_of_text_of_a_loaded_tokenizer(tmp_path, name):
  published = tokenizers.Tokenizer(
    models.WordLevel({"<unk>": 0, "a": 1, "b": 5}, unk_token="<unk>")
  )
  published.add_special_tokens([name])
  published.enable_truncation(1)
  published.enable_padding(length=8)
  published.save(os.fspath(tmp_path / "tokenizer.json"))
  loaded = tokenizer_lib.load_tokenizer(tmp_path / "tokenizer.json")
  assert loaded.decode([loaded.eos_id]) == name
  # Ids may have holes: what counts is the largest.
  assert loaded.vocab_size == 6
  assert loaded.encode("b") == [5]


def test_loaded_tokenizer_is_not_cut_short_or_padded(tmp_path, trained):
  published = tokenizers.Tokenizer.from_str(trained.tokenizer.to_str())
  published.enable_truncation(3)
  published.enable_padding(length=500)
  published.save(os.fspath(tmp_path / "tokenizer.json"))
  loaded = tokenizer_lib.load_tokenizer(tmp_path / "tokenizer.json")
  assert loaded.encode(TEXTS[0]) == trained.encode(TEXTS[0])
  assert loaded.encode_batch(TEXTS) == trained.encode_batch(TEXTS)
  assert loaded.key == trained.key


def test_a_published_tokenizer_by_url():
  """With the special tokens and pieces of SmolLM2's."""
  special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
  published = tokenizers.Tokenizer(models.BPE())
  published.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  published.decoder = decoders.ByteLevel()
  published.train_from_iterator(
    TEXTS,
    trainer=trainers.BpeTrainer(
      vocab_size=280,
      special_tokens=special,
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
    ),
  )
  files = fsspec.filesystem("memory")
  files.pipe("/ORG/NAME/tokenizer.json", published.to_str().encode())
  try:
    loaded = tokenizer_lib.load_tokenizer("memory://ORG/NAME/tokenizer.json")
  finally:
    files.rm("/ORG", recursive=True)
  assert (loaded.vocab_size, loaded.eos_id) == (280, 0)
  text = "<|im_end|> 2026\n größer<|endoftext|>"
  ids = loaded.encode(text)
  assert loaded.decode(ids) == text
  # Text that spells a special token is text, and a digit is a token.
  assert not set(ids) & {0, 1, 2, 3}
  assert [loaded.decode([i]) for i in loaded.encode("2026")] == list("2026")


def test_a_url_that_cannot_be_read():
  url = "memory://ORG/absent.json"
  with pytest.raises(ValueError, match=r"absent\.json' cannot .*; bring the f"):
    tokenizer_lib.load_tokenizer(url)


def test_loading_errors(tmp_path):
  path = tmp_path / "tokenizer.json"
  with pytest.raises(ValueError, match=r"tokenizer\.json': there is no such"):
    tokenizer_lib.load_tokenizer(path)
  path.write_text("{}")
  with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
    tokenizer_lib.load_tokenizer(path)
  tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(
    os.fspath(path)
  )
  with pytest.raises(ValueError, match=r"no end-of-text token; add one of <"):
    tokenizer_lib.load_tokenizer(path)


def test_fork_after_use_is_silent():
  program = """
import os
from twell_jax.data import tokenizer
texts = ["one two three"] * 100
made = tokenizer.train_tokenizer(texts, vocab_size=260)
made.encode_batch(texts)
child = os.fork()
if child == 0:
  made.encode(texts[0])
  os._exit(0)
os.waitpid(child, 0)
"""
  environment = dict(os.environ)
  environment.pop("TOKENIZERS_PARALLELISM", None)
  # Only ours may speak: Python itself warns of any fork beside threads.
  done = subprocess.run(
    [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
    capture_output=True,
    check=True,
    env=environment,
    text=True,
    timeout=60,
  )
  assert done.stdout + done.stderr == ""
