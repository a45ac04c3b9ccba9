"""Numbers for the problems of tuning_problems.py, and the right results."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int32

from experiments import gradient_kernels
from pallas_kernels.gradient_config import Product
from twell_jax.formats import EllMatrix, TwellMatrix
from twell_jax.formats.transpose import transpose_ell
from twell_jax.ops.mosaic_sizes import default_ell_width

# Makes numbers of either sign from a key and a shape.
Numbers = Callable[[Array, tuple[int, ...]], Array]


class GatheredInputs(NamedTuple):
  """Operands: (x, up, down) or (down,), and the entries of tokens."""

  matrices: tuple[Array, ...]
  ell: EllMatrix


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 5, 6))
def gathered_inputs(key, m, n, k, rates, matrices, numbers):
  """Random operands, neurons firing at these rates.

  Args:
    key: Of the numbers.
    m: Tokens.
    n: Neurons.
    k: Width of a row.
    rates: Of each neuron.
    matrices: 1 for the operands of gathered_down, 2 for gathered_up_down.
    numbers: Of either sign.
  """
  keys = jax.random.split(key, 5)
  shapes = ((m, k), (n, k), (n, k))
  operands = tuple(numbers(key, shape) for key, shape in zip(keys[:3], shapes))
  ell = _entries(keys[3], keys[4], m, rates, numbers)
  return GatheredInputs(operands[-1:] if matrices == 1 else operands, ell)


def _entries(fires_key, values_key, m, rates, numbers):
  """Those of m tokens, neurons firing at these rates."""
  shape = (m, rates.shape[0])
  fires = jax.random.uniform(fires_key, shape) < rates[None]
  values = 1 + jnp.abs(numbers(values_key, shape))
  twell = TwellMatrix.pack(
    jnp.where(fires, values, jnp.zeros_like(values)), slots=64
  )
  return EllMatrix.from_twell(twell, width=default_ell_width(shape[1]))


class GradientInputs(NamedTuple):
  """Operands of a kernel of training, and where they come from.

  Attributes:
    matrices: As in gradient_kernels.Operands.
    columns: Of each slot of the lists, those of tokens or of neurons.
    values: Likewise.
    starts: First slot of each list.
    counts: Slots of each list.
    ell: The entries by token, with the first values.
    second: The second values, by token.
  """

  matrices: tuple[Array, ...]
  columns: Int32[Array, "slots"]
  values: tuple[Float32[Array, "slots"], ...]
  starts: Int32[Array, "lists"]
  counts: Int32[Array, "lists"]
  ell: EllMatrix
  second: Float32[Array, "tokens width"]


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 5, 6))
def gradient_inputs(key, m, n, k, rates, product, numbers):
  """Random operands of a kernel of training; arguments as above."""
  *keys, fires_key, values_key, second_key = jax.random.split(key, 5)
  kind = gradient_kernels.KINDS[product]
  ell = _entries(fires_key, values_key, m, rates, numbers)
  lists = gradient_kernels.lists_of(
    product, tokens=m, neurons=n, width=ell.width
  )
  matrices = tuple(
    numbers(key, (rows, k))
    for key, rows in zip(keys, lists.matrix_rows(product))
  )
  second = numbers(second_key, ell.values.shape).astype(jnp.float32)
  both = (ell.values.astype(jnp.float32), second)[: kind.values]
  if product.is_by_neuron:
    by_neuron = transpose_ell(ell)
    columns, starts, counts = (
      by_neuron.tokens,
      by_neuron.starts,
      by_neuron.counts,
    )
    values = tuple(by_neuron.from_ell(value) for value in both)
  else:
    columns, counts = ell.columns.reshape(-1), ell.stored
    starts = jnp.arange(m, dtype=jnp.int32) * ell.width
    values = tuple(value.reshape(-1) for value in both)
  return GradientInputs(matrices, columns, values, starts, counts, ell, second)


def normal(key: Array, shape: tuple[int, ...]) -> BFloat16[Array, "..."]:
  """Standard normal numbers."""
  return jax.random.normal(key, shape, jnp.bfloat16)


def minus_one_to_one(
  key: Array, shape: tuple[int, ...]
) -> BFloat16[Array, "..."]:
  """-1, 0 and 1, alike often."""
  return jax.random.randint(key, shape, -1, 2).astype(jnp.bfloat16)


@jax.jit
def expected_gathered(operands: GatheredInputs) -> Array:
  """The result of the gathered kernels, by dense products."""
  *x_and_up, down = operands.matrices
  ell = operands.ell
  h = jnp.where(
    ell.overflow[:, None], jnp.float32(0), ell.to_dense().astype(jnp.float32)
  )
  if x_and_up:
    x, up = x_and_up
    h *= _product(x, up.T)
  return _product(h, down.astype(jnp.float32)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=0)
def expected_gradient(
  product: Product, operands: GradientInputs
) -> gradient_kernels.Results:
  """The results of a kernel of training, by dense products."""
  kind = gradient_kernels.KINDS[product]
  ell, matrices = operands.ell, operands.matrices
  is_stored = ~ell.overflow[:, None]

  def dense(values):
    matrix = dataclasses.replace(ell, values=values).to_dense()
    matrix = jnp.where(is_stored, matrix, jnp.float32(0))
    return matrix.T if product.is_by_neuron else matrix

  weights = (ell.values.astype(jnp.float32), operands.second)[: kind.values]
  gathered = itertools.cycle(matrices[kind.own_rows :])
  sums = [
    _product(dense(values), matrix.astype(jnp.float32))
    for values, matrix in zip(weights, gathered)
  ]
  if kind.gathered == 2:
    sums = [sums[0] + sums[1]]
  dots = None
  if kind.own_rows:
    everywhere = _product(matrices[0], matrices[1].T)
    if product.is_by_neuron:
      everywhere = everywhere.T
    slot = jnp.arange(ell.width, dtype=jnp.int32)[None]
    dots = jnp.where(
      slot < ell.stored[:, None],
      jnp.take_along_axis(everywhere, ell.columns, axis=1),
      jnp.float32(0),
    )
    if product.is_by_neuron:
      dots = transpose_ell(ell).from_ell(dots)
    dots = dots.reshape(-1)
  return gradient_kernels.Results(
    dots, tuple(total.astype(jnp.bfloat16) for total in sums)
  )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def exact_gate_inputs(key, m, n, k, rates):
  """x and gate of small integers, whose neurons fire at about these rates."""
  x_key, gate_key = jax.random.split(key)
  x = minus_one_to_one(x_key, (m, k))
  gate = minus_one_to_one(gate_key, (n, k))
  # A product of two such numbers has a variance of 4 / 9.
  deviation = (4 / 9 * k) ** 0.5
  quantiles = jax.scipy.special.ndtri(jnp.clip(rates, 1e-6, 1 - 1e-6))
  thresholds = jnp.round(-deviation * quantiles)
  # bfloat16 rounds them to integers again.
  return x.at[:, 0].set(1), gate.at[:, 0].set(-thresholds.astype(jnp.bfloat16))


@functools.partial(jax.jit, static_argnums=(2, 3))
def expected_twell(x, gate, tile_width, slots):
  """relu(x gateᵀ), packed after it was made."""
  z = _product(x, gate.T).astype(jnp.bfloat16)
  return TwellMatrix.pack(z, tile_width=tile_width, slots=slots)


def _product(a: Array, b: Array) -> Float32[Array, "m n"]:
  return jnp.matmul(
    a, b, precision="highest", preferred_element_type=jnp.float32
  )


def assert_same(result: Any, expected: Any) -> None:
  """Raises AssertionError unless two pytrees have the same finite numbers."""
  different = jax.tree.map(lambda a, b: jnp.sum(a != b), result, expected)
  wrong = sum(int(number) for number in jax.tree.leaves(different))
  if wrong:
    raise AssertionError(f"{wrong} numbers differ from the reference")
