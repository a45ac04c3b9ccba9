import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import trained_ffn
from experiments.dense_layer import (
  DenseKernels,
  dense_ffn,
  dense_ffn_by_neuron,
)
from twell_jax import nn, training
from twell_jax.ops import sparse_ffn

LAYERS = 3


@pytest.fixture(scope="module", params=["gated", "not gated"])
def model(request):
  config = nn.TransformerConfig(
    vocab_size=50,
    d_model=16,
    d_ff=24,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    gated=request.param == "gated",
  )
  mesh = training.make_mesh(devices=jax.devices()[:1])
  abstract = training.abstract_model(config, nn.Partitioning(mesh)).params
  rng = np.random.default_rng(0)
  # Large enough for each layer to change what the next one reads.
  params = jax.tree.map(
    lambda leaf: jax.device_put(
      0.3 * rng.standard_normal(leaf.shape, np.float32), leaf.sharding
    ),
    abstract,
  )
  return trained_ffn.unsharded(config, params)


@pytest.fixture(scope="module")
def tokens():
  return jax.random.randint(jax.random.key(0), (2, 7), 0, 50, jnp.int32)


def test_captured_inputs_are_what_the_layers_read(model, tokens, monkeypatch):
  read: list[np.ndarray] = []
  original = nn.SparseFFN.__call__

  def spied(self, x):
    jax.debug.callback(lambda x: read.append(np.array(x)), x, ordered=True)
    return original(self, x)

  with monkeypatch.context() as patch:
    patch.setattr(nn.SparseFFN, "__call__", spied)
    jax.block_until_ready(nnx.jit(lambda model: model(tokens).logits)(model))
    jax.effects_barrier()
  assert len(read) == LAYERS
  calls = trained_ffn.layer_calls(model, tokens)
  assert len(calls) == LAYERS
  for call, x in zip(calls, read):
    np.testing.assert_allclose(call.x, x.reshape(14, 16), rtol=1e-5, atol=1e-6)
  assert not np.allclose(calls[0].x, calls[1].x, atol=1e-2)


def test_the_calls_have_the_activity_of_the_model(model, tokens):
  activity = model(tokens).activity
  calls = trained_ffn.layer_calls(model, tokens)
  for layer, call in enumerate(calls):
    ours = sparse_ffn(*call).activity
    np.testing.assert_array_equal(
      ours.active, activity.active[layer].reshape(-1)
    )
    np.testing.assert_array_equal(ours.fired, activity.fired[layer])
    np.testing.assert_allclose(ours.l1, activity.l1[layer], rtol=1e-5)


def test_dense_layers_compute_the_same(model, tokens):
  call = trained_ffn.layer_calls(model, tokens)[1]
  x, gate, down = (
    np.asarray(array, np.float64) for array in (call.x, call.gate, call.down)
  )
  h = np.maximum(x @ gate.T, 0)
  if call.up is not None:
    h *= x @ np.asarray(call.up, np.float64).T
  expected = h @ down
  up_kernel = None if call.up is None else call.up.T
  for rows in (14, 1):
    y = dense_ffn(
      call.x[:rows], DenseKernels(call.gate.T, up_kernel, call.down)
    )
    np.testing.assert_allclose(y, expected[:rows], rtol=1e-4, atol=1e-5)
    y = dense_ffn_by_neuron(
      call.x[:rows], DenseKernels(call.gate, call.up, call.down.T)
    )
    np.testing.assert_allclose(y, expected[:rows], rtol=1e-4, atol=1e-5)


def test_a_single_short_row_is_padded():
  rng = np.random.default_rng(0)
  kernels = DenseKernels(
    *(
      jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
      for shape in ((16, 24), (16, 24), (24, 16))
    )
  )
  x = jnp.asarray(rng.standard_normal((3, 16)), jnp.bfloat16)
  whole = dense_ffn(x, kernels)
  assert dense_ffn(x[:1], kernels).shape == (1, 16)
  np.testing.assert_allclose(
    np.float32(dense_ffn(x[:1], kernels)), np.float32(whole[:1]), rtol=2e-2
  )


def test_forward_speed(model, tokens):
  calls = trained_ffn.layer_calls(model, tokens)
  speed = trained_ffn.forward_speed(
    calls, tokens=4, what="four tokens", min_seconds=0.0
  )
  assert speed.what == "four tokens"
  assert speed.ratio == speed.dense.median_ms / speed.sparse.median_ms > 0


def test_held_out_tokens():
  rows = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
  batches = [{"inputs": batch} for batch in rows]
  taken = trained_ffn.held_out_tokens(batches, tokens=13)
  np.testing.assert_array_equal(taken, rows.reshape(6, 4)[:4])
  with pytest.raises(ValueError, match=r"has 6 sequences but 7 .* raise"):
    trained_ffn.held_out_tokens(batches, tokens=25)
