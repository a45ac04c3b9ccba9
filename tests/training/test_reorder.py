"""Runs of a few steps that differ in nothing but the re-ordering."""

import dataclasses
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from twell_jax import training
from twell_jax.nn import Partitioning

STEPS = 6
# Every state and parameter of a layer of neurons: [layers, d_ff, d_model].
LAYERS, D_FF = 2, 24
ONE = {"data": 1}
TENSOR = {"data": 1, "tensor": 2}
COPIED = {"data": 2, "tensor": 2}
# Each device has a slice of the neurons and of each neuron.
SLICED = {"data": 1, "fsdp": 2, "tensor": 2}


def make_model(config, axes):
  devices = jax.devices()[: math.prod(axes.values())]
  mesh = training.make_mesh(**axes, devices=devices)
  return training.abstract_model(config, Partitioning(mesh))


def make_state(model, optimizer, *, moments):
  """Parameters drawn by numpy, for which nothing is compiled."""
  rng = np.random.default_rng(0)
  abstract = training.abstract_state(model, optimizer)

  def draw(leaf):
    return rng.normal(0, 0.2, leaf.shape).astype(leaf.dtype)

  def zeros(leaf):
    return np.zeros(leaf.shape, leaf.dtype)

  state = abstract._replace(
    step=jnp.int32(0),
    params=jax.tree.map(draw, abstract.params),
    opt_state=jax.tree.map(
      {"zero": zeros, "drawn": draw}[moments], abstract.opt_state
    ),
    rng=jax.random.key(0),
    silent_tokens=jnp.asarray(rng.integers(0, 99, (LAYERS, D_FF), np.int32)),
    l1_control=jax.tree.map(zeros, abstract.l1_control),
    skipped=jax.tree.map(zeros, abstract.skipped),
  )
  return jax.device_put(state, jax.tree.map(lambda a: a.sharding, abstract))


def unmoved(state, fired):
  del fired
  return state


class Curve(NamedTuple):
  """What a run measured at each step, and its state at the end."""

  losses: list[float]
  gradient_norms: list[float]
  state: training.TrainState

  @property
  def gate(self):
    return np.asarray(self.state.params["layers"]["ffn"]["gate"])

  def difference(self, other):
    """The largest of any step, relative."""
    return max(
      np.abs(np.divide(self.losses, other.losses) - 1).max(),
      np.abs(np.divide(self.gradient_norms, other.gradient_norms) - 1).max(),
    )


class Runs:
  """One compiled step; runs with it that re-order in different ways."""

  def __init__(self, config, corpus, *, axes, accumulation_steps):
    self.model = make_model(config, axes)
    options = training.OptimizerOptions(learning_rate=1e-2, warmup_steps=1)
    schedule = training.learning_rate_schedule(options, steps=STEPS)
    self.optimizer = training.make_optimizer(options, steps=STEPS)
    self.reorder = training.make_reorder(self.model, self.optimizer)
    self.step = training.make_train_step(
      self.model,
      self.optimizer,
      learning_rate=schedule,
      l1_coefficient=optax.constant_schedule(1e-2),
      accumulation_steps=accumulation_steps,
    )
    batches = corpus.batches()
    self.batches = [
      training.place_batch(next(batches), self.model.partitioning)
      for _ in range(STEPS)
    ]

  def run(self, reorder):
    state = make_state(self.model, self.optimizer, moments="zero")
    losses, gradient_norms = [], []
    for number, batch in enumerate(self.batches, 1):
      state, statistics = self.step(state, batch)
      losses.append(float(statistics.loss))
      gradient_norms.append(float(statistics.gradient_norm))
      if number % 2 == 0:
        state = reorder(state, statistics.fired)
    return Curve(losses, gradient_norms, state)


@pytest.fixture(
  scope="module",
  params=[
    (TENSOR, {"implementation": "xla", "hot_neurons": 8}, 2),
    (COPIED, {"implementation": "reference", "gated": False}, 1),
  ],
  ids=["xla", "reference"],
)
def runs(request, config, corpus):
  axes, changes, accumulation_steps = request.param
  return Runs(
    dataclasses.replace(config, **changes),
    corpus,
    axes=axes,
    accumulation_steps=accumulation_steps,
  )


@pytest.fixture(scope="module")
def plain(runs):
  """The curve that every right re-ordering must have."""
  return runs.run(unmoved)


def test_the_loss_curve_is_unchanged(runs, plain):
  reordered = runs.run(runs.reorder)
  assert plain.losses[-1] < 0.98 * plain.losses[0]
  assert reordered.difference(plain) < 1e-6
  # They are the same neurons, in another order.
  assert np.abs(reordered.gate - plain.gate).max() > 0.1
  np.testing.assert_allclose(
    np.sort(reordered.gate.sum(-1)), np.sort(plain.gate.sum(-1)), atol=1e-4
  )


@pytest.mark.parametrize("left_behind", ["['down']", ".mu[", ".nu["])
def test_what_is_left_behind_changes_the_loss_curve(runs, plain, left_behind):
  def partial(state, fired):
    def choose(path, before, after):
      return before if left_behind in jax.tree_util.keystr(path) else after

    before = jax.device_get(state.params), jax.device_get(state.opt_state)
    after = runs.reorder(state, fired)
    params, opt_state = jax.tree.map_with_path(
      choose, before, (after.params, after.opt_state)
    )
    return jax.device_put(
      after._replace(params=params, opt_state=opt_state),
      jax.tree.map(lambda leaf: leaf.sharding, after),
    )

  assert runs.run(partial).difference(plain) > 1e-3


