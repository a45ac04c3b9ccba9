"""The layer in linen and in plain JAX: the same layer, the same parameters."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from twell_jax import nn, sparse_ffn
from twell_jax.nn import linen as sparse_linen
from twell_jax.training import make_mesh

D_MODEL, D_FF = 8, 24


def unboxed(variables):
  return linen.meta.unbox(variables)["params"]


def inputs(*shape):
  return jax.random.normal(jax.random.key(1), (*shape, D_MODEL))


def assert_same(a, b):
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "changes",
  [{}, {"gated": False}, {"activation": "silu"}, {"hot_neurons": 4}],
  ids=str,
)
def test_linen_nnx_and_plain_arrays_are_one_layer(changes):
  x = inputs(2, 5)
  module = sparse_linen.SparseFFN(D_MODEL, D_FF, **changes)
  params = unboxed(module.init(jax.random.key(0), x))
  assert params.keys() == {"gate", "down"} | (
    {"up"} if changes.get("gated", True) else set()
  )
  assert {value.shape for value in params.values()} == {(D_FF, D_MODEL)}
  y, activity = module.apply({"params": params}, x)
  ffn = nn.SparseFFN(D_MODEL, D_FF, **changes, rngs=nnx.Rngs(3))
  nn.load_params(ffn, params)
  other = ffn(x)
  np.testing.assert_array_equal(y, other.y)
  jax.tree.map(np.testing.assert_array_equal, activity, other.activity)
  jax.tree.map(np.testing.assert_array_equal, nn.params_of(ffn), dict(params))
  if changes.get("activation") != "silu":
    plain = sparse_ffn(x, params["gate"], params.get("up"), params["down"])
    assert_same(plain.y, y)


def test_parameters_are_drawn_as_asked():
  module = sparse_linen.SparseFFN(
    64, 512, param_dtype=jnp.bfloat16, init_std=0.5
  )
  params = unboxed(module.init(jax.random.key(0), jnp.zeros((1, 64))))
  for value in params.values():
    assert value.dtype == jnp.bfloat16
    assert np.std(value.astype(np.float32)) == pytest.approx(0.5, rel=0.05)
  assert not np.array_equal(params["gate"], params["down"])


class Block(linen.Module):
  """A residual block, as a linen model has it."""

  partitioning: nn.Partitioning | None = None

  @linen.compact
  def __call__(self, x, _=None):
    ffn = sparse_linen.SparseFFN(
      D_MODEL, D_FF, init_std=0.5, partitioning=self.partitioning, name="ffn"
    )
    y, activity = ffn(linen.RMSNorm()(x))
    return x + y, activity.l1


def stacked(**fields):
  return linen.scan(
    linen.remat(Block),
    variable_axes={"params": 0},
    split_rngs={"params": True},
    length=3,
    metadata_params={linen.PARTITION_NAME: "layers"},
  )(**fields)


def test_scan_over_remat():
  """Values and gradients of the same blocks, one after the other."""
  x = inputs(2, 3)
  model = stacked()
  variables = model.init(jax.random.key(0), x)
  gate = linen.get_partition_spec(variables)["params"]["ffn"]["gate"]
  assert gate == jax.P("layers", "mlp", "embed")
  params = unboxed(variables)

  def scanned(params):
    y, l1 = model.apply({"params": params}, x)
    return jnp.sum(y**2) + jnp.sum(l1)

  def unrolled(params):
    y, total = x, jnp.float32(0)
    for own in (jax.tree.map(operator.itemgetter(i), params) for i in range(3)):
      y, l1 = Block().apply({"params": own}, y)
      total += l1
    return jnp.sum(y**2) + total

  value, gradient = jax.jit(jax.value_and_grad(scanned))(params)
  expected, expected_gradient = jax.jit(jax.value_and_grad(unrolled))(params)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected_gradient))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale),
    gradient,
    expected_gradient,
  )


def test_on_a_mesh():
  """Neurons in two slices, placed where the module's own axes say."""
  mesh = make_mesh(data=2, tensor=2)
  partitioning = nn.Partitioning(mesh)
  x = inputs(4, 3)
  model = Block(partitioning=partitioning)
  rules = (("mlp", "tensor"), ("embed", "fsdp"))
  shapes = jax.eval_shape(model.init, jax.random.key(0), x)
  shardings = linen.logical_to_mesh_sharding(
    linen.get_partition_spec(shapes), mesh, rules
  )
  variables = jax.jit(
    lambda key, x: linen.meta.unbox(model.init(key, x)),
    out_shardings=linen.meta.unbox(shardings),
  )(jax.random.key(0), x)
  gate = variables["params"]["ffn"]["gate"]
  assert gate.sharding.spec == jax.P("tensor", "fsdp")
  assert gate.addressable_shards[0].data.shape == (D_FF // 2, D_MODEL)
  y, l1 = jax.jit(model.apply)(variables, x)
  alone = jax.device_get(variables)
  expected, expected_l1 = Block().apply(alone, x)
  assert_same(y, expected)
  assert_same(l1, expected_l1)


def test_boxed_parameters_under_a_mesh_in_the_context():
  """Their axes are logical: none of them is an axis of the mesh."""
  x = inputs(2)
  module = sparse_linen.SparseFFN(D_MODEL, D_FF)
  boxed = module.init(jax.random.key(0), x)
  expected, _ = module.apply({"params": unboxed(boxed)}, x)
  with jax.set_mesh(make_mesh(data=2, tensor=2)):
    y, _ = jax.jit(module.apply)(boxed, x)
  assert_same(y, expected)


def test_mistakes():
  x = inputs(2)
  for module, message in (
    (sparse_linen.SparseFFN(D_MODEL, D_FF, activation="gelu"), "'gelu' is unk"),
    (sparse_linen.SparseFFN(D_MODEL, D_FF, hot_neurons=25), "hot_neurons = 25"),
    (sparse_linen.SparseFFN(4, D_FF), "x"),
  ):
    with pytest.raises(ValueError, match=message):
      module.init(jax.random.key(0), x)
  ffn = nn.SparseFFN(D_MODEL, D_FF, rngs=nnx.Rngs(0))
  params = nn.params_of(ffn)
  with pytest.raises(ValueError, match="build it with gated=False"):
    nn.load_params(ffn, {name: params[name] for name in ("gate", "down")})
  with pytest.raises(ValueError, match=r"up has shape \(8, 24\) and the layer"):
    nn.load_params(
      ffn, params | {"up": params["up"].T, "down": -params["down"]}
    )
  with pytest.raises(ValueError, match="has down, gate, up: rename them"):
    nn.load_params(ffn, {"wi": params["gate"], "wo": params["down"]})
  boxed = sparse_linen.SparseFFN(D_MODEL, D_FF).init(jax.random.key(1), x)
  with pytest.raises(ValueError, match=r"not an array: unbox the variables"):
    nn.load_params(ffn, boxed["params"])
  jax.tree.map(np.testing.assert_array_equal, nn.params_of(ffn), params)


def test_kernels_of_dense_layers():
  """An MLP of `linen.Dense` layers with ReLU is this layer."""
  x = inputs(5)

  class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
      gate = linen.Dense(D_FF, use_bias=False, name="gate")(x)
      up = linen.Dense(D_FF, use_bias=False, name="up")(x)
      down = linen.Dense(D_MODEL, use_bias=False, name="down")
      return down(linen.relu(gate) * up)

  variables = Dense().init(jax.random.key(0), x)
  kernels = {name: v["kernel"] for name, v in variables["params"].items()}
  params = nn.from_kernels(**kernels)
  y = sparse_ffn(x, params["gate"], params["up"], params["down"]).y
  assert_same(y, Dense().apply(variables, x))
  back = nn.to_kernels(params)
  jax.tree.map(np.testing.assert_array_equal, back, kernels)
  plain = nn.from_kernels(kernels["gate"], kernels["down"])
  assert plain.keys() == {"gate", "down"}
  for wrong in ({"down": kernels["up"]}, {"up": kernels["down"]}):
    with pytest.raises(ValueError, match=r"has shape .* beside a gate of"):
      nn.from_kernels(**(kernels | wrong))


@pytest.mark.slow
def test_l1_makes_a_linen_model_sparse():
  # A direction that tokens share is what can silence a neuron for all of them.
  x = inputs(64) + 2
  target = jnp.sin(3 * x)
  model = Block()
  params = unboxed(model.init(jax.random.key(0), x))
  optimizer = optax.adam(3e-2)

  def active(params):
    ffn = {"params": params["ffn"]}
    h = linen.RMSNorm().apply({"params": params["RMSNorm_0"]}, x)
    output: Any = sparse_linen.SparseFFN(D_MODEL, D_FF).apply(ffn, h)
    return output.activity.active.mean()

  def train(coefficient):
    def loss(params):
      y, l1 = model.apply({"params": params}, x)
      return jnp.mean((y - target) ** 2) + coefficient * l1

    def step(carry, _):
      params, state = carry
      updates, state = optimizer.update(jax.grad(loss)(params), state)
      return (optax.apply_updates(params, updates), state), None

    with jax.numpy_dtype_promotion("standard"):
      start = params, optimizer.init(params)
      return jax.jit(lambda s: jax.lax.scan(step, s, length=150)[0][0])(start)

  assert active(train(0.3)) < 0.5 * active(train(0.0))
