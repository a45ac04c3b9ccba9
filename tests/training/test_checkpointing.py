import dataclasses

import jax
import numpy as np
import pytest

from twell_jax import training
from twell_jax.nn import Partitioning


@pytest.fixture
def optimizer():
  options = training.OptimizerOptions(warmup_steps=0)
  return training.make_optimizer(options, steps=10)


def abstract_on(mesh, config, optimizer):
  model = training.abstract_model(config, Partitioning(mesh))
  return training.abstract_state(model, optimizer)


def state_on(mesh, config, optimizer):
  model = training.abstract_model(config, Partitioning(mesh))
  return training.initial_state(model, optimizer, seed=0)


def save(checkpoints, state, batches, *, step, loss=None, config=None):
  checkpoints.save(
    state, batches, step=step, config=config or {}, held_out_loss=loss
  )


def host(state):
  state = state._replace(rng=jax.random.key_data(state.rng))
  return jax.device_get(state)


def test_round_trip_onto_another_mesh(
  tmp_path, config, optimizer, corpus, single_mesh
):
  state = state_on(single_mesh, config, optimizer)
  batches = corpus.batches()
  for _ in range(3):
    next(batches)
  with training.Checkpoints(tmp_path) as checkpoints:
    run = {"model": {"d_model": 16}, "seed": 0}
    save(checkpoints, state, batches, step=3, config=run)
  following = next(batches)

  mesh = training.make_mesh(data=1, fsdp=2, tensor=2)
  abstract = abstract_on(mesh, config, optimizer)
  other = corpus.batches()
  with training.Checkpoints(tmp_path) as checkpoints:
    restored = checkpoints.restore(abstract, other)
    assert checkpoints.config() == run
  assert restored.config == run
  jax.tree.map(np.testing.assert_array_equal, host(state), host(restored.state))
  places = jax.tree.map(
    lambda leaf, wanted: leaf.sharding == wanted.sharding,
    restored.state,
    abstract,
  )
  assert all(jax.tree.leaves(places))
  jax.tree.map(np.testing.assert_array_equal, next(other), following)


def test_a_donated_state_is_saved_as_it_was(
  tmp_path, config, optimizer, corpus, single_mesh
):
  state = state_on(single_mesh, config, optimizer)
  abstract = abstract_on(single_mesh, config, optimizer)
  expected = host(state)
  spoil = jax.jit(
    lambda params: jax.tree.map(lambda p: p + 1, params), donate_argnums=0
  )
  with training.Checkpoints(tmp_path) as checkpoints:
    save(checkpoints, state, corpus.batches(), step=1)
    params = state.params
    for _ in range(5):
      params = spoil(params)
    checkpoints.wait()
    restored = checkpoints.restore(abstract).state
  jax.tree.map(np.testing.assert_array_equal, expected, host(restored))


def test_a_checkpoint_from_before_silent_tokens_were_counted(
  tmp_path, config, optimizer, corpus, single_mesh, caplog
):
  state = state_on(single_mesh, config, optimizer)
  fields = state._asdict()
  del fields["silent_tokens"], fields["l1_control"]
  with training.Checkpoints(tmp_path) as checkpoints:
    save(checkpoints, fields, corpus.batches(), step=1)
    checkpoints.wait()
    mesh = training.make_mesh(data=1, fsdp=2, tensor=2)
    abstract = abstract_on(mesh, config, optimizer)
    with caplog.at_level("WARNING"):
      restored = checkpoints.restore(abstract).state
  jax.tree.map(np.testing.assert_array_equal, host(state), host(restored))
  places = jax.tree.map(
    lambda a, b: a.sharding == b.sharding, restored, abstract
  )
  assert all(jax.tree.leaves(places))
  assert "step 1 has no silent_tokens, l1_control: begun anew" in caplog.text


def test_the_latest_and_the_best_are_kept(
  tmp_path, config, optimizer, corpus, single_mesh
):
  state = state_on(single_mesh, config, optimizer)
  abstract = abstract_on(single_mesh, config, optimizer)
  batches = corpus.batches()
  with training.Checkpoints(tmp_path, keep=2) as checkpoints:
    for step, loss in enumerate([3.0, 1.0, 2.0, None], start=1):
      save(checkpoints, state, batches, step=step, loss=loss)
    checkpoints.wait()
    assert checkpoints.steps == [2, 3, 4]
  # Also when the losses come from an earlier process.
  with training.Checkpoints(tmp_path, keep=2) as checkpoints:
    save(checkpoints, state, batches, step=5, loss=4.0)
    checkpoints.wait()
    assert checkpoints.steps == [2, 4, 5] == training.saved_steps(tmp_path)
    assert checkpoints.best_step == 2
    checkpoints.restore(abstract, step=2)
    with pytest.raises(ValueError, match=r"no checkpoint of step 3 .* 2, 4, 5"):
      checkpoints.restore(abstract, step=3)


def test_nothing_to_restore(tmp_path, config, optimizer, single_mesh):
  abstract = abstract_on(single_mesh, config, optimizer)
  assert training.saved_steps(tmp_path / "none") == []
  with (
    training.Checkpoints(tmp_path) as checkpoints,
    pytest.raises(ValueError, match="no checkpoint in"),
  ):
    checkpoints.restore(abstract)


def test_parameters_of_another_shape(
  tmp_path, config, optimizer, corpus, single_mesh
):
  state = state_on(single_mesh, config, optimizer)
  with training.Checkpoints(tmp_path) as checkpoints:
    save(checkpoints, state, corpus.batches(), step=1)

  def error_for(**changes):
    other = dataclasses.replace(config, **changes)
    abstract = abstract_on(single_mesh, other, optimizer)
    batches = corpus.batches()
    position = batches.get_state()
    with (
      training.Checkpoints(tmp_path) as checkpoints,
      pytest.raises(ValueError) as error,  # noqa: PT011 (the caller compares)
    ):
      checkpoints.restore(abstract, batches)
    assert batches.get_state() == position
    assert "\n" not in str(error.value)
    return str(error.value)

  message = error_for(d_ff=32)
  assert "layers/ffn/down of shape (2, 24, 16)" in message
  assert "the model has (2, 32, 16)" in message
  assert "layers/ffn/up of shape (2, 24, 16)" in error_for(gated=False)
  message = error_for(tie_embeddings=False)
  assert "head of shape none and the model has (12, 16)" in message


def test_keep_at_least_one(tmp_path):
  with pytest.raises(ValueError, match="keep = 0 must be at least 1"):
    training.Checkpoints(tmp_path, keep=0)


def test_config_differences():
  saved = {"seed": 0, "model": {"d_ff": 24, "gated": True}, "corpus": ["a"]}
  current = {"seed": 0, "model": {"d_ff": 32}, "corpus": ("a",), "new": 1}
  assert training.config_differences(saved, current) == [
    "model.d_ff: 24 -> 32",
    "model.gated: True -> None",
    "new: None -> 1",
  ]
  assert training.config_differences(saved, saved) == []
