"""The kernels of training together: the gradients of a layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sddmm, spmm, work_list
from pallas_kernels.gather_config import GatherConfig
from tests.helpers import kernels

TOKENS, NEURONS, K = 11, 16, 256
# Of the l1 penalty, the mean over tokens of the sum of |h|.
L1 = 0.7


def layer(x, gate, up, down):
  h = jax.nn.relu(x @ gate.T) * (x @ up.T)
  return h @ down, jnp.sum(jnp.abs(h)) / TOKENS


def work_of(starts, counts, width, length):
  sizes = {"width": width, "length": length}
  return work_list.segments(
    starts,
    counts,
    length=length,
    capacity=work_list.max_segments(counts.shape[0], **sizes),
    part_capacity=work_list.max_parts(counts.shape[0], **sizes),
  )


def gradients(x, gate, up, down, d_y, *, length):
  """Those of x, gate, up and down, by the products at active neurons."""
  options = {
    "config": GatherConfig(rows_per_step=4, segment_length=length),
    "interpret": kernels.interpret_params(),
  }
  float32 = {"dtype": jnp.float32}
  dense = jax.nn.relu(x.astype(jnp.float32) @ gate.T.astype(jnp.float32))
  active = np.asarray(dense) > 0
  token, neuron = np.nonzero(active)
  counts = jnp.asarray(active.sum(axis=1), jnp.int32)
  by_token = {
    "columns": jnp.asarray(neuron, jnp.int32),
    "work": work_of(jnp.cumsum(counts) - counts, counts, NEURONS, length),
  } | options
  # Where the entries of a neuron are in the lists of tokens, and back.
  order = np.argsort(neuron, kind="stable")
  back = np.argsort(order)
  counts = jnp.asarray(active.sum(axis=0), jnp.int32)
  by_neuron = {
    "columns": jnp.asarray(token[order], jnp.int32),
    "work": work_of(jnp.cumsum(counts) - counts, counts, TOKENS, length),
  } | options

  p = dense[token, neuron]
  r = sddmm.sddmm(x, up, **by_token)
  of_down = sddmm.sddmm_spmm(
    down, d_y, values=(r * p)[order], **by_neuron, **float32
  )
  d_t = of_down.dots[back] + L1 / TOKENS * jnp.sign(r)
  d_r, d_u = d_t * p, d_t * r
  d_x = spmm.spmm_two_matrices(
    up, gate, m=TOKENS, a_values=d_r, b_values=d_u, **by_token, **float32
  )
  of_x = spmm.spmm_two_values(
    x,
    m=NEURONS,
    y_values=d_r[order],
    z_values=d_u[order],
    **by_neuron,
    **float32,
  )
  return d_x, of_x.z, of_x.y, of_down.y


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 5], ids=["whole", "split"])
def test_gradients_are_those_of_the_dense_layer(length):
  rng = np.random.default_rng(3)

  def bf16(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  x, d_y = bf16(TOKENS, K), bf16(TOKENS, K)
  gate, up, down = (bf16(NEURONS, K) for _ in range(3))
  # A token without active neurons, a neuron without tokens, one with all but
  # that token.
  x = x.at[4].set(0).at[:, 0].set(1).at[4, 0].set(0)
  gate = gate.at[2].set(0).at[5].set(0).at[5, 0].set(1)
  with kernels.no_races():
    found = jax.block_until_ready(
      gradients(x, gate, up, down, d_y, length=length)
    )

  floats = [array.astype(jnp.float32) for array in (x, gate, up, down)]
  _, pull_back = jax.vjp(layer, *floats)
  expected = pull_back((d_y.astype(jnp.float32), jnp.float32(L1)))
  for one, other in zip(found, expected):
    error = np.linalg.norm(one - other)
    assert error <= 1e-5 * np.linalg.norm(other)
