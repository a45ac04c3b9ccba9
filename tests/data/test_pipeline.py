"""Batches: each window once per epoch, sharded exactly, resumed exactly."""

import collections
import functools
import itertools
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from twell_jax.data import pipeline
from twell_jax.data import tokens as tokens_lib

SEQ_LEN = 3


def windows_of(num_windows):
  """Windows whose first inputs are 0, 3, 6, ..."""
  ids = np.arange(num_windows * SEQ_LEN + 1, dtype=np.uint16)
  return tokens_lib.TokenWindows(ids, seq_len=SEQ_LEN, pad_id=999)


def take(dataset, count):
  return list(itertools.islice(iter(dataset), count))


def window_numbers(batches):
  return [int(x) // SEQ_LEN for b in batches for x in b["inputs"][:, 0]]


def assert_batches_equal(some, others):
  assert len(some) == len(others)
  for a, b in zip(some, others, strict=True):
    assert a.keys() == b.keys() == {"inputs", "targets", "weights"}
    for name in a:
      np.testing.assert_array_equal(a[name], b[name], strict=True)


def test_batches_have_the_promised_form():
  (batch,) = take(
    pipeline.make_train_pipeline(windows_of(10), batch_size=4, seed=0), 1
  )
  assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
    "inputs": ((4, SEQ_LEN), np.int32),
    "targets": ((4, SEQ_LEN), np.int32),
    "weights": ((4, SEQ_LEN), np.float32),
  }


@pytest.mark.parametrize(("num_windows", "batch_size"), [(10, 4), (3, 8)])
def test_each_window_once_per_epoch(num_windows, batch_size):
  dataset = pipeline.make_train_pipeline(
    windows_of(num_windows), batch_size=batch_size, seed=1
  )
  numbers = window_numbers(take(dataset, num_windows))
  epochs = [
    numbers[i : i + num_windows] for i in range(0, len(numbers), num_windows)
  ]
  assert len(epochs) == batch_size
  for epoch in epochs:
    assert sorted(epoch) == list(range(num_windows))
  assert len(set(map(tuple, epochs))) > 1


def test_the_seed_decides_the_order():
  def numbers(seed):
    dataset = pipeline.make_train_pipeline(
      windows_of(20), batch_size=4, seed=seed
    )
    return window_numbers(take(dataset, 10))

  assert numbers(3) == numbers(3)
  assert numbers(3) != numbers(4)
  assert numbers(3)[:20] != list(range(20))


@hypothesis.given(
  num_windows=st.integers(1, 12),
  shard_count=st.integers(1, 4),
  rows_per_shard=st.integers(1, 3),
  kind=st.sampled_from(["train", "eval"]),
)
def test_shards_together_are_the_unsharded_batches(
  num_windows, shard_count, rows_per_shard, kind
):
  windows = windows_of(num_windows)

  def batches(**shard):
    options = {"batch_size": shard_count * rows_per_shard} | shard
    if kind == "eval":
      return list(pipeline.make_eval_pipeline(windows, **options))
    return take(pipeline.make_train_pipeline(windows, seed=5, **options), 4)

  shards = [
    batches(shard_index=i, shard_count=shard_count) for i in range(shard_count)
  ]
  together = [
    {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for parts in zip(*shards, strict=True)
  ]
  assert_batches_equal(together, batches())


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("stop", [0, 1, 7])
def test_interrupted_equals_unbroken(kind, stop):
  def dataset():
    windows = windows_of(21)
    if kind == "eval":
      return pipeline.make_eval_pipeline(windows, batch_size=2)
    return pipeline.make_train_pipeline(windows, batch_size=2, seed=2)

  unbroken = take(dataset(), 11)
  iterator = iter(dataset())
  before = list(itertools.islice(iterator, stop))
  state = json.loads(json.dumps(iterator.get_state()))
  # What is read after the state was taken must not matter.
  next(iterator)
  resumed = iter(dataset())
  resumed.set_state(state)
  after = list(itertools.islice(resumed, 11 - stop))
  assert_batches_equal(before + after, unbroken)
  resumed.set_state(state)
  assert_batches_equal(
    before + list(itertools.islice(resumed, 11 - stop)), unbroken
  )


@hypothesis.given(num_tokens=st.integers(2, 40), batch_size=st.integers(1, 5))
def test_evaluation_sees_every_target_once_in_order(num_tokens, batch_size):
  ids = np.arange(num_tokens, dtype=np.uint16)
  windows = tokens_lib.TokenWindows(ids, seq_len=SEQ_LEN, pad_id=999)
  batches = list(pipeline.make_eval_pipeline(windows, batch_size=batch_size))
  targets = np.concatenate([b["targets"].ravel() for b in batches])
  weights = np.concatenate([b["weights"].ravel() for b in batches])
  assert {b["targets"].shape for b in batches} == {(batch_size, SEQ_LEN)}
  np.testing.assert_array_equal(targets[weights > 0], ids[1:])
  assert set(targets[weights == 0]) <= {999}
  # A second pass is the same.
  dataset = pipeline.make_eval_pipeline(windows, batch_size=batch_size)
  assert_batches_equal(list(dataset), list(dataset))


def test_shuffling_mixes_near_and_far():
  dataset = pipeline.make_train_pipeline(windows_of(200), batch_size=10, seed=0)
  numbers = window_numbers(take(dataset, 20))
  halves = collections.Counter(n < 100 for n in numbers[:100])
  assert 25 < halves[True] < 75


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"batch_size": 6, "shard_count": 4}, "batch_size=6 .* shard_count=4"),
    ({"batch_size": 0}, "batch_size=0 must be a positive multiple"),
    ({"shard_count": 0}, "shard_count=0"),
    ({"shard_index": 2, "shard_count": 2}, "shard_index=2 must be"),
    ({"shard_index": -1}, "shard_index=-1 must be"),
  ],
)
@pytest.mark.parametrize(
  "make",
  [
    functools.partial(pipeline.make_train_pipeline, seed=0),
    pipeline.make_eval_pipeline,
  ],
  ids=["train", "eval"],
)
def test_uneven_shards(options, message, make):
  with pytest.raises(ValueError, match=message):
    make(windows_of(3), **({"batch_size": 4} | options))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(seed):
  with pytest.raises(ValueError, match=f"seed={seed} must be"):
    pipeline.make_train_pipeline(windows_of(3), batch_size=1, seed=seed)
