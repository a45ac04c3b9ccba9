"""Tokenised splits and windows: nothing dropped, nothing twice."""

import itertools
import unittest.mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from twell_jax.data import tokenizer as tokenizer_lib
from twell_jax.data import tokens as tokens_lib

TEXTS = [f"line {i} of text\nanother  line\n\n" * (i + 1) for i in range(20)]


@pytest.fixture(scope="module")
def tokenizer():
  return tokenizer_lib.train_tokenizer(TEXTS, vocab_size=280)


def flat_ids(texts, tokenizer):
  ids = []
  for text in texts:
    ids += [*tokenizer.encode(text), tokenizer.eos_id]
  return ids


@hypothesis.given(num_tokens=st.integers(2, 60), seq_len=st.integers(1, 20))
def test_windows_tile_the_stream(num_tokens, seq_len):
  stream = np.arange(1, num_tokens + 1, dtype=np.uint16)
  windows = tokens_lib.TokenWindows(stream, seq_len=seq_len, pad_id=0)
  items = [windows[i] for i in range(len(windows))]
  inputs, targets, weights = (
    np.concatenate([item[name] for item in items])
    for name in ("inputs", "targets", "weights")
  )
  assert {item["inputs"].shape for item in items} == {(seq_len,)}
  assert inputs.dtype == np.int32
  assert targets.dtype == np.int32
  assert weights.dtype == np.float32
  kept = weights > 0
  np.testing.assert_array_equal(targets[kept], stream[1:])
  np.testing.assert_array_equal(inputs[kept], stream[:-1])
  np.testing.assert_array_equal(weights, kept)
  assert not inputs[~kept].any()
  assert not targets[~kept].any()
  # Only the last window has padding, and not one of padding only.
  assert all(item["weights"].all() for item in items[:-1])
  assert items[-1]["weights"][0] == 1


def test_windows_as_in_the_docstring():
  ids = np.array([1, 2, 3, 4, 5, 6], np.uint32)
  windows = tokens_lib.TokenWindows(ids, seq_len=3, pad_id=9)
  assert len(windows) == 2
  assert windows[0]["inputs"].tolist() == [1, 2, 3]
  assert windows[0]["targets"].tolist() == [2, 3, 4]
  assert windows[1]["inputs"].tolist() == [4, 5, 9]
  assert windows[1]["targets"].tolist() == [5, 6, 9]
  assert windows[1]["weights"].tolist() == [1, 1, 0]
  padding = windows.padding()
  assert padding["inputs"].tolist() == padding["targets"].tolist() == [9, 9, 9]
  assert padding["weights"].tolist() == [0, 0, 0]
  assert repr(windows) == "TokenWindows(6 tokens, seq_len=3, pad_id=9)"
  for index in (-1, 2):
    with pytest.raises(IndexError, match="of 2"):
      windows[index]


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_too_few_tokens(num_tokens):
  with pytest.raises(ValueError, match=f"^{num_tokens} tokens leave nothing"):
    tokens_lib.TokenWindows(np.zeros(num_tokens), seq_len=2, pad_id=0)


def test_windows_without_positions():
  with pytest.raises(ValueError, match="seq_len=0 must be at least 1"):
    tokens_lib.TokenWindows(np.zeros(9), seq_len=0, pad_id=0)


def test_split_on_disk(tmp_path, tokenizer):
  directory = tmp_path / "split"
  split = tokens_lib.tokenize_split(TEXTS, tokenizer, directory=directory)
  assert split.tokens.dtype == np.uint16
  assert split.tokens[:].tolist() == flat_ids(TEXTS, tokenizer)
  assert split.num_documents == len(TEXTS)
  assert split.num_bytes == sum(len(text.encode()) for text in TEXTS)
  assert split.bytes_per_token == split.num_bytes / len(split.tokens)
  # No document is looked at the second time.
  again = tokens_lib.tokenize_split([], tokenizer, directory=directory)
  assert again.num_documents == len(TEXTS)
  np.testing.assert_array_equal(again.tokens[:], split.tokens[:])
  (directory / "summary.json").write_text("")
  with pytest.raises(
    ValueError, match=r"summary\.json cannot be read .* again"
  ):
    tokens_lib.tokenize_split(TEXTS, tokenizer, directory=directory)


