import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from twell_jax import training
from twell_jax.nn import Partitioning


def test_the_rest_of_the_devices():
  mesh = training.make_mesh(tensor=2)
  assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 2}
  mesh = training.make_mesh(data=1, fsdp=-1)
  assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 1}


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"tensor": 3}, "tensor = 3 does not divide 4 devices"),
    ({"data": 2}, "data = 2, fsdp = 1, tensor = 1 does not divide 4 devices"),
    ({"fsdp": 8}, "fsdp = 8, tensor = 1 does not divide 4 devices"),
    ({"fsdp": -1}, "data and fsdp are both -1"),
    ({"fsdp": 0}, "mesh axis fsdp = 0"),
  ],
)
def test_meshes_that_do_not_fit(sizes, message):
  with pytest.raises(ValueError, match=message):
    training.make_mesh(**sizes)


def test_state_lies_where_the_rules_say(config):
  mesh = training.make_mesh(fsdp=2, tensor=2)
  model = training.abstract_model(config, Partitioning(mesh))
  options = training.OptimizerOptions(warmup_steps=0)
  optimizer = training.make_optimizer(options, steps=5)
  state = training.initial_state(model, optimizer, seed=0)
  gate = state.params["layers"]["ffn"]["gate"]
  assert gate.sharding.spec == PartitionSpec(None, "tensor", "fsdp")
  assert gate.addressable_shards[0].data.shape == (2, 12, 8)
  query = state.params["layers"]["attention"]["query"]
  assert query.sharding.spec == PartitionSpec(None, "fsdp", "tensor", None)
  adam = state.opt_state[1][0]
  for moment in (adam.mu, adam.nu):
    places = jax.tree.map(
      lambda m, p: m.sharding == p.sharding, moment, state.params
    )
    assert all(jax.tree.leaves(places))
  assert adam.count.sharding.is_fully_replicated
  abstract = training.abstract_state(model, optimizer)
  same = jax.tree.map(
    lambda a, b: (
      (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    ),
    state,
    abstract,
  )
  assert all(jax.tree.leaves(same))


def test_initial_parameters_do_not_depend_on_the_mesh(config, single_mesh):
  options = training.OptimizerOptions(warmup_steps=0)
  optimizer = training.make_optimizer(options, steps=5)

  def params(mesh, seed):
    model = training.abstract_model(config, Partitioning(mesh))
    return training.initial_state(model, optimizer, seed=seed).params

  here, there = params(single_mesh, 3), params(training.make_mesh(tensor=2), 3)
  # The same draws; a compiler may round their transformation differently.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), here, there
  )
  other = params(single_mesh, 4)
  assert not np.array_equal(here["embedding"], other["embedding"])


def test_a_dimension_that_an_axis_does_not_divide(config):
  mesh = training.make_mesh(data=1, tensor=4)
  with pytest.raises(ValueError, match=r"key: kv_heads = 2 .* tensor = 4"):
    training.abstract_model(config, Partitioning(mesh))
  many = dataclasses.replace(config, num_kv_heads=4, d_ff=30)
  with pytest.raises(ValueError, match="mlp = 30 is not divisible"):
    training.abstract_model(many, Partitioning(mesh))


def test_batch_sizes():
  mesh = training.make_mesh()
  training.check_batch_size(8, mesh=mesh, accumulation_steps=2)
  with pytest.raises(ValueError, match=r"batch of 6 sequences .* times 4"):
    training.check_batch_size(6, mesh=mesh)
  with pytest.raises(ValueError, match="accumulation_steps = 3 times 4"):
    training.check_batch_size(8, mesh=mesh, accumulation_steps=3)
  with pytest.raises(ValueError, match="batch of 2 sequences"):
    training.place_batch(
      {"inputs": np.zeros((2, 3), np.int32)}, Partitioning(mesh)
    )
