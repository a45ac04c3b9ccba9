"""The gathered kernels as tuning problems, those of training among them."""

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments import gradient_kernels, timing, tuning_inputs
from experiments.gradient_kernels import Lists
from experiments.kernel_shapes import Shape
from experiments.tuning_base import (
  Problem,
  compile_kernels,
  contender_of,
  number_of_calls,
  rates_of,
)
from pallas_kernels import (
  aot,
  gather_config,
  gathered,
  gradient_config,
  rows,
  target,
  tuning,
  work_list,
)
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.gradient_config import Product
from twell_jax.ops.mosaic_sizes import default_ell_width

# Of the parts of split rows; configs that need more are not tried.
_MOST_PART_BYTES = 4 * 2**30


class _ByEntries(Problem):
  """A kernel that goes through lists of entries.

  Attributes:
    lists: Those that it goes through.
    sums: Its results with a row for each list.
  """

  lists: Lists
  sums: int
  _expected: Any  # the right result for self._exact; subclasses make it

  def __init__(
    self, shape: Shape, *, weights: int, active_share: float, seed: int
  ) -> None:
    """Sets the sizes and makes the numbers, as the subclass does.

    Args:
      shape: Of the layer.
      weights: Matrices of the layer from which a call gathers.
      active_share: Of the neurons, on average over tokens.
      seed: Of the numbers.
    """
    m, k, n = shape
    k += -k % rows.WIDTH_MULTIPLE
    self.sizes = {"m": m, "n": n, "k": k, "width": default_ell_width(n)}
    self.calls = number_of_calls(m, weights=weights * n * k)
    key = jax.random.key(seed)
    rates = rates_of(seed, n, active_share)
    self._timed = [
      self._make(key, rates, tuning_inputs.normal)
      for key in jax.random.split(key, self.calls)
    ]
    self._exact = self._make(key, rates, tuning_inputs.minus_one_to_one)

  @abc.abstractmethod
  def _make(
    self, key: Array, rates: Array, numbers: tuning_inputs.Numbers
  ) -> Any:
    """Operands of such numbers."""

  @abc.abstractmethod
  def _function(self, config: GatherConfig) -> Callable[..., Any]:
    """The kernel with a config."""

  @abc.abstractmethod
  def _arguments(self, config: GatherConfig, operands: Any) -> tuple[Any, ...]:
    """The arguments of the function, with the config's work list."""

  def configs(self) -> Iterator[tuning.Config]:
    """See Problem."""
    longest = self.lists.width
    for rows_per_step in (1, 2, 4, 8):
      lengths = {min(longest, rows_per_step * 2**i) for i in range(11)}
      for length in sorted(lengths | {longest}, reverse=True):
        if self._part_bytes(length) <= _MOST_PART_BYTES:
          yield GatherConfig(rows_per_step=rows_per_step, segment_length=length)

  def _part_bytes(self, length: int) -> int:
    lists = self.lists
    parts = work_list.max_parts(
      lists.rows, width=lists.width, length=length, total=lists.slots
    )
    return self.sums * parts * self.sizes["k"] * 4

  def compiled(self, config: Any) -> Sequence[aot.KernelStats]:
    """See Problem."""
    arguments = jax.eval_shape(
      functools.partial(self._arguments, config), self._timed[0]
    )
    return compile_kernels(self._function(config), arguments)

  def check(self, config: Any) -> None:
    """See Problem."""
    result = jax.jit(self._function(config))(
      *self._arguments(config, self._exact)
    )
    tuning_inputs.assert_same(result, self._expected)

  def contender(self, config: Any) -> timing.Contender:
    """See Problem."""
    return contender_of(
      self._function(config),
      [self._arguments(config, each) for each in self._timed],
    )


class Gathered(_ByEntries):
  """gathered_down, of one matrix, or gathered_up_down, of two."""

  sums = 1

  def __init__(
    self,
    shape: Shape,
    device: target.Device,
    active_share: float,
    seed: int,
    matrices: int,
  ) -> None:
    self.kernel = "gathered_down" if matrices == 1 else "gathered_up_down"
    self._matrices = matrices
    super().__init__(
      shape, weights=matrices, active_share=active_share, seed=seed
    )
    m, n, k, width = self.sizes.values()
    self.lists = Lists(rows=m, columns=n, width=width, slots=m * width)
    self.default = gather_config.default_config(
      m, k, width, matrices=matrices, sm_count=device.sm_count
    )
    self._expected = tuning_inputs.expected_gathered(self._exact)

  def _make(
    self, key: Array, rates: Array, numbers: tuning_inputs.Numbers
  ) -> tuning_inputs.GatheredInputs:
    m, n, k, _ = self.sizes.values()
    return tuning_inputs.gathered_inputs(
      key, m, n, k, rates, self._matrices, numbers
    )

  def _function(self, config: GatherConfig) -> Callable[..., Any]:
    common: dict[str, Any] = {
      "config": config,
      "interpret": target.interpret_params(),
    }

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

    return down_only if self._matrices == 1 else up_down

  def _arguments(self, config: GatherConfig, operands: Any) -> tuple[Any, ...]:
    work = _work_of_ell(
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


class Gradient(_ByEntries):
  """A kernel of training, through the entries by token or by neuron."""

  def __init__(
    self,
    shape: Shape,
    device: target.Device,
    active_share: float,
    seed: int,
    product: Product,
  ) -> None:
    self.kernel = product.value
    self._product = product
    kind = gradient_kernels.KINDS[product]
    self.sums = kind.sums
    super().__init__(
      shape, weights=kind.gathered, active_share=active_share, seed=seed
    )
    m, n, k, width = self.sizes.values()
    self.lists = gradient_kernels.lists_of(
      product, tokens=m, neurons=n, width=width
    )
    self.default = gradient_config.layer_config(
      product,
      tokens=m,
      neurons=n,
      k=k,
      width=width,
      sm_count=device.sm_count,
    )
    self._expected = tuning_inputs.expected_gradient(product, self._exact)

  def _make(
    self, key: Array, rates: Array, numbers: tuning_inputs.Numbers
  ) -> tuning_inputs.GradientInputs:
    m, n, k, _ = self.sizes.values()
    return tuning_inputs.gradient_inputs(
      key, m, n, k, rates, self._product, numbers
    )

  def _function(self, config: GatherConfig) -> Callable[..., Any]:
    return functools.partial(
      gradient_kernels.call,
      self._product,
      rows=self.lists.rows,
      config=config,
    )

  def _arguments(self, config: GatherConfig, operands: Any) -> tuple[Any, ...]:
    work = _work_of_lists(
      operands.starts,
      operands.counts,
      lists=self.lists,
      length=config.segment_length,
    )
    return (
      gradient_kernels.Operands(
        operands.matrices, operands.columns, operands.values, work
      ),
    )


_work_of_ell = jax.jit(work_list.of_ell, static_argnames=("width", "length"))


@functools.partial(jax.jit, static_argnames=("lists", "length"))
def _work_of_lists(starts, counts, *, lists, length):
  return gradient_kernels.work_of(lists, starts, counts, length=length)
