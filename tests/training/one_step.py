"""One step of training, from parameters that do not depend on the mesh."""

import jax
import numpy as np
import optax

from twell_jax import training
from twell_jax.nn import Partitioning

COEFFICIENT = 0.1


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


def assert_same(one, other, tolerance=2e-6):
  """Equal up to this share of the largest number in any array."""
  scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(one))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=tolerance * scale
    ),
    one,
    other,
  )


def assert_same_step(one, other, *, tolerance=2e-6):
  """Losses and gradients up to rounding, counts exactly.

  Args:
    one: The parameters before a step, and its result.
    other: The same of another one.
    tolerance: Of gradients, relative to the largest number in any of them.
  """
  (before, whole), (_, split) = one, other
  assert_same(gradient(before, whole), gradient(before, split), tolerance)
  relative = max(1e-6, tolerance / 4)
  for name in ("loss", "cross_entropy", "gradient_norm"):
    np.testing.assert_allclose(
      getattr(split.statistics, name),
      getattr(whole.statistics, name),
      rtol=relative,
      err_msg=name,
    )
  np.testing.assert_allclose(
    split.statistics.l1, whole.statistics.l1, rtol=10 * relative
  )
  for name in ("fired", "dead"):
    np.testing.assert_array_equal(
      getattr(split.statistics, name), getattr(whole.statistics, name), name
    )
  np.testing.assert_array_equal(
    split.state.silent_tokens, whole.state.silent_tokens
  )
