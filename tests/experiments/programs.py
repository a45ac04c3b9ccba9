"""Running our programs on a corpus and a model that take no time."""

import contextlib
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from ml_collections import ConfigDict

from configs import quickstart

ROOT = pathlib.Path(__file__).parents[2]
CONFIG_FILE = "configs/quickstart.py"
TIMEOUT_S = 300  # for any program; all take a small part of it

# Of configs/quickstart.py, by the dotted name of the field.
TINY: Mapping[str, Any] = {
  "steps": 8,
  "model.vocab_size": 300,
  "model.d_model": 32,
  "model.d_ff": 64,
  "model.num_layers": 2,
  "model.num_heads": 4,
  "model.num_kv_heads": 2,
  "data.seq_len": 32,
  "data.batch_size": 4,
  "data.held_out_fraction": 0.3,
  "optimizer.warmup_steps": 2,
  "l1.warmup_steps": 2,
  "log_every_steps": 1,
  "eval.every_steps": 4,
  "checkpoint.every_steps": 3,
}


def write_corpus(folder: pathlib.Path) -> None:
  """Writes a few short documents, the same ones each time."""
  folder.mkdir()
  rng = random.Random(0)
  words = [
    "".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(60)
  ]
  for i in range(24):
    lines = [" ".join(rng.choices(words, k=8)) for _ in range(12)]
    name = f"{i}.txt" if i % 2 else f"module_{i}.py"
    (folder / name).write_text("\n".join(lines) + "\n")


def tiny_config(overrides: Mapping[str, Any]) -> ConfigDict:
  """The quickstart's config with TINY and further overrides."""
  config = quickstart.get_config()
  config.update_from_flattened_dict(dict(TINY) | dict(overrides))
  return config


def as_flags(overrides: Mapping[str, Any]) -> list[str]:
  """The flags that make these overrides on the command line."""
  return [f"--config.{name}={value}" for name, value in overrides.items()]


def tiny_flags(overrides: Mapping[str, Any]) -> list[str]:
  """The flags that make `tiny_config(overrides)`."""
  fields = dict(TINY) | dict(overrides)
  return [f"--config={CONFIG_FILE}", *as_flags(fields)]


class Program(NamedTuple):
  """A process, and the files that it writes to.

  Files, because a pipe that nobody reads would stop a process that says much.
  """

  process: subprocess.Popen[str]
  stdout: IO[str]
  stderr: IO[str]

  def result(self) -> subprocess.CompletedProcess[str]:
    """Waits for the end."""
    returncode = self.process.wait(timeout=TIMEOUT_S)
    self.stdout.seek(0)
    self.stderr.seek(0)
    return subprocess.CompletedProcess(
      self.process.args, returncode, self.stdout.read(), self.stderr.read()
    )


@contextlib.contextmanager
def start(
  arguments: list[str], *, environment: Mapping[str, str]
) -> Iterator[Program]:
  """This interpreter, started in the repository's root; ends with the block."""
  with (
    tempfile.TemporaryFile("w+", encoding="utf-8") as stdout,
    tempfile.TemporaryFile("w+", encoding="utf-8") as stderr,
  ):
    process = subprocess.Popen(
      [sys.executable, *arguments],
      cwd=ROOT,
      env=dict(environment),
      stdin=subprocess.DEVNULL,
      stdout=stdout,
      stderr=stderr,
      text=True,
    )
    try:
      yield Program(process, stdout, stderr)
    finally:
      process.kill()  # does nothing to one that has ended
      process.wait()


def run(
  arguments: list[str], *, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
  """Runs this interpreter in the repository's root to its end."""
  with start(arguments, environment=environment) as program:
    return program.result()


def make_environment(compiled: pathlib.Path) -> dict[str, str]:
  """One device, as a user has, and programs that are compiled quickly, once.

  Args:
    compiled: Where programs of earlier processes are kept.

  Returns:
    Our own environment with these changes.
  """
  return os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(compiled),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    # In the place of what tests/conftest.py asks for. Compiling takes most of
    # the time of a tiny run, and nothing here depends on fast code.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
  }