def test_neurons_that_fire_most_come_first(runs, plain):
  # By now the learning rate is 0: parameters stay as they are.
  state = jax.tree.map(lambda leaf: leaf.copy(), plain.state)
  state, before = runs.step(state, runs.batches[0])
  state = runs.reorder(state, before.fired)
  state, after = runs.step(state, runs.batches[0])
  assert before.learning_rate == after.learning_rate == 0
  # On both meshes the neurons lie in two slices, to which they are dealt.
  dealt = np.asarray(after.fired).reshape(LAYERS, 2, D_FF // 2)
  by_count = np.swapaxes(dealt, 1, 2).reshape(LAYERS, D_FF)
  np.testing.assert_array_equal(by_count, -np.sort(-np.asarray(before.fired)))
  assert (np.diff(by_count) < 0).any(axis=1).all()


def test_nothing_is_compiled_again_or_copied(runs, plain, caplog):
  state = jax.tree.map(lambda leaf: leaf.copy(), plain.state)
  state, statistics = runs.step(state, runs.batches[0])
  gate = state.params["layers"]["ffn"]["gate"]
  state = runs.reorder(state, statistics.fired)
  assert gate.is_deleted()  # Its memory has the new one.
  with jax.log_compiles(True), caplog.at_level("WARNING"):
    # Of the step neither: everything lies where it lay.
    state, statistics = runs.step(state, runs.batches[1])
    runs.reorder(state, statistics.fired)
    assert "Compiling" not in caplog.text
    jax.jit(lambda x: x + 1)(np.float32(len(caplog.messages)))
  assert "Compiling" in caplog.text


def is_ffn(params):
  return jax.tree.map_with_path(lambda path, _: "'ffn'" in str(path), params)


OPTIMIZERS = {
  "sgd": lambda: optax.sgd(0.1),
  "momentum": lambda: optax.chain(optax.ema(0.5), optax.sgd(0.1, 0.9)),
  "accumulating": lambda: optax.MultiSteps(
    optax.adamw(0.1), 2
  ).gradient_transformation(),
  # The state of each part has gaps, where the parameters are the other's.
  "partitioned": lambda: optax.partition(
    {True: optax.inject_hyperparams(optax.adam)(0.1), False: optax.lion(0.1)},
    is_ffn,
  ),
}
# Arrays of neurons: two matrices of the parameters, and as many of each moment.
MOMENTS = {"sgd": 0, "momentum": 2, "accumulating": 3, "partitioned": 2}


@pytest.mark.parametrize(
  ("name", "axes"),
  [
    ("sgd", ONE),
    ("momentum", TENSOR),
    ("accumulating", SLICED),
    ("partitioned", COPIED),
  ],
)
def test_all_that_is_kept_of_a_neuron_moves(config, name, axes):
  model = make_model(dataclasses.replace(config, gated=False), axes)
  optimizer = OPTIMIZERS[name]()
  state = make_state(model, optimizer, moments="drawn")
  before = jax.device_get((state.params, state.opt_state))
  silent_tokens = jax.device_get(state.silent_tokens)
  # Of two layers, in which some neurons fire equally often.
  fired = np.random.default_rng(1).integers(0, 9, (LAYERS, D_FF), np.int32)

  shards = axes.get("tensor", 1)
  order = np.argsort(-fired, axis=1, kind="stable")
  order = np.concatenate([order[:, i::shards] for i in range(shards)], axis=1)
  assert (order[0] != order[1]).any()

  moved = training.make_reorder(model, optimizer)(state, jnp.asarray(fired))
  after = (moved.params, moved.opt_state)
  count = 0
  for (path, old), new in zip(
    jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True
  ):
    if re.search(r"\['ffn'\]\['(gate|down)'\]$", jax.tree_util.keystr(path)):
      old = np.take_along_axis(old, order[..., None], axis=1)
      count += 1
    np.testing.assert_array_equal(new, old)
  assert count == 2 + 2 * MOMENTS[name]
  np.testing.assert_array_equal(
    moved.silent_tokens, np.take_along_axis(silent_tokens, order, axis=1)
  )
  for leaf, abstract in zip(
    jax.tree.leaves(moved),
    jax.tree.leaves(training.abstract_state(model, optimizer)),
    strict=True,
  ):
    assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)


def test_neurons_without_an_order(config):
  silu = dataclasses.replace(config, activation="silu", implementation=None)
  with pytest.raises(
    ValueError, match=r"activation = 'silu' .* reorder_neurons_every_steps at 0"
  ):
    training.make_reorder(make_model(silu, ONE), optax.sgd(0.1))


def test_moments_that_are_not_of_single_neurons(config):
  def init(params):
    return jax.tree.map(lambda p: p[:, :1] if p.ndim == 3 else p, params)

  optimizer = optax.GradientTransformation(init, optax.identity().update)
  with pytest.raises(
    ValueError,
    match=r"\(2, 1, 16\) of neurons.* layers = 2 and d_ff = 24: leave",
  ):
    training.make_reorder(make_model(config, ONE), optimizer)
