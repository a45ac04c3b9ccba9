import struct

from tensorboardX.proto import event_pb2

from twell_jax.training import MetricsWriter, read_metrics


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
