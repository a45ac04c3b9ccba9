"""Batches of windows by grain: deterministic, shardable, checkpointable.

Both pipelines give dicts of arrays [rows, seq_len] (see `tokens.Window`), where
rows = batch_size / shard_count. Shard s holds rows [s·rows, (s+1)·rows) of the
batch that a single shard would give, so what is trained on does not depend on
the number of hosts.

The state of an iterator is the number of batches it has given: `get_state`
returns a dict that JSON can hold, and after `set_state` the iterator goes on
with exactly the batches that would have come.
"""

from typing import Protocol, SupportsIndex

import grain

from twell_jax.data import tokens as tokens_lib

Windows = tokens_lib.TokenWindows | tokens_lib.JoinedWindows

# Windows are slices of files: a few threads and batches hide the disk.
_READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)


def make_train_pipeline(
  windows: Windows,
  *,
  batch_size: int,
  seed: int,
  shard_index: int = 0,
  shard_count: int = 1,
) -> grain.IterDataset:
  """Returns an endless stream of shuffled batches.

  Every epoch has an order of its own and holds each window once. A batch may
  lie across the end of an epoch, so no window is dropped, and fewer windows
  than a batch has rows serve too.

  Args:
    windows: what to batch.
    batch_size: rows of the whole batch, over all shards.
    seed: decides the order; at least 0.
    shard_index: which shard this is.
    shard_count: how many shards there are.

  Raises:
    ValueError: the batch cannot be shared out evenly, or a number is out of
      range.
  """
  check_seed(seed)
  shuffled = grain.MapDataset.source(windows).shuffle(seed=seed).repeat()
  return _sharded_batches(
    shuffled,
    batch_size=batch_size,
    shard_index=shard_index,
    shard_count=shard_count,
  )


def make_eval_pipeline(
  windows: Windows,
  *,
  batch_size: int,
  shard_index: int = 0,
  shard_count: int = 1,
) -> grain.IterDataset:
  """Returns one pass over the windows in their order.

  The last batch is filled up with rows of weight 0, so that all batches have
  one shape and all shards the same number of them.

  Args:
    windows: what to batch.
    batch_size: rows of the whole batch, over all shards.
    shard_index: which shard this is.
    shard_count: how many shards there are.

  Raises:
    ValueError: see `make_train_pipeline`.
  """
  return _sharded_batches(
    _FilledUp(windows, batch_size),
    batch_size=batch_size,
    shard_index=shard_index,
    shard_count=shard_count,
  )


def check_seed(seed: int) -> None:
  """Raises ValueError if grain cannot shuffle by this seed."""
  if not 0 <= seed < 2**32:
    raise ValueError(f"{seed=} must be at least 0 and below 2**32")


def check_shards(
  *, batch_size: int, shard_index: int, shard_count: int
) -> None:
  """Raises ValueError if batches cannot be shared out evenly."""
  if batch_size < 1 or shard_count < 1 or batch_size % shard_count:
    raise ValueError(
      f"{batch_size=} must be a positive multiple of {shard_count=}"
    )
  if not 0 <= shard_index < shard_count:
    raise ValueError(
      f"{shard_index=} must be at least 0 and below {shard_count=}"
    )


class _Rows(Protocol):
  def __len__(self) -> int: ...

  def __getitem__(self, index: SupportsIndex, /) -> tokens_lib.Window: ...


class _FilledUp:
  """Windows, then windows of padding up to a multiple of the batch."""

  def __init__(self, windows: Windows, batch_size: int):
    self._windows = windows
    self._batch_size = batch_size

  def __len__(self) -> int:
    num_batches = -(-len(self._windows) // self._batch_size)
    return num_batches * self._batch_size

  def __getitem__(self, index: SupportsIndex) -> tokens_lib.Window:
    index = int(index)
    if index < len(self._windows):
      return self._windows[index]
    return self._windows.padding()


class _ShardRows:
  """The rows of one shard, batch after batch."""

  def __init__(
    self, rows: _Rows, *, batch_size: int, shard_index: int, shard_count: int
  ):
    self._rows = rows
    self._batch_size = batch_size
    self._rows_per_batch = batch_size // shard_count
    self._first_row = shard_index * self._rows_per_batch

  def __len__(self) -> int:
    return len(self._rows) // self._batch_size * self._rows_per_batch

  def __getitem__(self, index: SupportsIndex) -> tokens_lib.Window:
    batch, row = divmod(int(index), self._rows_per_batch)
    return self._rows[batch * self._batch_size + self._first_row + row]


def _sharded_batches(
  rows: _Rows, *, batch_size: int, shard_index: int, shard_count: int
) -> grain.IterDataset:
  check_shards(
    batch_size=batch_size, shard_index=shard_index, shard_count=shard_count
  )
  shard = _ShardRows(
    rows,
    batch_size=batch_size,
    shard_index=shard_index,
    shard_count=shard_count,
  )
  batches = grain.MapDataset.source(shard).batch(
    batch_size // shard_count, drop_remainder=True
  )
  return batches.to_iter_dataset(_READ_OPTIONS)
