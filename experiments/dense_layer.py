"""The dense layer that sparse ones are measured against, at its best.

Kernels are [in, out], as a dense layer keeps them. `dense_ffn_by_neuron` takes
the other layout, in which products with a single row run faster on some CPUs:
benchmarks time both and take the faster one for the baseline.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class DenseKernels(NamedTuple):
  """Kernels of a dense layer, [in, out]; up is None if it is not gated."""

  gate: Float[Array, "d_model d_ff"]
  up: Float[Array, "d_model d_ff"] | None
  down: Float[Array, "d_ff d_model"]


def dense_ffn(
  x: Float[Array, "tokens d_model"], kernels: DenseKernels
) -> Float[Array, "tokens d_model"]:
  """Y = (relu(x gate) ⊙ x up) down by three ordinary products."""
  return _ffn(x, kernels, lambda rows, kernel: rows @ kernel)


def dense_ffn_by_neuron(
  x: Float[Array, "tokens d_model"], kernels: DenseKernels
) -> Float[Array, "tokens d_model"]:
  """`dense_ffn` with every kernel transposed, [out, in]."""

  def product(rows, kernel):
    return lax.dot_general(rows, kernel, (((1,), (1,)), ((), ())))

  return _ffn(x, kernels, product)


def _ffn(x, kernels, product):
  tokens = x.shape[0]
  if tokens == 1 and x.dtype.itemsize == 2:
    # XLA:CPU takes seven times as long for one such row as for two.
    x = jnp.pad(x, ((0, 1), (0, 0)))
  h = jax.nn.relu(product(x, kernels.gate))
  if kernels.up is not None:
    h = h * product(x, kernels.up)
  return product(h, kernels.down)[:tokens]
