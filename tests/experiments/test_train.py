"""experiments/train.py as a user runs it: to its end, killed, interrupted."""

import pathlib
import random
import re
import shlex
import signal
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

from experiments import train
from tests.experiments import programs
from twell_jax import nn, training

STEPS = 30
CHECKPOINT_EVERY = 4
OVERRIDES = {
  "steps": STEPS,
  "eval.every_steps": 6,
  "checkpoint.every_steps": CHECKPOINT_EVERY,
}


class Stopped(NamedTuple):
  """What a program that a signal ended has left."""

  returncode: int
  stdout: str
  stderr: str
  train_steps: list[int]  # with a record
  saved_steps: list[int]


@pytest.fixture(scope="module")
def overrides(corpus, tmp_path_factory):
  cache_dir = tmp_path_factory.mktemp("data")
  return OVERRIDES | {
    "data.corpus": str(corpus),
    "data.cache_dir": str(cache_dir),
  }


@pytest.fixture(scope="module")
def whole(overrides, environment, tmp_path_factory):
  """A run that nothing disturbs: its folder and its process."""
  workdir = tmp_path_factory.mktemp("runs") / "whole"
  process = programs.run(arguments(workdir, overrides), environment=environment)
  return workdir, process


@pytest.fixture(scope="module")
def killed(whole, overrides, environment, tmp_path_factory):
  """A run that SIGKILL ends twice, at steps that differ from test to test.

  The second time it is about to write a checkpoint.
  """
  del whole  # has prepared the text and compiled the programs
  workdir = tmp_path_factory.mktemp("runs") / "broken"
  command = arguments(workdir, overrides)
  first = stop(
    command,
    workdir,
    signal.SIGKILL,
    after_step=random.randint(CHECKPOINT_EVERY + 1, STEPS // 2 - 4),
    environment=environment,
  )
  assert first.returncode == -signal.SIGKILL, first.stderr
  stopped = stop(
    [*command, "--resume"],
    workdir,
    signal.SIGKILL,
    after_step=first.train_steps[-1] + 1,
    while_saving=True,
    environment=environment,
  )
  return workdir, stopped


@pytest.fixture(scope="module")
def interrupted(killed, overrides, environment):
  """The killed run continued, and stopped again by Ctrl-C."""
  workdir, stopped = killed
  return stop(
    [*arguments(workdir, overrides), "--resume"],
    workdir,
    signal.SIGINT,
    # Only records of its own: those after the checkpoint are removed first.
    after_step=random.randint(stopped.train_steps[-1] + 1, STEPS - 8),
    environment=environment,
  )


@pytest.fixture(scope="module")
def continued(killed, interrupted, environment):
  """The same run, continued to its end by the command that was printed."""
  workdir, _ = killed
  command = interrupted.stdout.rstrip().splitlines()[-1]
  program, *rest = shlex.split(command)
  assert program == "python"
  return workdir, programs.run(rest, environment=environment)


def arguments(workdir, overrides):
  flags = programs.tiny_flags(overrides)
  return ["-m", "experiments.train", f"--workdir={workdir}", *flags]


def stop(
  arguments,
  workdir,
  number,
  *,
  after_step,
  environment,
  while_saving=False,
  delay_s=0.0,
):
  """Runs a program and sends it a signal after a step and a checkpoint."""
  with programs.start(arguments, environment=environment) as program:
    while program.process.poll() is None:
      records = training.read_metrics(workdir, kind="train")
      saved = training.saved_steps(workdir / "checkpoints")
      begun = any((workdir / "checkpoints").glob("*checkpoint-tmp*"))
      if (
        saved
        and records
        and records[-1]["step"] >= after_step
        and (begun or not while_saving)
      ):
        time.sleep(delay_s)
        program.process.send_signal(number)
        break
      time.sleep(0.002 if while_saving else 0.01)
    result = program.result()
  return Stopped(
    result.returncode,
    result.stdout,
    result.stderr,
    [r["step"] for r in training.read_metrics(workdir, kind="train")],
    training.saved_steps(workdir / "checkpoints"),
  )


def exact_records(workdir, kind):
  """What must not depend on interruptions: everything but the speed."""
  records = training.read_metrics(workdir, kind=kind)
  for record in records:
    record.pop("tokens_per_s", None)
  return records


def final_parameters(workdir: pathlib.Path, overrides):
  config = programs.tiny_config(overrides)
  mesh = training.make_mesh(devices=jax.devices()[:1])
  model = training.abstract_model(
    train.model_config(config), nn.Partitioning(mesh)
  )
  options = train.train_options(config)
  optimizer = training.make_optimizer(options.optimizer, steps=options.steps)
  with training.Checkpoints(workdir / "checkpoints") as checkpoints:
    restored = checkpoints.restore(training.abstract_state(model, optimizer))
  assert restored.state.step == STEPS
  return restored.state.params


def test_a_run_to_its_end(whole):
  workdir, process = whole
  assert process.returncode == 0, process.stderr
  # The progress bar is not buried under what libraries log.
  assert re.search(r"^[IWE]\d{4} ", process.stderr, re.MULTILINE) is None
  records = training.read_metrics(workdir, kind="train")
  assert [record["step"] for record in records] == list(range(1, STEPS + 1))
  losses = [record["loss"] for record in records]
  assert np.all(np.isfinite(losses))
  assert np.mean(losses[-5:]) < np.mean(losses[:5])

  held_out = training.read_metrics(workdir, kind="held_out")
  every = {
    *range(6, STEPS, 6),
    *range(CHECKPOINT_EVERY, STEPS, CHECKPOINT_EVERY),
  }
  assert [record["step"] for record in held_out] == sorted({*every, STEPS})
  (last_line,) = process.stdout.splitlines()
  loss = re.fullmatch(
    rf"step {STEPS}: held-out loss (\d+\.\d{{4}}), "
    r"\d+\.\d\d% of activations active",
    last_line,
  )
  assert loss is not None, last_line
  assert loss[1] == f"{held_out[-1]['loss']:.4f}"

  steps = training.saved_steps(workdir / "checkpoints")
  assert steps[-1] == STEPS
  (events,) = (workdir / "tensorboard").glob("events.out.tfevents.*")
  assert b"train/loss" in events.read_bytes()
  assert {path.name for path in workdir.iterdir()} == {
    "checkpoints",
    "metrics.jsonl",
    "tensorboard",
  }


def test_a_killed_run_has_a_checkpoint(killed):
  _, stopped = killed
  assert stopped.returncode == -signal.SIGKILL, stopped.stderr
  assert stopped.train_steps[-1] < STEPS
  assert stopped.saved_steps
  assert stopped.saved_steps[-1] % CHECKPOINT_EVERY == 0


def test_ctrl_c_saves_and_says_how_to_continue(interrupted, killed):
  _, before = killed
  assert interrupted.returncode == 130, interrupted.stderr
  step = interrupted.train_steps[-1]
  # Continued from the checkpoint: each step has one record.
  assert interrupted.train_steps == list(range(1, step + 1))
  assert before.train_steps[-1] < step < STEPS
  assert interrupted.saved_steps[-1] == step
  said, command = interrupted.stdout.splitlines()
  assert said.startswith(f"saved step {step}; ")
  assert command.strip().startswith("python -m experiments.train ")
  assert shlex.split(command).count("--resume") == 1


def test_the_interruptions_leave_no_trace(continued, whole, overrides):
  unbroken_workdir, unbroken = whole
  workdir, process = continued
  assert process.returncode == 0, process.stderr
  assert process.stdout == unbroken.stdout
  # Bit for bit: JSON keeps every digit of a float.
  for kind in ("train", "held_out"):
    assert exact_records(workdir, kind) == exact_records(unbroken_workdir, kind)
  jax.tree.map(
    np.testing.assert_array_equal,
    final_parameters(workdir, overrides),
    final_parameters(unbroken_workdir, overrides),
  )


@pytest.mark.slow
def test_twenty_kills_leave_no_trace(overrides, environment, tmp_path):
  long = overrides | {"steps": 160, "checkpoint.every_steps": 2}
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  process = programs.run(arguments(whole, long), environment=environment)
  assert process.returncode == 0, process.stderr
  rng = random.Random()
  for kill in range(20):
    kept = training.saved_steps(broken / "checkpoints")
    records = training.read_metrics(broken, kind="train")
    stopped = stop(
      [*arguments(broken, long), *(["--resume"] if kept else [])],
      broken,
      signal.SIGKILL,
      # Those after the checkpoint are removed when the run begins.
      after_step=(records[-1]["step"] if records else 0) + rng.randint(1, 5),
      while_saving=kill % 2 == 1,
      delay_s=rng.random() * 0.05,
      environment=environment,
    )
    assert stopped.returncode == -signal.SIGKILL, stopped.stderr
    # A record of each step up to the kill.
    assert stopped.train_steps == list(range(1, len(stopped.train_steps) + 1))
  assert len(stopped.train_steps) < 160
  process = programs.run(
    [*arguments(broken, long), "--resume"], environment=environment
  )
  assert process.returncode == 0, process.stderr
  for kind in ("train", "held_out"):
    assert exact_records(broken, kind) == exact_records(whole, kind)
  names = [path.name for path in (broken / "checkpoints").iterdir()]
  assert all(name.isdecimal() for name in names), names
