import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from twell_jax import training
from twell_jax.nn import Partitioning

COEFFICIENT = 0.1


@pytest.fixture
def batch():
  rng = np.random.default_rng(0)
  shape = (8, 6)
  kept = rng.random(shape) > 0.3
  return {
    "inputs": rng.integers(0, 12, shape).astype(np.int32),
    "targets": rng.integers(0, 12, shape).astype(np.int32),
    # Unequal between sequences, so that a mean of means is another number.
    "weights": (rng.random(shape) * kept).astype(np.float32),
  }


def one_step(config, batch, *, mesh, accumulation_steps=1):
  """The result of a first step of plain SGD: params move by −gradient."""
  model = training.abstract_model(config, Partitioning(mesh))
  optimizer = optax.sgd(1.0)
  # Drawn on one device and spread, which compiles less than drawing on each.
  single = training.make_mesh(devices=jax.devices()[:1])
  state = jax.device_put(
    training.initial_state(
      training.abstract_model(config, Partitioning(single)), optimizer, seed=0
    ),
    jax.tree.map(
      lambda leaf: leaf.sharding, training.abstract_state(model, optimizer)
    ),
  )
  before = jax.device_get(state.params)
  step = training.make_train_step(
    model,
    optimizer,
    learning_rate=optax.constant_schedule(1.0),
    l1_coefficient=optax.constant_schedule(COEFFICIENT),
    accumulation_steps=accumulation_steps,
  )
  result = step(state, training.place_batch(batch, model.partitioning))
  return model, before, jax.device_get(result)


def gradient(before, result):
  return jax.tree.map(lambda a, b: a - b, before, result.state.params)


def assert_same(one, other):
  scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(one))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * scale),
    one,
    other,
  )


def test_loss_and_gradient_are_those_of_the_formula(config, batch, single_mesh):
  model, before, result = one_step(config, batch, mesh=single_mesh)

  def objective(params):
    logits, activity = model.bind(params)(batch["inputs"])
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.take_along_axis(log_p, batch["targets"][..., None], -1)
    mean = jnp.sum(entropy[..., 0] * batch["weights"]) / jnp.sum(
      batch["weights"]
    )
    return mean + COEFFICIENT * jnp.mean(activity.l1), activity

  gradient_of = jax.jit(jax.value_and_grad(objective, has_aux=True))
  (loss, activity), expected = gradient_of(before)
  statistics = result.statistics
  np.testing.assert_allclose(statistics.loss, loss, rtol=1e-6)
  np.testing.assert_allclose(statistics.l1, activity.l1, rtol=1e-6)
  np.testing.assert_array_equal(statistics.active[0], activity.active)
  np.testing.assert_array_equal(statistics.fired, activity.fired)
  assert_same(expected, gradient(before, result))
  assert statistics.gradient_norm == pytest.approx(
    float(optax.tree.norm(expected)), rel=1e-5
  )
  assert statistics.l1_coefficient == np.float32(COEFFICIENT)
  assert result.state.step == 1


@pytest.mark.parametrize(
  ("mesh", "accumulation_steps"),
  [
    (None, 8),
    ({"data": 4}, 1),
    ({"data": 1, "fsdp": 4}, 2),
    ({"data": 1, "fsdp": 2, "tensor": 2}, 2),
  ],
  ids=["accumulated", "data", "fsdp", "tensor"],
)
def test_gradient_does_not_depend_on_the_split(
  config, batch, single_mesh, mesh, accumulation_steps
):
  _, before, whole = one_step(config, batch, mesh=single_mesh)
  _, _, split = one_step(
    config,
    batch,
    mesh=single_mesh if mesh is None else training.make_mesh(**mesh),
    accumulation_steps=accumulation_steps,
  )
  assert_same(gradient(before, whole), gradient(before, split))
  np.testing.assert_allclose(
    split.statistics.loss, whole.statistics.loss, rtol=1e-6
  )
  np.testing.assert_allclose(
    split.statistics.l1, whole.statistics.l1, rtol=1e-5
  )
  np.testing.assert_array_equal(split.statistics.fired, whole.statistics.fired)


def test_the_sparse_implementation_has_the_same_gradient(
  config, batch, single_mesh
):
  _, before, dense = one_step(config, batch, mesh=single_mesh)
  sparse_config = dataclasses.replace(config, implementation="xla")
  _, _, sparse = one_step(sparse_config, batch, mesh=single_mesh)
  assert_same(gradient(before, dense), gradient(before, sparse))


def test_padding_alone_has_no_loss_and_is_not_nan(config, batch, single_mesh):
  batch["weights"][:] = 0
  _, _, result = one_step(config, batch, mesh=single_mesh)
  assert result.statistics.cross_entropy == 0
  assert np.isfinite(result.statistics.gradient_norm)
  # The embedding is the head: without targets only the L1 term moves it.
  assert result.statistics.gradient_norm > 0


def test_accumulation_must_divide_the_batch(config, batch, single_mesh):
  with pytest.raises(ValueError, match=r"batch of 8 .* accumulation_steps = 3"):
    one_step(config, batch, mesh=single_mesh, accumulation_steps=3)


def test_bfloat16_parameters_train(config, batch, single_mesh):
  half = dataclasses.replace(config, dtype="bfloat16", param_dtype="bfloat16")
  _, before, result = one_step(half, batch, mesh=single_mesh)
  assert result.state.params["embedding"].dtype == jnp.bfloat16
  assert np.isfinite(result.statistics.loss)
  changed = jax.tree.map(
    lambda a, b: bool(np.any(a != b)), before, result.state.params
  )
  assert changed["embedding"]


def test_summary(config, batch, single_mesh):
  _, _, result = one_step(config, batch, mesh=single_mesh, accumulation_steps=2)
  statistics = result.statistics
  summary = training.summarize(statistics)
  for layer in range(2):
    active = statistics.active[:, layer].ravel()
    np.testing.assert_allclose(
      summary.active_mean[layer], active.mean(), rtol=1e-6
    )
    for name, q in (
      ("active_p50", 50),
      ("active_p95", 95),
      ("active_max", 100),
    ):
      np.testing.assert_allclose(
        getattr(summary, name)[layer], np.percentile(active, q), rtol=1e-6
      )
    np.testing.assert_allclose(
      summary.alive_fraction[layer],
      np.mean(statistics.fired[layer] > 0),
      rtol=1e-6,
    )
  np.testing.assert_allclose(
    summary.active_fraction, statistics.active.mean() / 24, rtol=1e-6
  )
