"""What experiments/autotune.py tunes: kernels at a shape, checked and timed.

A problem is a kernel at a shape: the configs that could be the fastest, a check
of each against XLA in float32, and calls to time. The check's numbers are small
integers, whose products and sums float32 holds exactly in any order, so that
there is one right result. The calls that are timed are on normal numbers.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from experiments import timing, tuning_inputs
from experiments.kernel_shapes import Shape
from experiments.on_gpu import inputs
from experiments.tuning_base import (
  Problem,
  compile_kernels,
  contender_of,
  number_of_calls,
  rates_of,
)
from experiments.tuning_gathered import Gathered, Gradient
from pallas_kernels import aot, gate_pack, gate_pack_config, target, tuning
from pallas_kernels.gradient_config import Product
from twell_jax.ops.gate import pack_by_kernel, pad_to_multiples

_PRODUCTS = {product.value: product for product in Product}


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
  if kernel in _PRODUCTS:
    return Gradient(shape, device, active_share, seed, _PRODUCTS[kernel])
  matrices = 1 if kernel == "gathered_down" else 2
  return Gathered(shape, device, active_share, seed, matrices)


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
    self.calls = number_of_calls(m, weights=n * k)
    self._device = device
    key = jax.random.key(seed)
    rates = rates_of(seed, n, active_share)
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
    return compile_kernels(self._function(config), self._arguments(config)[0])

  def check(self, config: Any) -> None:
    """See Problem."""
    packed = jax.jit(
      functools.partial(pack_by_kernel, config=config, device=self._device)
    )(*self._exact)
    tuning_inputs.assert_same(packed, self._expected)

  def contender(self, config: Any) -> timing.Contender:
    """See Problem."""
    return contender_of(self._function(config), self._arguments(config))

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
