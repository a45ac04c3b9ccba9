"""Counting silent tokens, and what is done about dead neurons."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from twell_jax import training
from twell_jax.nn import Partitioning
from twell_jax.training import dead_neurons
from twell_jax.training.state import with_tracking

LAYERS, D_FF, D_MODEL = 2, 24, 16
TOKENS = 48  # of a batch of the corpus
LARGEST = np.iinfo(np.int32).max
# Dead once it was silent in two steps, and re-initialised after every second.
OPTIONS = training.DeadNeuronOptions(
  window_tokens=TOKENS + 1, reinitialize_every_steps=2
)


def test_silent_tokens_are_counted():
  counts = jnp.zeros((1, 3), jnp.int32)
  seen = []
  for fired in ([1, 0, 0], [0, 0, 2], [0, 0, 0]):
    counts = dead_neurons.count_silent(
      counts, jnp.array([fired], jnp.int32), tokens=4
    )
    seen.append(counts[0].tolist())
  assert seen == [[0, 4, 4], [4, 8, 0], [8, 12, 4]]


def test_counts_do_not_overflow():
  counts = jnp.array([[LARGEST - 5, LARGEST, LARGEST - 4]], jnp.int32)
  fired = jnp.array([[0, 0, 1]], jnp.int32)
  counts = dead_neurons.count_silent(counts, fired, tokens=10)
  np.testing.assert_array_equal(counts, [[LARGEST, LARGEST, 0]])


@pytest.fixture
def problem():
  """Parameters, gradients and dead rows of a layer stack and of a matrix."""
  rng = np.random.default_rng(0)
  shapes = {"stacked": {"gate": (3, 40, 50)}, "gate": (40, 50), "bias": (50,)}
  params, gradients = (
    jax.tree.map(
      lambda shape: jnp.asarray(rng.normal(0, 1, shape), jnp.float32),
      shapes,
      is_leaf=lambda node: isinstance(node, tuple),
    )
    for _ in range(2)
  )
  stacked = rng.random((3, 40)) < 0.5
  stacked[1] = False
  dead = {
    "stacked": {"gate": jnp.asarray(stacked)},
    "gate": jnp.asarray(rng.random(40) < 0.5),
  }
  return params, gradients, dead


@functools.partial(jax.jit, static_argnames=("mixing", "std"))
def _updated(problem, seed, *, mixing, std):
  params, gradients, dead = problem
  optimizer = optax.adam(0.1)
  if mixing:
    optimizer = optax.chain(
      optimizer, training.reinitialize_dead(mixing=mixing, std=std)
    )
  optimizer = optax.with_extra_args_support(optimizer)
  with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
    updates, state = optimizer.update(
      gradients,
      optimizer.init(params),
      params,
      dead=dead,
      key=jax.random.key(seed),
    )
  return optax.apply_updates(params, updates), state


def updated(problem, *, mixing, seed=0):
  """Parameters after an update of Adam and the re-initialisation, and moments.

  With mixing 0 it is Adam's alone.
  """
  return jax.device_get(_updated(problem, seed, mixing=mixing, std=0.5))


def test_rows_are_mixed_with_new_ones(problem):
  params, _, dead = problem
  plain, moments = updated(problem, mixing=0)
  drawn, _ = updated(problem, mixing=1)
  mixed, mixed_moments = updated(problem, mixing=0.1)
  for name in ("stacked", "bias"):
    assert jax.tree.all(
      jax.tree.map(lambda a, b: np.any(a != b), plain[name], params[name])
    )
  close = functools.partial(np.testing.assert_allclose, atol=1e-6)
  close(mixed["bias"], plain["bias"])
  matrices = (
    (plain["gate"], drawn["gate"], mixed["gate"], dead["gate"]),
    tuple(tree["stacked"]["gate"] for tree in (plain, drawn, mixed, dead)),
  )
  for before, new, after, rows in matrices:
    rows = np.asarray(rows)
    close(after[~rows], before[~rows])
    close(after[rows], 0.9 * before[rows] + 0.1 * new[rows])
    # Of some thousand numbers.
    assert new[rows].std() == pytest.approx(0.5, rel=0.1)
    assert new[rows].mean() == pytest.approx(0, abs=0.05)
  # Adam's state is what it would have been.
  jax.tree.map(close, mixed_moments[0], moments)


def test_no_two_rows_and_no_two_keys_draw_the_same(problem):
  params, gradients, dead = problem
  dead = jax.tree.map(jnp.ones_like, dead)

  def rows(seed):
    new, _ = updated((params, gradients, dead), mixing=1, seed=seed)
    return np.concatenate(
      [new["stacked"]["gate"].reshape(-1, 50), new["gate"]]
    ).round(4)

  first, second = rows(0), rows(1)
  np.testing.assert_array_equal(first, rows(0))
  every_row = np.unique(np.concatenate([first, second]), axis=0)
  assert len(every_row) == 2 * 4 * 40


def test_sixteen_bits(problem):
  params, gradients, dead = problem
  half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, gradients))
  new, _ = updated((*half, dead), mixing=1)
  whole, _ = updated(problem, mixing=1)
  assert new["gate"].dtype == jnp.bfloat16
  rows = np.asarray(dead["gate"])
  np.testing.assert_allclose(
    new["gate"][rows].astype(np.float32), whole["gate"][rows], atol=0.05
  )


@pytest.mark.parametrize(
  ("name", "shape"), [("gate", (50,)), ("elsewhere", (40,)), ("bias", ())]
)
def test_masks_of_no_matrix(problem, name, shape):
  params, gradients, _ = problem
  problem = params, gradients, {name: jnp.zeros(shape, bool)}
  with pytest.raises(ValueError, match=rf"mask of shape .* at {name}, where"):
    updated(problem, mixing=0.1)


def test_params_are_needed(problem):
  params, gradients, dead = problem
  transformation = training.reinitialize_dead()
  with pytest.raises(ValueError, match="needs params"):
    transformation.update(
      gradients,
      transformation.init(params),
      dead=dead,
      key=jax.random.key(0),
    )


class Run:
  """Steps of a model of whose neurons the first half is dead.

  The learning rate is 0, so that nothing but re-initialisation moves a row.
  """

  def __init__(self, config, corpus, *, options, axes=None, accumulation=1):
    axes = axes or {"data": 1}
    devices = jax.devices()[: math.prod(axes.values())]
    self.model = training.abstract_model(
      config, Partitioning(training.make_mesh(**axes, devices=devices))
    )
    optimizer = optax.sgd(0.0)
    self.step = training.make_train_step(
      self.model,
      optimizer,
      learning_rate=optax.constant_schedule(0.0),
      l1_coefficient=optax.constant_schedule(0.0),
      accumulation_steps=accumulation,
      dead_neurons=options,
    )
    self.batches = corpus.batches()
    abstract = training.abstract_state(self.model, optimizer)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
      lambda a: rng.normal(0, 0.3, a.shape).astype(a.dtype), abstract.params
    )
    # A row of zeros is active nowhere, and has no gradient.
    params["layers"]["ffn"]["gate"][:, : D_FF // 2] = 0
    state = with_tracking(
      {
        "step": jnp.int32(0),
        "params": params,
        "opt_state": optimizer.init(params),
        "rng": jax.random.key(7),
      },
      abstract,
    )
    self.state = jax.device_put(
      state, jax.tree.map(lambda leaf: leaf.sharding, abstract)
    )

  def advance(self):
    """Makes a step; returns the gate after it and the step's statistics."""
    batch = training.place_batch(next(self.batches), self.model.partitioning)
    self.state, statistics = self.step(self.state, batch)
    gate = np.asarray(self.state.params["layers"]["ffn"]["gate"])
    return gate, jax.device_get(statistics)


