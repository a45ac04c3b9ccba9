"""What a run does when disks, files and numbers fail it."""

import dataclasses
import resource
import signal
import time
from typing import Any

import jax
import numpy as np
import pytest

from tests.training.runs import OPTIONS, STEPS, exact
from twell_jax import training
from twell_jax.nn import Partitioning

# Something to be left as it is besides parameters and moments: λ.
SKIP: dict[str, Any] = {
  "non_finite": "skip",
  "max_skipped_in_a_row": 3,
  "l1": training.L1Options(coefficient=4.0, target_active=1.0),
}


@pytest.fixture
def disk():
  """A disk that can be full: no file can grow beyond some bytes."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)

  class Disk:
    def fill(self, size=0):
      resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    def empty(self):
      resource.setrlimit(resource.RLIMIT_FSIZE, before)

  disk = Disk()
  yield disk
  disk.empty()


def saved(directory):
  return training.saved_steps(directory / "checkpoints")


def on_step(corpus, actions):
  """Input that does something while the batch of a step is made."""
  made = []

  def on_batch(batch):
    made.append(batch)
    action = actions.get(len(made))
    return batch if action is None else (action(batch) or batch)

  return corpus.batches(on_batch)


def wait_for_checkpoint(directory, step):
  deadline_s = time.monotonic() + 60
  while step not in saved(directory):
    assert time.monotonic() < deadline_s
    time.sleep(0.01)


def poisoned(batch):
  """The gradient and the loss of this one are not a number."""
  return batch | {"weights": np.full_like(batch["weights"], np.nan)}


def test_a_full_disk_leaves_what_was_saved(run, corpus, disk, tmp_path):
  def fill(_):
    wait_for_checkpoint(tmp_path / "full", 4)
    disk.fill(2048)  # below a checkpoint's files, above a line of metrics

  with pytest.raises(OSError, match=r"could not be written to \S+, where") as e:
    run("full", batches=on_step(corpus, {7: fill}), checkpoint_every_steps=4)
  assert "GB are free" in str(e.value)
  assert "make room, or mend what it says, and resume" in str(e.value)
  assert saved(tmp_path / "full") == [4]

  disk.empty()
  run("full", start="resume", checkpoint_every_steps=4)
  run("whole", checkpoint_every_steps=4)
  assert exact(tmp_path / "full") == exact(tmp_path / "whole")
  assert saved(tmp_path / "full") == saved(tmp_path / "whole")
  # Nothing remains of the checkpoint that the disk refused.
  assert {path.name for path in (tmp_path / "full/checkpoints").iterdir()} == {
    path.name for path in (tmp_path / "whole/checkpoints").iterdir()
  }


def test_input_that_vanishes(run, corpus, tmp_path):
  def vanish(_):
    raise FileNotFoundError("text.bin is gone")

  with pytest.raises(FileNotFoundError, match="is gone"):
    run("run", batches=on_step(corpus, {9: vanish}))
  # Saved in the background just before.
  assert saved(tmp_path / "run") == [8]
  run("run", start="resume")
  run("whole")
  assert exact(tmp_path / "run") == exact(tmp_path / "whole")


def test_a_loss_that_is_not_a_number_stops_before_it_is_saved(
  run, corpus, tmp_path
):
  with pytest.raises(
    FloatingPointError, match=r"the loss is nan .* at step 8:"
  ):
    run(
      "run",
      batches=on_step(corpus, {8: poisoned}),
      checkpoint_every_steps=4,
    )
  assert saved(tmp_path / "run") == [4]

  def poison_and_stop(batch):
    signal.raise_signal(signal.SIGINT)
    return poisoned(batch)

  # Nor does a signal at this moment save it.
  stopped = on_step(corpus, {8: poison_and_stop})
  with pytest.raises(FloatingPointError):
    run("other", batches=stopped, checkpoint_every_steps=4)
  assert saved(tmp_path / "other") == [4]


def test_skipped_updates_are_counted_whatever_interrupts(
  run, corpus, tmp_path, caplog
):
  poison = dict.fromkeys((4, 5, 7), poisoned)

  def interrupt(_):
    signal.raise_signal(signal.SIGINT)

  with caplog.at_level("WARNING"):
    whole = run("whole", batches=on_step(corpus, poison), **SKIP)
  assert whole.outcome == "finished"
  assert "at step 5: this update is skipped" in caplog.text
  records = exact(tmp_path / "whole")
  counts = [record["skipped_updates"] for record in records]
  assert counts == [0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 3, 3]
  finite = [bool(np.isfinite(record["loss"])) for record in records]
  assert finite == [step not in poison for step in range(1, STEPS + 1)]

  broken = on_step(corpus, poison | {6: interrupt})
  assert run("broken", batches=broken, **SKIP).outcome == "interrupted"
  assert saved(tmp_path / "broken") == [6]
  # Its seventh batch is the first of this process.
  run("broken", batches=on_step(corpus, {1: poisoned}), start="resume", **SKIP)
  np.testing.assert_equal(exact(tmp_path / "broken"), records)

  with pytest.raises(FloatingPointError, match="the last of 2 updates skipped"):
    run(
      "many",
      batches=on_step(corpus, poison),
      **SKIP | {"max_skipped_in_a_row": 2},
    )


def test_a_skipped_update_changes_nothing(config, corpus, single_mesh):
  model = training.abstract_model(config, Partitioning(single_mesh))
  options = dataclasses.replace(OPTIONS, **SKIP)
  optimizer, step = training.make_updates(model, options)
  first, second = (
    training.place_batch(batch, model.partitioning)
    for batch, _ in zip(corpus.batches(), range(2))
  )
  nan = training.place_batch(poisoned(first), model.partitioning)

  def after(*batches):
    state = training.initial_state(model, optimizer, seed=0)
    for batch in batches:
      state, statistics = step(state, batch)
    state = state._replace(rng=jax.random.key_data(state.rng))
    return jax.device_get((state, statistics))

  plain, _ = after(first)
  skipped, statistics = after(first, nan)
  assert not statistics.finite
  assert (plain.step, skipped.step) == (1, 2)
  assert skipped.skipped == (1, 1)
  same = plain._replace(step=skipped.step, skipped=skipped.skipped)
  jax.tree.map(np.testing.assert_array_equal, same, skipped)

  # The next one is made, and ends the row.
  later, statistics = after(first, nan, second)
  assert statistics.finite
  assert later.skipped == (1, 0)
  assert np.any(later.params["embedding"] != skipped.params["embedding"])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"non_finite": "ignore"}, "'ignore' is none of 'stop', 'skip'"),
    (
      {"max_skipped_in_a_row": 0},
      "max_skipped_in_a_row = 0 must be at least 1",
    ),
    ({"stall_timeout_s": 0.0}, "stall_timeout_s = 0.0 must be above 0"),
  ],
)
def test_options(changes, message):
  with pytest.raises(ValueError, match=message):
    training.TrainOptions(steps=1, **changes)
