"""What one process can find out about several; the rest is in programs.

tests/experiments/test_train_processes.py starts them.
"""

import threading

import jax
import pytest

from twell_jax import training
from twell_jax.training import disk, distributed
from twell_jax.training.sharding import equal_part
from twell_jax.training.watchdog import Watchdog

PLACE = {"coordinator": "localhost:1", "num_processes": 2, "process_id": 0}


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (
      {"coordinator": "localhost:1"},
      "coordinator without num_processes and process_id: give all of",
    ),
    ({"process_id": 0}, "process_id without coordinator and num_processes"),
    (PLACE | {"coordinator": "localhost"}, "'localhost' is not HOST:PORT"),
    (PLACE | {"process_id": 2}, "process_id = 2 must be from 0 to .* = 1"),
    (PLACE | {"num_processes": 0}, "num_processes = 0 must be at least 1"),
    (PLACE | {"heartbeat_timeout_s": 0}, "heartbeat_timeout_s = 0 must be at"),
    ({"cluster": "lsf"}, "cluster = 'lsf' is none of 'auto', 'slurm'"),
    (PLACE | {"cluster": "slurm"}, "finds coordinator and num_processes and"),
  ],
)
def test_a_mistake_in_the_place_of_a_process(arguments, message):
  with pytest.raises(ValueError, match=message) as error:
    training.join_processes(**arguments)
  assert "\n" not in str(error.value)
  assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
  ("arguments", "raised", "expected"),
  [
    (
      {"cluster": "auto"},
      ValueError("coordinator_address should be defined."),
      pytest.raises(
        ValueError, match=r"'auto' does not describe this process .*launcher"
      ),
    ),
    (
      PLACE | {"start_timeout_s": 7},
      jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: barrier\nmore"),
      pytest.raises(
        ConnectionError, match=r"0 of 2 did not .* localhost:1 within 7 s"
      ),
    ),
  ],
  ids=["no cluster", "no others"],
)
def test_what_jax_finds_out(arguments, raised, expected, monkeypatch):
  def initialize(*args, **kwargs):
    raise raised

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  with expected as error:
    training.join_processes(**arguments)
  assert "\n" not in str(error.value)


def test_one_process_needs_nothing():
  training.join_processes()
  assert not jax.distributed.is_initialized()
  assert training.is_first()
  assert distributed.all_agree(True)
  assert not distributed.all_agree(False)
  with training.first_process_first("here", timeout_s=0.1):
    pass
  mesh = training.make_mesh()
  vote = distributed.make_vote(mesh)
  assert [vote(wish) for wish in (False, True, False)] == [False, True, False]
  assert training.data_shard(mesh) == training.DataShard(index=0, count=1)


@pytest.mark.parametrize(
  ("held", "parts"),
  [
    # Data parallel; a tensor axis over pairs of processes; over all of them.
    ([{0, 1}, {2, 3}], [(0, 2), (1, 2)]),
    ([{0}, {0}, {1}, {1}], [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ([{0}, {0}], [(0, 1), (0, 1)]),
  ],
)
def test_what_each_process_reads(held, parts):
  for process, (index, count) in enumerate(parts):
    part = equal_part(
      dict(enumerate(held)), pieces=len(set.union(*held)), process=process
    )
    assert part == training.DataShard(index, count)


@pytest.mark.parametrize(
  "held", [[{0, 2}, {1, 3}], [{0, 1}, {1, 2}], [{0, 1, 2}, {3}]]
)
def test_parts_that_are_not_equal(held):
  with pytest.raises(ValueError, match=r"would hold .* no equal cut"):
    equal_part(dict(enumerate(held)), pieces=4, process=0)


def test_a_process_that_waits_too_long_ends(capfd):
  codes: list[int] = []
  ended = threading.Event()

  def end(code):
    codes.append(code)
    ended.set()

  with Watchdog(0.2, end=end) as watchdog:
    watchdog.report("step 7")
    assert ended.wait(10)
  assert codes == [70]
  message = capfd.readouterr().err
  assert "nothing was finished for 0.2 s after step 7" in message
  assert len(message.splitlines()) == 1


def test_reports_keep_a_process_alive():
  codes: list[int] = []
  with Watchdog(60.0, end=codes.append) as watchdog:
    for step in range(1000):
      watchdog.report(f"step {step}")
  assert codes == []


def test_what_is_said_of_a_full_disk(tmp_path):
  with (
    pytest.raises(OSError, match=r"x could not be written to \S+/new/a") as e,
    disk.writing("x", tmp_path / "new" / "a"),
  ):
    raise ValueError("No\nspace left")
  assert "GB are free (No space left). Earlier" in str(e.value)
  with (
    pytest.raises(jax.errors.JaxRuntimeError, match="peer"),
    disk.writing("x", tmp_path),
  ):
    raise jax.errors.JaxRuntimeError("peer")
