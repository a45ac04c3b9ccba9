"""What experiments/autotune.py tunes: kernels at a shape, checked and timed.

A problem is a kernel at a shape: the configs that could be the fastest, a check
of each against XLA in float32, and calls to time. The check's numbers are small
integers, whose products and sums float32 holds exactly in any order, so that
there is one right result. The calls that are timed are on normal numbers.
"""

import abc
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments import timing, tuning_inputs
from experiments.kernel_shapes import Shape
from experiments.on_gpu import inputs
from pallas_kernels import (
  aot,
  gate_pack,
  gate_pack_config,
  gather_config,
  gathered,
  rows,
  target,
  tuning,
  work_list,
)
from twell_jax.ops import mosaic
from twell_jax.ops.gate import pack_by_kernel, pad_to_multiples

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


def make_problem(
  kernel: str,
  shape: Shape,
  *,
  device: target.Device,
  active_share: float,
  seed: int,
) -> Problem:
  """The problem of a kernel by name, with new random numbers.

  Args:
    kernel: A name in tuning.KERNELS.
    shape: Of the layer.
    device: What it is tuned for.
    active_share: Of the neurons, on average over tokens.
    seed: Of the numbers.
  """
  if kernel == "gate_pack":
    return _GatePack(shape, device, active_share, seed)
  matrices = 1 if kernel == "gathered_down" else 2
  return _Gathered(shape, device, active_share, seed, matrices)


class _GatePack(Problem):
  """gate_pack, its TwELL tile and slots being those of the default."""

  kernel = "gate_pack"

  def __init__(
    self, shape: Shape, device: target.Device, active_share: float, seed: int
  ) -> None:
    m, k, n = shape
    self.sizes = {"m": m, "n": n, "k": k}
    self.default = self._default = gate_pack_config.default_config(
      m, n, k, sm_count=device.sm_count
    )
    self.calls = _calls(m, weights=n * k)
    self._device = device
    key = jax.random.key(seed)
    rates = _rates(seed, n, active_share)
    self._timed = [
      (
        inputs.timed_tokens(key, tokens=m, d_model=k),
        inputs.timed_layer(key, np.asarray(rates), d_model=k).gate,
      )
      for key in jax.random.split(key, self.calls)
    ]
    self._exact = tuning_inputs.exact_gate_inputs(key, m, n, k, rates)
    self._expected = tuning_inputs.expected_twell(
      *self._exact, self._default.tile_width, self._default.slots
    )
    self._padded = functools.cache(self._pad)

  def configs(self) -> Iterator[tuning.Config]:
    """See Problem; in each way the two deepest pipelines that fit."""
    width = self._default.tile_width
    for tile_n, tile_k, cluster, skew, snake_width in itertools.product(
      range(width, 257, width), (64, 128), (1, 2), (0, 2), (8, 16)
    ):
      # The kernel has the multiprocessor's shared memory to itself.
      legal = []
      for stages in range(2, 13):
        with contextlib.suppress(ValueError):
          legal.append(
            dataclasses.replace(
              self._default,
              tile_n=tile_n,
              tile_k=tile_k,
              stages=stages,
              cluster=cluster,
              skew=min(skew, stages - 1),
              snake_width=snake_width,
            )
          )
      yield from legal[-2:]

  def compiled(self, config: Any) -> Sequence[aot.KernelStats]:
    """See Problem."""
    return _compiled(self._function(config), self._arguments(config)[0])

  def check(self, config: Any) -> None:
    """See Problem."""
    packed = jax.jit(
      functools.partial(pack_by_kernel, config=config, device=self._device)
    )(*self._exact)
    tuning_inputs.assert_same(packed, self._expected)

  def contender(self, config: Any) -> timing.Contender:
    """See Problem."""
    return _contender(self._function(config), self._arguments(config))

  def _function(self, config: Any) -> Callable[..., Any]:
    return functools.partial(
      gate_pack.gate_pack,
      config=config,
      sm_count=self._device.sm_count,
      interpret=target.interpret_params(),
    )

  def _arguments(self, config: Any) -> list[tuple[Any, ...]]:
    rows = config.padded_rows(self.sizes["m"])
    return self._padded(rows, config.tile_n, config.tile_k)

  def _pad(self, rows: int, tile_n: int, tile_k: int) -> list[tuple[Any, ...]]:
    return [
      (
        pad_to_multiples(x, (rows, tile_k)),
        pad_to_multiples(gate, (tile_n, tile_k)),
      )
      for x, gate in self._timed
    ]


