"""Numbers for the problems of tuning_problems.py, and the right results."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32

from twell_jax.formats import EllMatrix, TwellMatrix
from twell_jax.ops import mosaic


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
    numbers: Makes numbers of either sign from a key and a shape.
  """
  keys = jax.random.split(key, 5)
  shapes = ((m, k), (n, k), (n, k))
  operands = tuple(numbers(key, shape) for key, shape in zip(keys[:3], shapes))
  fires = jax.random.uniform(keys[3], (m, n)) < rates[None]
  values = 1 + jnp.abs(numbers(keys[4], (m, n)))
  twell = TwellMatrix.pack(
    jnp.where(fires, values, jnp.zeros_like(values)), slots=64
  )
  ell = EllMatrix.from_twell(twell, width=mosaic.ell_width(n))
  return GatheredInputs(operands[-1:] if matrices == 1 else operands, ell)


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