def test_large_vocabulary_takes_wider_ids(tmp_path, tokenizer, monkeypatch):
  for size, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
    larger = unittest.mock.PropertyMock(return_value=size)
    monkeypatch.setattr(tokenizer_lib.TextTokenizer, "vocab_size", larger)
    split = tokens_lib.tokenize_split(
      TEXTS, tokenizer, directory=tmp_path / str(size)
    )
    assert split.tokens.dtype == dtype
    assert split.tokens[:].tolist() == flat_ids(TEXTS, tokenizer)


@pytest.mark.parametrize("characters", [1, 7, 100, 1000])
def test_small_batches_and_long_documents_give_the_same_ids(
  tmp_path, tokenizer, monkeypatch, characters
):
  monkeypatch.setattr(tokens_lib, "_CHARACTERS_PER_BATCH", characters)
  split = tokens_lib.tokenize_split(
    TEXTS, tokenizer, directory=tmp_path / "split"
  )
  assert split.tokens[:].tolist() == flat_ids(TEXTS, tokenizer)
  assert split.num_documents == len(TEXTS)
  assert split.num_bytes == sum(len(text.encode()) for text in TEXTS)


@hypothesis.given(
  text=st.text(st.sampled_from("ab1.'s \n\t\r\u00a0é"), max_size=60),
  characters=st.integers(1, 20),
)
def test_a_long_document_is_cut_without_changing_its_ids(
  tokenizer, text, characters
):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tokens_lib, "_CHARACTERS_PER_BATCH", characters)
    pieces = list(tokens_lib._pieces(text))
  assert "".join(piece.text for piece in pieces) == text
  assert [piece.ends_document for piece in pieces[:-1]] == [False] * (
    len(pieces) - 1
  )
  assert pieces[-1].ends_document
  ids = tokenizer.encode_batch([piece.text for piece in pieces])
  assert list(itertools.chain(*ids)) == tokenizer.encode(text)


def test_interruption_leaves_nothing(tmp_path, tokenizer):
  def documents():
    yield from TEXTS
    raise KeyboardInterrupt

  directory = tmp_path / "tokens" / "split"
  with pytest.raises(KeyboardInterrupt):
    tokens_lib.tokenize_split(documents(), tokenizer, directory=directory)
  assert list((tmp_path / "tokens").iterdir()) == []
  split = tokens_lib.tokenize_split(TEXTS, tokenizer, directory=directory)
  assert split.num_documents == len(TEXTS)


def separate(ids, seq_len):
  windows = tokens_lib.TokenWindows(
    np.array(ids, np.uint16), seq_len=seq_len, pad_id=0, documents="separate"
  )
  return [windows[i] for i in range(len(windows))]


def test_separate_documents():
  first, second = separate([5, 6, 0, 7, 8, 0, 0, 9], seq_len=5)
  assert first["inputs"].tolist() == [5, 6, 0, 7, 8]
  assert first["segment_ids"].tolist() == [0, 0, 0, 1, 1]
  assert first["positions"].tolist() == [0, 1, 2, 0, 1]
  # The end of a text is predicted, and predicts nothing.
  assert first["weights"].tolist() == [1, 1, 0, 1, 1]
  # Another empty document, and padding behind it.
  assert second["inputs"].tolist() == [0, 0, 0, 0, 0]
  assert second["segment_ids"].tolist() == [0, 1, 2, 3, 4]
  assert second["weights"].tolist() == [0] * 5
  assert {first[name].dtype for name in ("segment_ids", "positions")} == {
    np.dtype(np.int32)
  }


@hypothesis.given(
  ids=st.lists(st.integers(0, 2), min_size=2, max_size=40),
  seq_len=st.integers(1, 12),
)
def test_separate_documents_begin_behind_ends(ids, seq_len):
  for window in separate(ids, seq_len):
    segment, position = 0, 0
    for i in range(seq_len):
      assert window["segment_ids"][i] == segment
      assert window["positions"][i] == position
      ends = window["inputs"][i] == 0
      assert not (ends and window["weights"][i])
      segment, position = (segment + 1, 0) if ends else (segment, position + 1)


def test_joined_documents_have_no_segments():
  windows = tokens_lib.TokenWindows(np.arange(9), seq_len=2, pad_id=0)
  assert set(windows[0]) == {"inputs", "targets", "weights"}
