r"""Finds the fastest config of a kernel on this GPU, by shape.

    python -m experiments.autotune --kernel=gate_pack \
        --shapes=16384x2048x5632,64x2048x5632

For each shape it tries the default and all configs that could be faster. Those
that do not compile or that spill registers are left out and reported. Every
other one must give the right result, to the last bit, before any is timed. Then
all take turns in one process, on random data, and the fastest becomes the
shape's entry in this device's table (pallas_kernels/tuning.py). The last line
is JSON.

It needs a Hopper GPU, jax with its CUDA plugin, flax and numpy. Where jaxtyping
is not installed, PYTHONPATH=.:experiments/on_gpu/stand_ins does instead.

On CPU --interpret tries a few configs at a tiny shape, so that the script is
known to work. What it times is the interpreter; it writes no table.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from experiments import environment, timing
from experiments.kernel_shapes import (
  ACTIVE_SHARE,
  Shape,
  parse_shapes,
)
from experiments.tuning_problems import Problem, make_problem
from pallas_kernels import aot, target, tuning

# Of a dry run.
_TINY = (Shape(4, 256, 128),)
_DRY_CONFIGS = 3


class Skipped(NamedTuple):
  """A config that was not timed, and why."""

  config: tuning.Config
  why: str


class Result(NamedTuple):
  """What tuning a kernel at a shape gave.

  Attributes:
    times: Of each config that was timed, per call.
    skipped: Those that were not.
  """

  problem: Problem
  times: dict[tuning.Config, timing.Timing]
  skipped: list[Skipped]

  @property
  def best(self) -> tuning.Config:
    """The config with the least median."""
    return min(self.times, key=lambda config: self.times[config].median_ms)


def tune(
  problem: Problem, *, max_configs: int | None, min_seconds: float
) -> Result:
  """Compiles, checks and times configs.

  Args:
    problem: The kernel at a shape.
    max_configs: How many to try, the default among them; None for all.
    min_seconds: How long to time all of them together.

  Raises:
    AssertionError: A result is not the right one.
    ValueError: The default cannot be timed.
  """
  others = (c for c in problem.configs() if c != problem.default)
  candidates = itertools.islice(
    itertools.chain([problem.default], others), max_configs
  )
  skipped: list[Skipped] = []
  contenders: dict[str, timing.Contender] = {}
  configs: dict[str, tuning.Config] = {}
  for config in candidates:
    name = _text(config)
    if why := _refusal(problem, config):
      skipped.append(Skipped(config, why))
      print(f"  skipped {name}: {why}", flush=True)
      continue
    try:
      problem.check(config)
    except AssertionError as error:
      raise AssertionError(f"{problem.kernel}, {name}: {error}") from error
    print(f"  right   {name}", flush=True)
    contenders[name], configs[name] = problem.contender(config), config
  if problem.default not in configs.values():
    raise ValueError(
      f"the default config of {problem.kernel} at {problem.sizes} was skipped:"
      " there is nothing to compare with"
    )
  measured = timing.interleaved(
    contenders, min_seconds=min_seconds, min_repeats=3, warm_up=1
  )
  times = {
    configs[name]: timing.Timing(*(ms / problem.calls for ms in time))
    for name, time in measured.items()
  }
  return Result(problem, times, skipped)


def _refusal(problem: Problem, config: tuning.Config) -> str | None:
  """Why a config cannot be timed; None if it can."""
  if target.interpret_params() is not None:
    return None
  try:
    kernels = problem.compiled(config)
  # What Mosaic, LLVM and ptxas raise; other errors are ours.
  except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
    return f"does not compile: {' '.join(str(error).split())[:200]}"
  spilled = sum(kernel.spill_bytes for kernel in kernels)
  return f"spills {spilled} bytes" if spilled else None


def _text(config: tuning.Config) -> str:
  fields = dataclasses.asdict(config).items()
  return ", ".join(f"{name}={value}" for name, value in fields)


def _print_table(result: Result) -> None:
  """The ten fastest, and the default."""
  times, default = result.times, result.problem.default
  ranked = sorted(times, key=lambda config: times[config].median_ms)
  shown = ranked[:10] + ([default] if default in ranked[10:] else [])
  print(f"{'median ms':>10} {'quartiles':>20} {'ratio':>8}")
  for config in shown:
    time = times[config]
    quartiles = f"{time.lower_ms:.4f} – {time.upper_ms:.4f}"
    ratio = times[default].median_ms / time.median_ms
    mark = "  (default)" if config == default else ""
    print(
      f"{time.median_ms:10.4f} {quartiles:>20} {ratio:8.3f}  {_text(config)}"
      f"{mark}"
    )


def _entry(
  result: Result, where: dict[str, Any], active_share: float
) -> tuning.Entry:
  problem, times = result.problem, result.times
  return tuning.Entry(
    problem.kernel,
    problem.sizes,
    result.best,
    tuning.Measured(
      date=where["date"],
      jax=where["versions"]["jax"],
      revision=where["revision"],
      active_share=active_share,
      median_ms=round(times[result.best].median_ms, 5),
      default_median_ms=round(times[problem.default].median_ms, 5),
    ),
  )


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Tunes at each shape, writes the table, returns the summary."""
  is_dry = target.interpret_params() is not None
  device = target.device_of(jnp.zeros(()))
  path = pathlib.Path(options.output or tuning.table_path(device.kind))
  if not is_dry:
    # What cannot be merged into is refused now, not after it was tuned.
    tuning.load(path, device.kind)
  where = environment.describe()
  shapes = options.shapes or _TINY
  results = []
  for shape in shapes:
    print(f"{options.kernel} at {shape}", flush=True)
    result = tune(
      make_problem(
        options.kernel,
        shape,
        device=device,
        active_share=options.active_share,
        seed=options.seed,
      ),
      max_configs=_DRY_CONFIGS if is_dry else None,
      min_seconds=0.0 if is_dry else options.min_seconds,
    )
    if is_dry:
      print("  times of the interpreter, which say nothing of a GPU:")
    _print_table(result)
    entry = _entry(result, where, options.active_share)
    if not is_dry:
      # After each shape, so that a run that is cut short keeps what it has.
      tuning.merge(path, device.kind, [entry])
    results.append(
      {
        "kernel": entry.kernel,
        "shape": dict(entry.shape),
        "config": dataclasses.asdict(entry.config),
        "timed": len(result.times),
        "skipped": [
          {"config": dataclasses.asdict(config), "why": why}
          for config, why in result.skipped
        ],
        **({} if is_dry else entry.measured._asdict()),
      }
    )
  print("dry run, nothing was written" if is_dry else f"wrote {path}")
  return {
    "dry": is_dry,
    "table": None if is_dry else str(path),
    "results": results,
    **where,
  }


