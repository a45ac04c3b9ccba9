import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from twell_jax import training
from twell_jax.nn import Partitioning
from twell_jax.training import (
  L1Options,
  coefficient_from_published,
  l1_feedback,
  l1_schedule,
)
from twell_jax.training.objective import L1Control


def values(options, steps):
  # Optax itself does not hold under strict promotion.
  with jax.numpy_dtype_promotion("standard"):
    return [float(l1_schedule(options)(step)) for step in steps]


def test_schedule_waits_and_rises():
  options = L1Options(coefficient=8.0, start_step=10, warmup_steps=4)
  assert values(options, [0, 9, 10, 11, 12, 14, 99]) == [0, 0, 0, 2, 4, 8, 8]


def test_schedule_without_warmup():
  assert values(L1Options(coefficient=2.0), [0, 1, 50]) == [2, 2, 2]
  late = L1Options(coefficient=2.0, start_step=3)
  assert values(late, [0, 2, 3, 4]) == [0, 0, 2, 2]
  assert values(L1Options(), [0, 5]) == [0, 0]


def test_schedule_of_the_paper_with_warmup():
  # 5k steps without the term, then 5k in which it rises.
  options = L1Options(coefficient=1.0, start_step=5000, warmup_steps=5000)
  found = values(options, [0, 4999, 5000, 6000, 10_000, 30_000])
  assert found == pytest.approx([0, 0, 0, 0.2, 1, 1])


@pytest.mark.parametrize("name", ["coefficient", "start_step", "warmup_steps"])
def test_negative_options_are_refused(name):
  with pytest.raises(ValueError, match=f"l1 {name} = -1 must be 0 or more"):
    L1Options(**{name: -1})


def test_published_coefficient():
  ours = coefficient_from_published(2e-5, accumulation_steps=8, world_size=8)
  assert ours == pytest.approx(1.28e-3)


def test_a_coefficient_that_is_no_number_is_refused():
  with pytest.raises(ValueError, match="l1 coefficient = nan must be"):
    L1Options(coefficient=float("nan"))


TARGET = L1Options(
  coefficient=0.02,
  target_active=8.0,
  target_gain=0.5,
  target_horizon=2.0,
  target_max_factor=3.0,
)


def follow(options, activity, *, first_step=0):
  """The factor of λ after each step that measured an activity."""
  feedback = l1_feedback(options)
  assert feedback is not None
  control = L1Control(jnp.float32(1), jnp.float32(0))
  factors = []
  for step, active in enumerate(activity, first_step):
    control = feedback(control, jnp.float32(active), jnp.int32(step))
    factors.append(float(control.factor))
  return factors


def test_the_factor_follows_the_activity():
  assert l1_feedback(L1Options(coefficient=1.0)) is None
  # Constant activity has no trend: a factor of 4 ^ gain is cut to 2 ^ gain.
  steps = follow(TARGET, [32.0] * 5)
  assert steps == pytest.approx([2**0.5, 2, 2 * 2**0.5, 3, 3])
  assert follow(TARGET, [8.0, 8.0]) == pytest.approx([1, 1])
  assert follow(TARGET, [10.0]) == pytest.approx([1.25**0.5])
  assert follow(TARGET, [0.0] * 4)[-1] == pytest.approx(1 / 3)
  assert follow(TARGET, [2e9])[0] == pytest.approx(2**0.5)


def test_the_factor_looks_ahead():
  # From 16 to 12: 9 is where this leads, and from there usual is √(16 · 12).
  first, second, third = follow(TARGET, [16.0, 12.0, 8.0])
  assert second / first == pytest.approx((9 / 8) ** 0.5)
  usual = (16 * 12) ** 0.5
  assert third / second == pytest.approx((8 * 8 / usual / 8) ** 0.5)


def test_the_factor_waits_for_the_warmup():
  options = dataclasses.replace(TARGET, start_step=2, warmup_steps=2)
  factors = follow(options, [32.0] * 6)
  assert factors[:4] == [1] * 4
  assert factors[4:] == pytest.approx([2**0.5, 2])


def test_a_model_reaches_its_target(config, corpus, single_mesh):
  options = dataclasses.replace(
    TARGET,
    coefficient=0.1,
    target_active=6.0,
    target_gain=0.05,
    target_horizon=50.0,
    target_max_factor=30.0,
  )
  model = training.abstract_model(config, Partitioning(single_mesh))
  optimizer = optax.adam(1e-2)
  step = training.make_train_step(
    model,
    optimizer,
    learning_rate=optax.constant_schedule(1e-2),
    l1_coefficient=l1_schedule(options),
    l1_feedback=l1_feedback(options),
  )
  batches = corpus.batches()
  batches = jax.tree.map(
    lambda *leaves: np.stack(leaves), *[next(batches) for _ in range(300)]
  )

  @jax.jit
  def run(state, batches):
    return jax.lax.scan(lambda *now: tuple(step(*now)), state, batches)

  # With a constant λ they end with 9.3 and 1.1 active neurons, about.
  for factor in (0.2, 5.0):
    state = training.initial_state(model, optimizer, seed=0)
    control = L1Control(jnp.float32(factor), jnp.float32(0))
    state, statistics = run(state._replace(l1_control=control), batches)
    active = statistics.active.mean((1, 2, 3, 4))
    coefficients = statistics.l1_coefficient
    assert coefficients[0] == pytest.approx(0.1 * factor)
    assert np.abs(np.log(coefficients[-1] / coefficients[0])) > 1
    assert np.mean(active[-60:]) == pytest.approx(6.0, rel=0.15)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"target_active": -1}, "target_active = -1 must be 0 or more"),
    ({"coefficient": 0}, "target_active = 8.0 needs a coefficient above 0"),
    ({"target_gain": 0}, "target_gain = 0 must be above 0 and at most 1"),
    ({"target_gain": math.nan}, "target_gain = nan must be above 0"),
    ({"target_horizon": 0}, "target_horizon = 0 must be finite and at least 1"),
    ({"target_max_factor": 1}, "max_factor = 1 must be finite and above 1"),
  ],
)
def test_targets_are_checked(changes, message):
  with pytest.raises(ValueError, match=f"l1 .*{message}"):
    dataclasses.replace(TARGET, **dict[str, Any](changes))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"activation": "silu"}, "'silu' has no L1 term to adjust: leave l1"),
    ({"d_ff": 8}, "target_active = 8.0 must be below d_ff = 8"),
  ],
)
def test_targets_out_of_reach(config, single_mesh, tmp_path, changes, message):
  config = dataclasses.replace(config, implementation=None, **changes)
  options = training.TrainOptions(steps=1000, l1=TARGET)
  with pytest.raises(ValueError, match=message):
    training.check_run(config, options, mesh=single_mesh, workdir=tmp_path)
