"""experiments/train.py as several processes on this machine."""

import contextlib
import signal
import socket
import time

import pytest

from tests.experiments import programs
from twell_jax import training

STEPS = 24
OVERRIDES = {
  "steps": STEPS,
  # The other implementations have tests of their own and compile longer.
  "model.implementation": "reference",
  "model.num_layers": 1,
  "eval.every_steps": 12,
  "checkpoint.every_steps": 6,
}
# Within so many seconds the others end when one process is lost.
HEARTBEAT_TIMEOUT_S = 8


@pytest.fixture(scope="module")
def overrides(corpus, tmp_path_factory):
  cache_dir = tmp_path_factory.mktemp("data")
  return OVERRIDES | {
    "data.corpus": str(corpus),
    "data.cache_dir": str(cache_dir),
  }


@pytest.fixture
def launch(overrides, environment):
  """Starts a run as several processes, which end with the test."""
  with contextlib.ExitStack() as stack:

    def launch(
      workdir,
      *,
      processes=1,
      devices=1,
      changes=None,
      flags=(),
      last_flags=(),  # of the last process alone
    ):
      arguments = [
        "-m",
        "experiments.train",
        f"--workdir={workdir}",
        *programs.tiny_flags(overrides | (changes or {})),
        *flags,
      ]
      places: list[list[str]] = [[]]
      if processes > 1:
        places = [
          [
            f"--coordinator={coordinator}",
            f"--num_processes={processes}",
            f"--process_id={process_id}",
            f"--heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}",
          ]
          for coordinator in [f"localhost:{free_port()}"]
          for process_id in range(processes)
        ]
      places[-1].extend(last_flags)
      return [
        stack.enter_context(
          programs.start(
            [*arguments, *place],
            environment=with_devices(environment, devices),
          )
        )
        for place in places
      ]

    yield launch


def with_devices(environment, count):
  flags = environment["XLA_FLAGS"]
  count_flag = f"--xla_force_host_platform_device_count={count}"
  return environment | {"XLA_FLAGS": f"{flags} {count_flag}"}


def free_port():
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


def finish(started):
  """Waits for processes that are to succeed; what each of them printed."""
  results = [program.result() for program in started]
  for result in results:
    assert result.returncode == 0, result.stderr
  return [result.stdout for result in results]


def wait_for_step(workdir, step, started):
  while True:
    records = training.read_metrics(workdir, kind="train")
    if records and records[-1]["step"] >= step:
      return
    for program in started:
      if program.process.poll() is not None:
        raise AssertionError(program.result().stderr)
    time.sleep(0.01)


def losses(workdir, kind="train"):
  """The loss after each step that was recorded, each of them once."""
  records = training.read_metrics(workdir, kind=kind)
  by_step = {record["step"]: record["loss"] for record in records}
  assert len(by_step) == len(records)
  return by_step


def assert_like(workdir, other):
  """The same losses but for rounding, which training amplifies."""
  for kind in ("train", "held_out"):
    ours, theirs = losses(workdir, kind), losses(other, kind)
    assert max(ours) == STEPS
    assert ours == pytest.approx(theirs, rel=1e-4)
  # Not yet amplified.
  assert losses(workdir)[2] == pytest.approx(losses(other)[2], rel=1e-6)


@pytest.mark.slow
def test_two_processes_stop_together_and_one_goes_on(launch, tmp_path):
  workdir = tmp_path / "two"
  started = launch(workdir, processes=2, devices=2)
  wait_for_step(workdir, 7, started)
  # To one of them, which is not the one that writes.
  started[1].process.send_signal(signal.SIGTERM)
  first, second = (program.result() for program in started)
  assert first.returncode == second.returncode == 130, first.stderr
  step = max(losses(workdir))
  assert step == training.saved_steps(workdir / "checkpoints")[-1]
  assert 7 <= step < STEPS
  assert f"saved step {step}; continue with" in first.stdout
  assert "saved step" not in second.stdout

  alone = {
    "devices": 4,
    "changes": {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2},
  }
  (said,) = finish(launch(workdir, flags=["--resume"], **alone))
  finish(launch(tmp_path / "one", **alone))
  assert said.startswith(f"step {STEPS}: held-out loss ")
  assert_like(workdir, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh",
  # The second cuts the neurons over the processes, which then read the same.
  [{"mesh.data": 2, "mesh.fsdp": 2}, {"mesh.data": 1, "mesh.tensor": 2}],
  ids=["sequences", "neurons"],
)
def test_two_killed_processes_go_on_exactly(launch, tmp_path, mesh):
  form = {
    "processes": 2,
    "devices": 2 if mesh["mesh.data"] == 2 else 1,
    "changes": mesh,
  }
  finish(launch(tmp_path / "one"))
  finish(launch(tmp_path / "whole", **form))
  assert_like(tmp_path / "whole", tmp_path / "one")
  workdir = tmp_path / "killed"
  started = launch(workdir, **form)
  wait_for_step(workdir, 15, started)
  for program in started:
    program.process.kill()
    program.process.wait()
  finish(launch(workdir, flags=["--resume"], **form))
  for kind in ("train", "held_out"):
    assert losses(workdir, kind) == losses(tmp_path / "whole", kind)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(
  "number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "silent"]
)
def test_when_a_process_is_lost_the_other_ends(launch, tmp_path, lost, number):
  started = launch(
    tmp_path, processes=2, changes={"steps": 10_000, "l1.warmup_steps": 5}
  )
  # A step is begun only when the checkpoint before the last is complete.
  wait_for_step(tmp_path, 13, started)
  started[lost].process.send_signal(number)
  begun_s = time.monotonic()
  other = started[1 - lost].result()
  # Heartbeats come several times within their timeout.
  assert time.monotonic() - begun_s < 2 * HEARTBEAT_TIMEOUT_S + 10
  assert other.returncode not in (0, 130)
  assert "another process was lost" in other.stderr or (
    "another task died" in other.stderr
  )
  assert training.saved_steps(tmp_path / "checkpoints")


@pytest.mark.slow
def test_when_a_process_fails_the_other_ends(launch, tmp_path):
  first, second = launch(tmp_path, processes=2, last_flags=["--config.seed=-1"])
  failed = second.result()
  begun_s = time.monotonic()
  assert failed.returncode == 2
  assert failed.stderr.splitlines()[-1].startswith("error: seed")
  other = first.result()
  assert time.monotonic() - begun_s < 2 * HEARTBEAT_TIMEOUT_S + 10
  assert other.returncode not in (0, 130)
  assert "another" in other.stderr
