import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.training.one_step import (
  COEFFICIENT,
  assert_same,
  assert_same_step,
  gradient,
  one_step,
)
from twell_jax import training


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


def test_gradient_does_not_depend_on_micro_batches(config, batch, single_mesh):
  _, before, whole = one_step(config, batch, mesh=single_mesh)
  _, _, split = one_step(config, batch, mesh=single_mesh, accumulation_steps=8)
  assert_same_step((before, whole), (before, split))


def test_the_sparse_implementation_has_the_same_gradient(
  config, batch, single_mesh
):
  _, before, dense = one_step(config, batch, mesh=single_mesh)
  sparse_config = dataclasses.replace(config, implementation="xla")
  _, _, sparse = one_step(sparse_config, batch, mesh=single_mesh)
  assert_same(gradient(before, dense), gradient(before, sparse))


def test_padding_alone_has_no_loss_and_is_not_nan(config, batch, single_mesh):
  batch = batch | {"weights": np.zeros_like(batch["weights"])}
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
