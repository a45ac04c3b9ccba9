"""Times of contenders that take turns, and what they achieve.

Calls are started without waiting for each other, as many as hide what starting
one costs the host: a time is that of the whole batch over their number.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from experiments import timing
from experiments.on_gpu import plan

# From so many tokens on, fewer calls are started together.
_FEWER_CALLS_TOKENS = 16384

# Instructions that become launches; one inside a loop counts once.
_KERNEL = re.compile(r" (?:fusion|custom-call|sort|copy|dot|while)\(")


class Timed(NamedTuple):
  """A contender: a jitted function, its calls, and what a call does.

  Attributes:
    function: Jitted.
    calls: Arguments of calls that are started together.
    flops: Floating-point operations of a call, useful ones.
    gathered_bytes: Of the rows that a call gathers.
    layers: Layers of a call.
  """

  function: Any  # what jax.jit returns has no public type
  calls: Sequence[tuple[Any, ...]]
  flops: float | None = None
  gathered_bytes: float | None = None
  layers: int = 1


def calls_for(sizes: plan.Sizes, tokens: int) -> int:
  """How many calls are started together."""
  longer = max(1, tokens // _FEWER_CALLS_TOKENS)
  return max(1, sizes.calls // longer)


# By function and types of arguments; many stages share the dense ones.
_executables: dict[Any, jax.stages.Compiled] = {}


def compiled(timed: Timed) -> jax.stages.Compiled:
  """The executable of a contender, compiled the first time."""
  arguments = timed.calls[0]
  types = jax.tree.map(jax.typeof, arguments)
  key = (timed.function, jax.tree.structure(types), *jax.tree.leaves(types))
  if key not in _executables:
    _executables[key] = timed.function.lower(*arguments).compile()
  return _executables[key]


def measure(
  contenders: Mapping[str, Timed], sizes: plan.Sizes, *, is_dry: bool
) -> dict[str, dict[str, Any]]:
  """Times contenders in turn; the figures of each, by name.

  `ratio_to_dense` is the time of the fastest contender with "dense" in its name
  over its own. A dry run gives none.

  Args:
    contenders: What to time, by name; a dense one among them.
    sizes: How long, and how often at least.
    is_dry: Whether the times mean nothing.
  """
  times = timing.interleaved(
    {
      name: timing.Contender(_start_all(timed), [()], None)
      for name, timed in contenders.items()
    },
    min_seconds=sizes.min_seconds,
    min_repeats=sizes.min_repeats,
    warm_up=0 if is_dry else 2,
  )
  per_call = {
    name: [value / len(timed.calls) for value in times[name]]
    for name, timed in contenders.items()
  }
  dense_ms = min(ms[0] for name, ms in per_call.items() if "dense" in name)

  def tera_per_second(amount: float | None, ms: float) -> float | None:
    return None if amount is None else 1e-12 * amount / (1e-3 * ms)

  return {
    name: {
      "median_ms": ms[0],
      "quartiles_ms": ms[1:],
      "layers": contenders[name].layers,
      "ms_per_layer": ms[0] / contenders[name].layers,
      "tflop_per_s": tera_per_second(contenders[name].flops, ms[0]),
      "gathered_tb_per_s": tera_per_second(
        contenders[name].gathered_bytes, ms[0]
      ),
      "ratio_to_dense": None if is_dry else dense_ms / ms[0],
      "kernels": _count_kernels(compiled(contenders[name])),
      "temporary_bytes": _temporary_bytes(compiled(contenders[name])),
    }
    for name, ms in per_call.items()
  }


def _start_all(timed: Timed) -> Callable[[], Any]:
  executable = compiled(timed)
  return lambda: [executable(*arguments) for arguments in timed.calls]


def _count_kernels(executable: jax.stages.Compiled) -> int | None:
  text = executable.as_text()
  return None if text is None else len(_KERNEL.findall(text))


def _temporary_bytes(executable: jax.stages.Compiled) -> int | None:
  """What XLA's buffer assignment needs beside arguments and results."""
  memory = executable.memory_analysis()
  return None if memory is None else memory.temp_size_in_bytes
