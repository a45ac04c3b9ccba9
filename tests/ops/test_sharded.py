import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.ops.dense_layer import make_case, oracle
from tests.ops.exactness import assert_close
from tests.ops.settings import results
from twell_jax.ops import (
  order_by_rate,
  sharded,
  sharded_sparse_ffn,
  sparse_ffn,
)

AXES = ("data", "fsdp", "tensor")
SIZE = {"tokens": (8, 3), "d_model": 33, "d_ff": 100}


def mesh_of(*shape):
  return jax.make_mesh(
    shape,
    AXES,
    axis_types=(AxisType.Auto,) * 3,
    devices=jax.devices()[: np.prod(shape)],
  )


def placed(case, mesh):
  """The inputs split as the op splits them."""
  rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
  neurons = NamedSharding(mesh, PartitionSpec("tensor"))
  shardings = type(case)(rows, neurons, neurons, neurons, rows)
  return type(case)(
    *(
      None if array is None else jax.device_put(array, sharding)
      for array, sharding in zip(case, shardings)
    )
  )


def results_on(mesh, case, **options):
  def op(*inputs):
    return sharded_sparse_ffn(*inputs, mesh=mesh, **options)

  return jax.jit(lambda case: results(case, op))(placed(case, mesh))


@pytest.mark.parametrize(
  ("shape", "gated", "share"),
  [
    ((4, 1, 1), True, 0.1),
    ((1, 4, 1), False, 0.06),
    ((1, 1, 4), True, 0.1),
    ((2, 1, 2), True, 1.0),
    ((1, 1, 4), False, 1.0),
  ],
)
def test_same_as_on_one_device(shape, gated, share, rng):
  mesh = mesh_of(*shape)
  case = make_case(rng, "heavy tail", **SIZE).as_dtype(jnp.float32)
  case = case if gated else case.without_up()
  actual = results_on(mesh, case, dense_above=share)
  assert_close(actual, oracle(case))
  split = {
    "y": PartitionSpec(("data", "fsdp")),
    "active": PartitionSpec(("data", "fsdp")),
    "fired": PartitionSpec("tensor"),
    "l1": PartitionSpec(),
  }
  for name, spec in split.items():
    array = getattr(actual, name)
    assert array.sharding.is_equivalent_to(
      NamedSharding(mesh, spec), array.ndim
    ), name


@pytest.mark.parametrize(
  ("shape", "hot_neurons", "hot_of_a_slice"),
  [((2, 1, 2), 40, 20), ((1, 1, 4), 100, 25)],
)
def test_hot_neurons_are_the_first_of_each_slice(
  shape, hot_neurons, hot_of_a_slice, rng, monkeypatch
):
  calls = []

  def spied(*inputs, **options):
    calls.append(options["hot_neurons"])
    return sparse_ffn(*inputs, **options)

  monkeypatch.setattr(sharded, "sparse_ffn", spied)
  mesh = mesh_of(*shape)
  case = make_case(rng, "heavy tail", **SIZE).as_dtype(jnp.float32)
  # The order that gives each slice its share of the hottest.
  rates = oracle(case).fired / 24
  weights = order_by_rate(
    (case.gate, case.up, case.down), rates, shards=shape[-1]
  )
  gate, up, down = map(np.asarray, weights)
  case = case._replace(gate=gate, up=up, down=down)
  expected = oracle(case)
  assert_close(
    results_on(mesh, case, hot_neurons=hot_neurons, dense_above=1.0), expected
  )
  assert set(calls) == {hot_of_a_slice}
  slices = expected.fired.reshape(shape[-1], -1)
  cold = slices[:, hot_of_a_slice:]
  assert slices[:, :hot_of_a_slice].min() >= cold.max(initial=0)


def test_inside_a_shard_map(rng):
  """The op on each device's own tokens, with weights that all share."""
  mesh = mesh_of(4, 1, 1)
  case = make_case(rng, "heavy tail", **SIZE).as_dtype(jnp.float32)
  inputs = case[:4]
  rows = PartitionSpec("data")

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(rows, PartitionSpec(), PartitionSpec(), PartitionSpec()),
    out_specs=rows,
    check_vma=False,
  )
  def local(*inputs):
    return sparse_ffn(*inputs).y

  def loss(f, x, *weights):
    return jnp.vdot(f(x, *weights), case.dy)

  gradients = jax.jit(
    jax.grad(functools.partial(loss, local), argnums=(0, 1, 2, 3))
  )(*inputs)
  expected = jax.jit(
    jax.grad(
      functools.partial(loss, lambda *inputs: sparse_ffn(*inputs).y),
      argnums=(0, 1, 2, 3),
    )
  )(*inputs)
  for actual, exact in zip(gradients, expected):
    exact = np.asarray(exact)
    np.testing.assert_allclose(
      actual, exact, rtol=0, atol=1e-5 * np.abs(exact).max()
    )


def test_a_non_finite_token_on_a_mesh(rng):
  case = make_case(rng, "mixed", **SIZE).as_dtype(jnp.float32)
  mesh = mesh_of(2, 1, 2)
  f = jax.jit(lambda *inputs: sharded_sparse_ffn(*inputs, mesh=mesh).y)
  clean = np.asarray(f(*case[:4]))
  x = case.x.copy()
  x[5, 1, 7] = np.nan
  y = np.array(f(x, *case[1:4]))
  assert np.isnan(y[5, 1]).all()
  y[5, 1] = clean[5, 1]
  np.testing.assert_array_equal(y, clean)


@pytest.mark.parametrize(
  ("tokens", "d_ff", "options", "message"),
  [
    ((8,), 8, {"token_axes": ("rows",)}, "no axis 'rows' in the mesh, which"),
    ((8,), 8, {"token_axes": "data"}, r"must be a tuple .* write \('data',\)"),
    ((8,), 8, {"neuron_axis": "model"}, "'model' .* name its axes in"),
    ((7, 8), 8, {}, r"x.shape\[0\] = 7 must be divisible by 2"),
    ((8,), 7, {}, "d_ff = 7 must be divisible by 2"),
    ((8,), 8, {"implementation": "cuda"}, "implementation='cuda' is unknown"),
    ((8,), 8, {"hot_neurons": 3}, "hot_neurons = 3 must be divisible by 2"),
    ((8,), 8, {"hot_neurons": 9}, "hot_neurons = 9 must be .* to d_ff = 8"),
  ],
)
def test_refuses(tokens, d_ff, options, message):
  matrix = jnp.zeros((d_ff, 4))
  with pytest.raises(ValueError, match=message) as error:
    sharded_sparse_ffn(
      jnp.zeros((*tokens, 4)),
      matrix,
      matrix,
      matrix,
      mesh=mesh_of(2, 1, 2),
      **options,
    )
  assert "\n" not in str(error.value)