@pytest.fixture(scope="module")
def woken(config, corpus):
  """Two steps of a run, and what they left."""
  run = Run(config, corpus, options=OPTIONS)
  return run, [run.advance(), run.advance()]


def test_the_dead_are_reinitialised_when_due(woken):
  run, [(first_gate, first), (gate, second)] = woken
  assert first.dead.tolist() == first.reinitialized.tolist() == [0, 0]
  np.testing.assert_array_equal(first_gate[:, : D_FF // 2], 0)
  # Some of the other half may be silent too.
  assert (second.dead >= D_FF // 2).all()
  np.testing.assert_array_equal(second.dead, second.reinitialized)
  silent = np.asarray(run.state.silent_tokens)
  assert set(np.unique(silent)) <= {0, TOKENS, 2 * TOKENS}
  np.testing.assert_array_equal((silent == 2 * TOKENS).sum(1), second.dead)
  assert 0.08 < gate[:, : D_FF // 2].std() / 0.02 < 0.12  # ℓ 0.1, σ 0.02
  living = silent < 2 * TOKENS
  assert living.any(axis=1).all()
  np.testing.assert_array_equal(gate[living], first_gate[living])
  assert (gate[~living] != first_gate[~living]).all()


def test_what_woke_is_counted_and_left_alone(woken):
  run, [_, (_, before)] = woken
  run.state, state = jax.tree.map(lambda a: a.copy(), (run.state, run.state))
  _, statistics = run.advance()
  run.state = state
  assert (statistics.dead < before.dead).all()
  assert statistics.reinitialized.tolist() == [0, 0]  # not after three steps
  summary = training.summarize(statistics)
  np.testing.assert_allclose(
    summary.dead_fraction, statistics.dead / D_FF, rtol=1e-6
  )
  summary = training.summarize(before)
  np.testing.assert_array_equal(summary.reinitialized, before.reinitialized)


def test_each_step_draws_its_own_numbers(woken):
  run, [_, (gate, _)] = woken
  state = jax.tree.map(lambda a: a.copy(), run.state)
  # As if they had never been woken.
  ffn = run.state.params["layers"]["ffn"]
  ffn["gate"] = ffn["gate"].at[:, : D_FF // 2].set(0)
  run.advance()
  later, _ = run.advance()
  run.state = state
  first, second = gate[:, : D_FF // 2], later[:, : D_FF // 2]
  assert (second != 0).all()
  assert (np.abs(first - second) > 1e-7).mean() > 0.99


def test_a_mesh_changes_no_number(woken, config, corpus):
  run, [_, (gate, expected)] = woken
  split = Run(
    config,
    corpus,
    options=OPTIONS,
    axes={"data": 1, "fsdp": 2, "tensor": 2},
    accumulation=2,
  )
  split.advance()
  split_gate, statistics = split.advance()
  np.testing.assert_array_equal(statistics.dead, expected.dead)
  np.testing.assert_array_equal(
    statistics.reinitialized, expected.reinitialized
  )
  np.testing.assert_array_equal(
    split.state.silent_tokens, run.state.silent_tokens
  )
  np.testing.assert_allclose(split_gate, gate, rtol=1e-6)


def test_a_model_without_dead_neurons(config, single_mesh, tmp_path):
  silu = dataclasses.replace(config, activation="silu", implementation=None)
  options = training.TrainOptions(steps=1000, dead_neurons=OPTIONS)
  with pytest.raises(
    ValueError, match="'silu' leaves no neuron dead: leave dead_neurons"
  ):
    training.check_run(silu, options, mesh=single_mesh, workdir=tmp_path)


@pytest.mark.parametrize(
  ("name", "value", "bound"),
  [
    ("window_tokens", 0, "must be from 1 to 2147483647"),
    ("window_tokens", 2**31, "must be from 1 to 2147483647"),
    ("reinitialize_every_steps", -1, "is negative: 0 is never"),
    ("mixing", 0, "must be above 0 and at most 1"),
    ("mixing", 1.5, "must be above 0 and at most 1"),
    ("std", -0.1, "must be above 0"),
    ("std", math.nan, "must be above 0"),
  ],
)
def test_options_are_checked(name, value, bound):
  with pytest.raises(ValueError, match=f"dead_neurons {name} = .* {bound}"):
    training.DeadNeuronOptions(**dict[str, Any]({name: value}))
