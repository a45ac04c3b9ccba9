import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from twell_jax.training import MetricsWriter, read_metrics, summarize
from twell_jax.training.step import StepStatistics


def write(directory, steps, *, start_step, loss=1.0):
  with MetricsWriter(directory, start_step=start_step) as writer:
    for step in steps:
      values = {"loss": loss, "l1": [2.0, 3.0]}
      writer.write("train", step=step, values=values)


def test_records_come_back(tmp_path):
  with MetricsWriter(tmp_path, start_step=0) as writer:
    writer.write("train", step=1, values={"loss": 2.5, "l1": [1.0, 2.0]})
    writer.write("held_out", step=1, values={"loss": 2.25})
    # Each line is on disk at once: a killed run keeps what it reported.
    assert len(read_metrics(tmp_path)) == 2
  train = {"kind": "train", "step": 1, "loss": 2.5, "l1": [1.0, 2.0]}
  held_out = {"kind": "held_out", "step": 1, "loss": 2.25}
  assert read_metrics(tmp_path) == [train, held_out]
  assert read_metrics(tmp_path, kind="held_out") == [held_out]
  assert read_metrics(tmp_path / "elsewhere") == []


def test_continuing_records_no_step_twice(tmp_path):
  write(tmp_path, [1, 2, 3, 4], start_step=0)
  write(tmp_path, [3, 4, 5], start_step=2, loss=9.0)
  records = [(r["step"], r["loss"]) for r in read_metrics(tmp_path)]
  assert records == [(1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0), (5, 9.0)]


def test_a_new_run_starts_an_empty_file(tmp_path):
  write(tmp_path, [1, 2], start_step=0)
  write(tmp_path, [1], start_step=0, loss=9.0)
  assert [r["loss"] for r in read_metrics(tmp_path)] == [9.0]


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path):
  write(tmp_path, [1, 2], start_step=0)
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"kind": "train", "step": 3, "lo')
  assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
  write(tmp_path, [3], start_step=2)
  assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3]


def test_tensorboard(tmp_path):
  write(tmp_path / "new", [1], start_step=0)
  write(tmp_path / "continued", [3], start_step=2, loss=9.0)
  (first,) = (tmp_path / "new" / "tensorboard").iterdir()
  (second,) = (tmp_path / "continued" / "tensorboard").iterdir()
  assert scalars(first) == {
    "train/loss": 1.0,
    "train/l1/layer_0": 2.0,
    "train/l1/layer_1": 3.0,
  }
  assert scalars(second)["train/loss"] == 9.0
  # Tells readers to forget what an earlier file holds of these steps.
  purged = [e.step for e in events(second) if e.HasField("session_log")]
  assert purged == [3]


def scalars(path):
  return {
    value.tag: value.simple_value
    for event in events(path)
    for value in event.summary.value
  }


def events(path):
  """Reads framed records: length, its checksum, the event, its checksum."""
  data, found = path.read_bytes(), []
  while data:
    (length,) = struct.unpack_from("<Q", data)
    found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
    data = data[16 + length :]
  return found


@pytest.mark.parametrize(
  ("hot_neurons", "shards", "hot"),
  [(0, 2, []), (2, 1, [0, 1]), (2, 2, [0, 3]), (6, 1, range(6))],
)
def test_neurons_that_fire_often(hot_neurons, shards, hot):
  # Of 200 tokens: two neurons of the first layer are above 1 %, one just not.
  fired = np.array([[90, 2, 0, 3, 1, 0], [0, 0, 0, 0, 0, 0]], np.int32)
  layer, scalar = jnp.zeros(2, jnp.int32), jnp.float32(0)
  statistics = StepStatistics(
    **dict.fromkeys(StepStatistics._fields, scalar)
    | {"overflowed": layer, "dense_tokens": layer, "fired": jnp.array(fired)}
    | {"active": jnp.zeros((4, 2, 5, 10), jnp.int32)}
  )
  summary = summarize(statistics, hot_neurons=hot_neurons, shards=shards)
  np.testing.assert_array_equal(summary.frequent_neurons, [2, 0])
  # A layer without activations has none that are hot.
  share = fired[0, list(hot)].sum() / fired[0].sum()
  np.testing.assert_allclose(summary.hot_share, [share, 0], rtol=1e-6)


@pytest.mark.parametrize("shards", [1, 4])
def test_tokens_count_once_whatever_the_slices_of_neurons(shards):
  """The op counts them in each slice."""
  scalar = jnp.float32(0)
  dense_tokens = jnp.array([200 * shards, 0], jnp.int32)
  statistics = StepStatistics(
    **dict.fromkeys(StepStatistics._fields, scalar)
    | {"overflowed": dense_tokens, "dense_tokens": dense_tokens}
    | {"fired": jnp.zeros((2, 8), jnp.int32)}
    | {"active": jnp.zeros((4, 2, 5, 10), jnp.int32)}
  )
  summary = summarize(statistics, shards=shards)
  np.testing.assert_array_equal(summary.dense_fraction, [1, 0])
  np.testing.assert_array_equal(summary.overflowed, [200, 0])
