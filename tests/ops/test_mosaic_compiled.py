"""The mosaic implementation, lowered, and compiled for an H200."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.helpers.kernels import compile_for_h200, lower_for_cuda
from tests.ops.mosaic_cases import op_for, shapes
from twell_jax.formats import Capacities
from twell_jax.ops import mosaic
from twell_jax.ops.choices import Choices


@pytest.mark.parametrize(
  ("tokens", "d_model", "d_ff", "hot_neurons"),
  [
    (16384, 2048, 5632, 0),
    pytest.param(16384, 2048, 5632, 640, marks=pytest.mark.slow),
    (1, 2048, 5632, 0),
    (77, 576, 1000, 0),
  ],
)
def test_compiles_for_an_h200(tokens, d_model, d_ff, hot_neurons):
  compiled = compile_for_h200(
    op_for(hot_neurons), *shapes(tokens, d_model, d_ff)
  )
  assert len(compiled.kernels) >= 2
  for stats in compiled.kernels:
    assert stats.spill_bytes == 0
  # A dense activation is never in memory, of z, u and h there are blocks; hot
  # neurons have theirs, and a sum in float32.
  memory = compiled.executable.memory_analysis()
  assert memory is not None
  if tokens == 16384:
    hot = tokens * (4 * d_model + 3 * 2 * hot_neurons) if hot_neurons else 0
    dense = tokens * d_ff * 2
    assert memory.temp_size_in_bytes < dense / 2 + hot


@pytest.mark.slow
@pytest.mark.parametrize(
  ("gated", "hot_neurons"), [(True, 0), (True, 640), (False, 0)]
)
def test_gradients_compile_for_an_h200(gated, hot_neurons):
  tokens, d_model, d_ff = 16384, 2048, 5632
  op = op_for(hot_neurons, dense_above=None)

  def gradients(x, gate, up, down):
    def function(*inputs):
      output = op(*inputs)
      return (output.y, output.activity.l1), output

    out, pullback, output = jax.vjp(function, x, gate, up, down, has_aux=True)
    return output, pullback(out)

  x, gate, up, down = shapes(tokens, d_model, d_ff)
  compiled = compile_for_h200(gradients, x, gate, up if gated else None, down)
  names = {stats.name for stats in compiled.kernels}
  expected = {"gate_pack", "gathered_down", "sddmm_spmm"}
  if gated:
    expected |= {"sddmm", "spmm_two_matrices", "spmm_two_values"}
  assert names - {"add_parts"} == expected
  assert all(stats.spill_bytes == 0 for stats in compiled.kernels)
  memory = compiled.executable.memory_analysis()
  assert memory is not None
  # Less than a dense layer's z, u and h, with all that is kept in it; most of
  # it are the gradients in float32.
  hot = 4 * tokens * 2 * hot_neurons + 12 * d_ff * d_model if hot_neurons else 0
  assert memory.temp_size_in_bytes < 3 * tokens * d_ff * 2 + hot


@pytest.mark.parametrize(
  ("capacities", "share"), [(None, 0.1), (Capacities(128, 512), 0.06)]
)
def test_what_is_kept(capacities, share, monkeypatch):
  """P and U in packed form: of a dense layer's z, u and h this share."""
  monkeypatch.setattr(mosaic.target, "device_of", lambda _: mosaic.target.H200)
  x, *weights = shapes(16384, 2048, 5632)
  kept = jax.eval_shape(
    functools.partial(
      mosaic.forward_with_residuals, choices=Choices(capacities=capacities)
    ),
    x,
    *weights,
  ).kept
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
  assert size < share * 3 * 16384 * 5632 * 2


def test_lowers_without_a_compiler(monkeypatch):
  monkeypatch.setattr(mosaic.target, "device_of", lambda _: mosaic.target.H200)
  text = lower_for_cuda(op_for(0), *shapes(5, 33, 100))
  assert text.count("mosaic_gpu") >= 2


def test_a_training_step_compiles():
  """With remat and a scan over layers, as a model has them."""

  def loss(weights, x):
    def layer(x, weights):
      y, activity = op_for(0)(x, *weights)
      return x + y, activity.l1

    x, l1 = jax.lax.scan(jax.checkpoint(layer), x, weights)
    return jnp.sum(x.astype(jnp.float32)) + jnp.mean(l1)

  x, *weights = shapes(64, 256, 512)
  stacked = [
    jax.ShapeDtypeStruct((2, *matrix.shape), matrix.dtype) for matrix in weights
  ]
  compiled = compile_for_h200(jax.grad(loss), stacked, x)
  assert {"gate_pack", "sddmm", "gathered_down", "spmm_two_values"} <= {
    stats.name for stats in compiled.kernels
  }
