import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn import numpy_model
from twell_jax.nn import Partitioning, SparseFFN, logical_axes
from twell_jax.ops import dense_part
from twell_jax.training import make_mesh


def ffn(**options):
  return SparseFFN(6, 10, **({"init_std": 0.5} | options), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("gated", [True, False])
def test_matches_numpy(activation, gated):
  layer = ffn(gated=gated, activation=activation)
  x = jax.random.normal(jax.random.key(1), (2, 3, 6))
  y, activity = layer(x)
  weights = jax.tree.map(
    np.float64, nnx.to_pure_dict(nnx.state(layer, nnx.Param))
  )
  h = numpy_model.activations(np.float64(x), weights, activation)
  np.testing.assert_allclose(y, h @ weights["down"], rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(activity.active, (h != 0).sum(-1))
  np.testing.assert_array_equal(activity.fired, (h != 0).sum((0, 1)))
  l1 = np.abs(h).sum(-1).mean() if activation == "relu" else 0.0
  np.testing.assert_allclose(activity.l1, l1, rtol=1e-5)


def test_every_neuron_is_a_row_with_named_axes():
  names = logical_axes(ffn())
  assert names == dict.fromkeys(("gate", "up", "down"), ("mlp", "embed"))
  assert set(logical_axes(ffn(gated=False))) == {"gate", "down"}
  assert ffn().gate[...].shape == (10, 6)


def test_dtypes():
  layer = ffn(dtype=jnp.bfloat16)
  x = jnp.ones((2, 6))
  assert layer(x).y.dtype == jnp.bfloat16
  assert layer.gate[...].dtype == jnp.float32
  gradient = nnx.grad(lambda layer: jnp.sum(layer(x).y))(layer)
  assert gradient["gate"][...].dtype == jnp.float32
  assert ffn(param_dtype=jnp.bfloat16).up[...].dtype == jnp.bfloat16


def test_any_leading_shape():
  layer = ffn()
  x = jax.random.normal(jax.random.key(1), (2, 3, 6))
  whole, flat, one = layer(x), layer(x.reshape(6, 6)), layer(x[0, 0])
  np.testing.assert_allclose(whole.y.reshape(6, 6), flat.y, atol=1e-6)
  np.testing.assert_allclose(one.y, flat.y[0], atol=1e-6)
  assert one.activity.active.shape == ()


@pytest.mark.parametrize("hot_neurons", [0, 4])
def test_same_result_on_a_mesh(hot_neurons):
  x = jax.random.normal(jax.random.key(1), (4, 3, 6))
  mesh = make_mesh(fsdp=2, tensor=2)
  sharded = ffn(partitioning=Partitioning(mesh), hot_neurons=hot_neurons)
  here, there = ffn()(x), nnx.jit(lambda layer, x: layer(x))(sharded, x)
  # Either slice of the neurons counts its tokens.
  dense_tokens = 2 * here.activity.dense_tokens
  here = here._replace(
    activity=here.activity._replace(dense_tokens=dense_tokens)
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    here,
    there,
  )


def test_hot_neurons_change_no_result(monkeypatch):
  calls = []
  forward = dense_part.forward

  def spied(x, z, up, down):
    calls.append(z.shape)
    return forward(x, z, up, down)

  monkeypatch.setattr(dense_part, "forward", spied)
  x = jax.random.normal(jax.random.key(1), (2, 6))
  split = ffn(hot_neurons=4, dense_above=1.0)(x)
  whole = ffn(implementation="reference")(x)
  assert calls == [(2, 4)]
  assert (split.activity.dense_tokens, whole.activity.dense_tokens) == (0, 2)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    split._replace(activity=split.activity._replace(dense_tokens=2)),
    whole,
  )
  with pytest.raises(
    ValueError, match="hot_neurons = 11 must be an int from 0"
  ):
    ffn(hot_neurons=11)


def test_a_named_implementation_is_used():
  x = jax.random.normal(jax.random.key(1), (2, 6))
  np.testing.assert_allclose(
    ffn(implementation="reference")(x).y,
    ffn(implementation="xla")(x).y,
    rtol=1e-5,
    atol=1e-6,
  )
  with pytest.raises(ValueError, match="implementation = 'magic' is unknown"):
    ffn(implementation="magic")
  with pytest.raises(ValueError, match="activation = 'tanh' is unknown"):
    ffn(activation="tanh")