def main(arguments: Sequence[str] | None = None) -> int:
  """Reads the command line and runs."""
  parser = argparse.ArgumentParser(
    "autotune", description=__doc__.splitlines()[0], allow_abbrev=False
  )
  parser.add_argument("--kernel", required=True, choices=sorted(tuning.KERNELS))
  parser.add_argument(
    "--shapes",
    type=parse_shapes,
    help="tokens x d_model x d_ff, such as 16384x2048x5632,1x2048x5632.",
  )
  parser.add_argument("--output", help="The table; by default the device's.")
  parser.add_argument(
    "--active_share",
    type=float,
    default=ACTIVE_SHARE,
    help="Active neurons of all, on average over tokens.",
  )
  parser.add_argument(
    "--min_seconds", type=float, default=10.0, help="To time a shape."
  )
  parser.add_argument("--seed", type=int, default=0, help="Of all numbers.")
  parser.add_argument(
    "--interpret", action="store_true", help="A dry run, on any machine."
  )
  options = parser.parse_args(arguments)
  if not 0 < options.active_share < 1:
    parser.error(f"--active_share={options.active_share} must be in (0, 1)")
  if options.interpret and options.output:
    parser.error("a dry run writes no table: leave out --output")
  if not options.interpret and not options.shapes:
    parser.error("--shapes is needed, such as --shapes=16384x2048x5632")
  try:
    if options.interpret:
      with plgpu.force_gpu_interpret_mode():
        summary = run(options)
    else:
      # Spills are what the compiler says, before anything runs.
      aot.find_compiler()
      summary = run(options)
  except (ValueError, NotImplementedError, OSError) as error:
    parser.exit(2, f"error: {' '.join(str(error).split())}\n")
  print(json.dumps(summary))
  return 0


if __name__ == "__main__":
  sys.exit(main())