class _Gathered(Problem):
  """gathered_down, of one matrix, or gathered_up_down, of two."""

  def __init__(
    self,
    shape: Shape,
    device: target.Device,
    active_share: float,
    seed: int,
    matrices: int,
  ) -> None:
    m, k, n = shape
    k += -k % rows.WIDTH_MULTIPLE
    width = mosaic.ell_width(n)
    self.kernel = "gathered_down" if matrices == 1 else "gathered_up_down"
    self.sizes = {"m": m, "n": n, "k": k, "width": width}
    self.default = gather_config.default_config(
      m, k, width, matrices=matrices, sm_count=device.sm_count
    )
    self.calls = _calls(m, weights=matrices * n * k)
    key = jax.random.key(seed)
    rates = _rates(seed, n, active_share)

    def make(key, numbers):
      return tuning_inputs.gathered_inputs(
        key, m, n, k, rates, matrices, numbers
      )

    self._timed = [
      make(key, tuning_inputs.normal)
      for key in jax.random.split(key, self.calls)
    ]
    self._exact = make(key, tuning_inputs.minus_one_to_one)
    self._expected = tuning_inputs.expected_gathered(self._exact)

  def configs(self) -> Iterator[tuning.Config]:
    """See Problem."""
    width = self.sizes["width"]
    for rows_per_step in (1, 2, 4, 8):
      lengths = {min(width, rows_per_step * 2**i) for i in range(8)} | {width}
      for length in sorted(lengths, reverse=True):
        yield gather_config.GatherConfig(
          rows_per_step=rows_per_step, segment_length=length
        )

  def compiled(self, config: Any) -> Sequence[aot.KernelStats]:
    """See Problem."""
    arguments = jax.eval_shape(
      functools.partial(self._with_work, config), self._timed[0]
    )
    return _compiled(self._function(config), arguments)

  def check(self, config: Any) -> None:
    """See Problem."""
    result = jax.jit(self._function(config))(
      *self._with_work(config, self._exact)
    )
    tuning_inputs.assert_same(result, self._expected)

  def contender(self, config: Any) -> timing.Contender:
    """See Problem."""
    return _contender(
      self._function(config),
      [self._with_work(config, each) for each in self._timed],
    )

  def _function(self, config: Any) -> Callable[..., Any]:
    common = {"config": config, "interpret": target.interpret_params()}

    def down_only(down, columns, values, work):
      return gathered.gathered_down(
        down,
        m=self.sizes["m"],
        columns=columns,
        values=values,
        work=work,
        **common,
      )

    def up_down(x, up, down, columns, values, work):
      return gathered.gathered_up_down(
        x, up, down, columns=columns, values=values, work=work, **common
      ).y

    return down_only if self.kernel == "gathered_down" else up_down

  def _with_work(
    self, config: Any, operands: tuning_inputs.GatheredInputs
  ) -> tuple[Any, ...]:
    """The arguments of the function, with the config's work list."""
    work = _work_of(
      operands.ell.stored,
      width=self.sizes["width"],
      length=config.segment_length,
    )
    return (
      *operands.matrices,
      operands.ell.columns.reshape(-1),
      operands.ell.values.reshape(-1).astype(jnp.float32),
      work,
    )


_work_of = jax.jit(work_list.of_ell, static_argnames=("width", "length"))


def _calls(m: int, *, weights: int) -> int:
  """Calls that are timed together, given a call's numbers of bfloat16."""
  if target.interpret_params() is not None:
    return 1
  if m > _FEW_TOKENS:
    return 2
  return min(_MOST_CALLS, max(2, -(-_WEIGHT_BYTES // (2 * weights))))


def _rates(seed: int, n: int, active_share: float) -> Array:
  rates = inputs.firing_rates(
    np.random.default_rng(seed),
    _RATE_DISTRIBUTION,
    d_ff=n,
    active=active_share * n,
  )
  return jnp.asarray(rates, jnp.float32)


def _compiled(
  function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Sequence[aot.KernelStats]:
  shapes = jax.tree.map(
    lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arguments
  )
  return aot.compile_for_h200(function, *shapes).kernels


def _contender(
  function: Callable[..., Any], calls: list[tuple[Any, ...]]
) -> timing.Contender:
  def all_calls(calls):
    return [function(*arguments) for arguments in calls]

  return timing.contender(all_calls, [(calls,)])
