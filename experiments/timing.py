"""Times of jitted functions against each other, in one process."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
  """Milliseconds of one call: the median, and the quartiles as the spread."""

  median_ms: float
  lower_ms: float
  upper_ms: float


class Contender(NamedTuple):
  """A function, compiled, and the arguments of its calls, taken in turn."""

  function: Callable[..., Any]
  arguments: Sequence[tuple[Any, ...]]
  temporary_bytes: int | None  # of XLA's buffer assignment, if it reports one


def contender(
  function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
) -> Contender:
  """Compiles the function for its first arguments."""
  compiled = jax.jit(function).lower(*arguments[0]).compile()
  memory = compiled.memory_analysis()
  temporary = None if memory is None else memory.temp_size_in_bytes
  return Contender(compiled, arguments, temporary)


def interleaved(
  contenders: Mapping[str, Contender],
  *,
  min_seconds: float,
  min_repeats: int = 7,
  warm_up: int = 2,
) -> dict[str, Timing]:
  """Times all contenders in turn, so that drift of the machine hits them alike.

  Args:
    contenders: What to time, by name.
    min_seconds: Rounds go on for at least so long.
    min_repeats: And for at least so many.
    warm_up: Rounds that are not counted.

  Returns:
    The timing of each.
  """
  times: dict[str, list[float]] = {name: [] for name in contenders}
  started = time.perf_counter()
  rounds = 0
  while (
    rounds < warm_up + min_repeats
    or time.perf_counter() - started < min_seconds
  ):
    for name, (function, arguments, _) in contenders.items():
      chosen = arguments[rounds % len(arguments)]
      begin = time.perf_counter()
      jax.block_until_ready(function(*chosen))
      if rounds >= warm_up:
        times[name].append(1e3 * (time.perf_counter() - begin))
    rounds += 1
  return {
    name: Timing(statistics.median(values), *_quartiles(values))
    for name, values in times.items()
  }


def _quartiles(values: list[float]) -> tuple[float, float]:
  lower, _, upper = statistics.quantiles(values, n=4)
  return lower, upper
