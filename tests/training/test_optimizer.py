import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twell_jax.nn import Partitioning
from twell_jax.training import (
  OptimizerOptions,
  abstract_model,
  learning_rate_schedule,
  make_optimizer,
)
from twell_jax.training.optimizer import decay_mask
from twell_jax.training.sharding import path_name


@pytest.fixture(autouse=True)
def _standard_promotion():
  # Optax itself does not hold under strict promotion.
  with jax.numpy_dtype_promotion("standard"):
    yield


def test_schedule_rises_and_falls_to_zero():
  options = OptimizerOptions(learning_rate=4.0, warmup_steps=4)
  schedule = learning_rate_schedule(options, steps=12)
  rates = [float(schedule(step)) for step in range(13)]
  np.testing.assert_allclose(rates[:5], [0, 1, 2, 3, 4])
  np.testing.assert_allclose(rates[8], 2, rtol=1e-6)
  assert np.all(np.diff(rates[4:]) < 0)
  assert rates[12] == pytest.approx(0, abs=1e-6)


def test_schedule_without_warmup_starts_at_the_peak():
  options = OptimizerOptions(learning_rate=4.0, warmup_steps=0)
  assert float(learning_rate_schedule(options, steps=5)(0)) == 4.0


def test_norms_are_not_decayed_and_embeddings_are(config, single_mesh):
  params = abstract_model(config, Partitioning(single_mesh)).params
  spared = {
    path_name(path)
    for path, decayed in jax.tree.leaves_with_path(decay_mask(params))
    if not decayed
  }
  assert spared == {
    "final_norm/scale",
    "layers/attention_norm/scale",
    "layers/ffn_norm/scale",
  }


def test_decay_is_decoupled():
  options = OptimizerOptions(
    learning_rate=0.5, warmup_steps=0, weight_decay=0.1
  )
  optimizer = make_optimizer(options, steps=10)
  params = {"w": jnp.ones((2, 2)), "norm": {"scale": jnp.ones((2,))}}
  zero = jax.tree.map(jnp.zeros_like, params)
  updates, _ = optimizer.update(zero, optimizer.init(params), params)
  np.testing.assert_allclose(updates["w"], -0.05 * np.ones((2, 2)), rtol=1e-6)
  np.testing.assert_array_equal(updates["norm"]["scale"], np.zeros(2))


def test_gradients_are_clipped():
  options = OptimizerOptions(warmup_steps=0, clip_norm=1.0)
  optimizer = make_optimizer(options, steps=10)
  params = {"w": jnp.ones((4,))}

  def first_moment(gradient):
    _, state = optimizer.update({"w": gradient}, optimizer.init(params), params)
    return state[1][0].mu["w"]

  large = first_moment(jnp.full((4,), 50.0))
  np.testing.assert_allclose(large, 0.1 * np.full(4, 0.5), rtol=1e-5)
  small = first_moment(jnp.full((4,), 0.25))
  np.testing.assert_allclose(small, 0.1 * np.full(4, 0.25), rtol=1e-5)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"learning_rate": 0.0}, "optimizer learning_rate = 0.0 must be above 0"),
    ({"clip_norm": -1.0}, "optimizer clip_norm = -1.0 must be above 0"),
    ({"weight_decay": -0.1}, "optimizer weight_decay = -0.1 must be 0 or more"),
    ({"b2": 1.0}, "optimizer b2 = 1.0 must be in"),
  ],
)
def test_options_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    OptimizerOptions(**changes)


def test_warmup_longer_than_the_run():
  with pytest.raises(ValueError, match=r"warmup_steps = 600 .* steps = 600"):
    make_optimizer(OptimizerOptions(), steps=600)
