"""What a tuning problem is, and what all of them share."""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments import timing
from experiments.on_gpu import inputs
from pallas_kernels import aot, target, tuning

# Firing rates of what is timed: some neurons fire many times as often as most.
_RATE_DISTRIBUTION = "gamma 1.0"
# A few tokens are timed with this many bytes of weights in turn, so that they
# come from memory, as those of a model's layers do, and not from the cache.
_WEIGHT_BYTES = 256 * 2**20
_FEW_TOKENS = 1024
_MOST_CALLS = 32


class Problem(abc.ABC):
  """A kernel at a shape.

  Attributes:
    kernel: Its name in tuning.KERNELS.
    sizes: The shape as the table of tuned configs has it.
    default: The config without a table.
    calls: What is timed is so many calls, of which none waits for another.
  """

  kernel: str
  sizes: Mapping[str, int]
  default: tuning.Config
  calls: int

  @abc.abstractmethod
  def configs(self) -> Iterator[tuning.Config]:
    """Legal configs that could be the fastest."""

  @abc.abstractmethod
  def compiled(self, config: Any) -> Sequence[aot.KernelStats]:
    """What the compiler says of the kernel or kernels, not running them."""

  @abc.abstractmethod
  def check(self, config: Any) -> None:
    """Raises AssertionError unless the kernel's result is the right one."""

  @abc.abstractmethod
  def contender(self, config: Any) -> timing.Contender:
    """`calls` calls, to be timed."""


def number_of_calls(m: int, *, weights: int) -> int:
  """Calls that are timed together, given a call's numbers of bfloat16."""
  if target.interpret_params() is not None:
    return 1
  if m > _FEW_TOKENS:
    return 2
  return min(_MOST_CALLS, max(2, -(-_WEIGHT_BYTES // (2 * weights))))


def rates_of(seed: int, n: int, active_share: float) -> Array:
  """Of n neurons, of which that share fires in the mean."""
  rates = inputs.firing_rates(
    np.random.default_rng(seed),
    _RATE_DISTRIBUTION,
    d_ff=n,
    active=active_share * n,
  )
  return jnp.asarray(rates, jnp.float32)


def compile_kernels(
  function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Sequence[aot.KernelStats]:
  """What the compiler says of the kernels of a function."""
  shapes = jax.tree.map(
    lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arguments
  )
  return aot.compile_for_h200(function, *shapes).kernels


def contender_of(
  function: Callable[..., Any], calls: list[tuple[Any, ...]]
) -> timing.Contender:
  """All calls of a function, to be timed together."""

  def all_calls(calls):
    return [function(*arguments) for arguments in calls]

  return timing.contender(all_calls, [(calls,)])
