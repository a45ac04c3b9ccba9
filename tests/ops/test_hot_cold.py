"""The split into hot and cold neurons: the op, the order and the choice."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import optimize, stats

from tests.ops.dense_layer import Results, make_case, oracle
from tests.ops.exactness import assert_close
from tests.ops.settings import results
from twell_jax.nn import SparseFFN, TransformerConfig, TransformerLM
from twell_jax.ops import (
  H200,
  DeviceCosts,
  choose_hot_neurons,
  dense_part,
  order_by_rate,
  rate_order,
  sparse_ffn,
)

SIZE = {"tokens": (9,), "d_model": 33, "d_ff": 40}


def results_of(case, **options) -> Results:
  def op(*inputs):
    return sparse_ffn(*inputs, **options)

  return jax.jit(lambda case: results(case, op))(case)


# What holds for one split of the neurons is tested for all implementations in
# test_ffn.py and test_ffn_transforms.py, by the setting "xla-hot".
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("hot_neurons", [1, 39, 40])
@pytest.mark.parametrize("gated", [True, False])
def test_any_split(implementation, hot_neurons, gated, rng):
  case = make_case(rng, "heavy tail", **SIZE).as_dtype(jnp.float32)
  case = case if gated else case.without_up()
  actual = results_of(
    case,
    implementation=implementation,
    hot_neurons=hot_neurons,
    dense_above=1.0,
  )
  assert_close(actual, oracle(case))


def test_the_share_is_that_of_the_cold_neurons(rng):
  """Hot neurons that always fire do not make the others dense."""
  case = make_case(rng, "everything", **SIZE).as_dtype(jnp.float32)
  # 16 of 40 neurons are active, 40 %, and of the cold ones 4 of 28, 14 %.
  case.gate[16:] *= -1
  outputs = {}
  for share in (0.0, 0.2, 1.0):
    for hot_neurons in (0, 12):

      def forward(*inputs, hot_neurons=hot_neurons, dense_above=share):
        return sparse_ffn(
          *inputs, hot_neurons=hot_neurons, dense_above=dense_above
        ).y

      y = jax.jit(forward)(*case[:4])
      outputs[hot_neurons, share] = np.asarray(y)
  # Sums in another order are other float32 numbers.
  for hot_neurons, branch, other in ((0, 0.0, 1.0), (12, 1.0, 0.0)):
    chosen = outputs[hot_neurons, 0.2]
    np.testing.assert_array_equal(chosen, outputs[hot_neurons, branch])
    assert (chosen != outputs[hot_neurons, other]).any()


def test_hot_neurons_are_dense_products(rng, monkeypatch):
  calls = []
  forward = dense_part.forward

  def spied(x, z, up, down):
    calls.append((z.shape, up.shape, down.shape))
    return forward(x, z, up, down)

  monkeypatch.setattr(dense_part, "forward", spied)
  case = make_case(rng, "mixed", **SIZE).as_dtype(jnp.float32)
  op = functools.partial(sparse_ffn, hot_neurons=12, dense_above=1.0)
  jax.eval_shape(op, *case[:4])
  assert calls == [((9, 12), (12, 33), (12, 33))]


@pytest.mark.parametrize(
  "hot_neurons", [-1, 41, 2.0, True, np.int64(2), jnp.int32(2), None]
)
def test_refuses_hot_neurons(hot_neurons):
  matrix = jnp.zeros((40, 4))
  message = "hot_neurons = .* must be an int from 0 to d_ff = 40: it is part"
  with pytest.raises(ValueError, match=message) as error:
    sparse_ffn(jnp.zeros((3, 4)), matrix, None, matrix, hot_neurons=hot_neurons)
  assert "\n" not in str(error.value)


@given(
  rates=hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=2, max_side=4).map(
      lambda shape: (*shape[:-1], 12)
    ),
    # Few values, so that some are equal.
    elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
  ),
  shards=st.sampled_from([1, 2, 3, 12]),
)
def test_rate_order(rates, shards):
  order = np.asarray(rate_order(rates, shards=shards))
  assert order.dtype == np.int32
  slices = order.reshape(-1, shards, 12 // shards)
  for row, dealt in zip(rates.reshape(-1, 12), slices):
    by_rate = sorted(range(12), key=lambda neuron: (-row[neuron], neuron))
    for shard in range(shards):
      np.testing.assert_array_equal(dealt[shard], by_rate[shard::shards])


@given(
  counts=hnp.arrays(np.int32, (2, 6), elements=st.integers(0, 3)),
  shards=st.sampled_from([1, 2, 3]),
)
def test_order_is_undone_by_its_argsort(counts, shards):
  """Counts are rates on another scale, and move like parameters."""
  moved = order_by_rate({"fired": counts}, counts, shards=shards)["fired"]
  back = jnp.argsort(rate_order(counts, shards=shards), axis=-1)
  np.testing.assert_array_equal(
    jnp.take_along_axis(moved, back, axis=-1), counts
  )


def test_order_keeps_the_function(rng):
  case = make_case(rng, "heavy tail", **SIZE).as_dtype(jnp.float32)
  before = oracle(case)
  weights = (case.gate, case.up, case.down)
  gate, up, down = map(
    np.asarray, jax.jit(order_by_rate)(weights, before.fired)
  )
  after = oracle(case._replace(gate=gate, up=up, down=down))
  np.testing.assert_allclose(after.y, before.y, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(after.active, before.active)
  np.testing.assert_array_equal(after.fired, -np.sort(-before.fired))


@pytest.mark.parametrize("gated", [True, False])
def test_order_of_a_module(gated):
  layer = SparseFFN(6, 40, gated=gated, init_std=0.5, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (2, 30, 6))
  before = layer(x)
  rates = before.activity.fired / 60
  nnx.update(layer, order_by_rate(nnx.state(layer, nnx.Param), rates))
  after = layer(x)
  np.testing.assert_allclose(after.y, before.y, rtol=1e-5, atol=1e-5)
  fired = np.asarray(after.activity.fired)
  np.testing.assert_array_equal(fired, -np.sort(-before.activity.fired))
  assert np.ptp(fired) > 0
  assert layer.gate.get_metadata("out_sharding") == ("mlp", "embed")


def sort_ffn(params, rates):
  """The parameters of a TransformerLM, or moments of their shapes, sorted."""
  layers = params["layers"]
  ffn = order_by_rate(layers["ffn"], rates)
  return params | {"layers": layers | {"ffn": ffn}}


def test_order_of_scanned_layers_and_of_moments():
  """Sorting commutes with training, moments of the optimizer included."""
  config = TransformerConfig(
    vocab_size=13,
    d_model=16,
    d_ff=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    init_std=0.3,
    implementation="reference",
  )
  tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 13)
  model = TransformerLM(config, rngs=nnx.Rngs(0))
  graphdef, state = nnx.split(model)
  # A small gradient's rounding must not decide the direction of a step.
  optimizer = optax.adam(1e-2, eps=1e-3)

  @jax.jit
  def step(params, opt_state):
    def loss(params):
      output = nnx.merge(graphdef, params)(tokens)
      activity = output.activity
      return jnp.mean(output.logits**2) + jnp.sum(activity.l1), activity

    (_, activity), grads = jax.value_and_grad(loss, has_aux=True)(params)
    # Optax's schedules mix dtypes.
    with jax.numpy_dtype_promotion("standard"):
      updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, activity.fired

  params = nnx.to_pure_dict(state)
  params, opt_state, _ = step(params, optimizer.init(params))
  later, later_opt_state, fired = step(params, opt_state)
  assert fired.shape == (3, 24)
  rates = fired / tokens.size

  def sort_moments(opt_state):
    moments = {
      name: sort_ffn(optax.tree.get(opt_state, name), rates)
      for name in ("mu", "nu")
    }
    return optax.tree.set(opt_state, **moments)

  actual = step(sort_ffn(params, rates), sort_moments(opt_state))
  expected = (sort_ffn(later, rates), sort_moments(later_opt_state))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    actual[:2],
    expected,
  )
  np.testing.assert_array_equal(actual[2], -np.sort(-fired))


@pytest.mark.parametrize(
  ("shapes", "rates", "shards", "message"),
  [
    ([(6, 2)], (), 1, r"rates have shape \(\) but must be \[d_ff\] or"),
    ([(6, 2)], (1, 1, 6), 1, r"shape \(1, 1, 6\) but must be"),
    ([(6, 2)], (6,), 4, "shards = 4 must divide d_ff = 6: give the size"),
    ([(6, 2)], (6,), 0, "shards = 0 must divide d_ff = 6"),
    ([(6, 2)], (6,), 2.0, "shards = 2.0 must divide d_ff = 6"),
    ([(6, 2), (2, 6)], (6,), 1, r"\[1\] has shape \(2, 6\) but rates \(6,\)"),
    ([(6, 2)], (2, 6), 1, r"shape \(6, 2\) but rates \(2, 6\), which must"),
    ([()], (6,), 1, r"has shape \(\) .* arrays of the feed-forward layer only"),
  ],
)
def test_refuses_to_order(shapes, rates, shards, message):
  params = [np.zeros(shape) for shape in shapes]
  with pytest.raises(ValueError, match=message) as error:
    order_by_rate(params, np.zeros(rates), shards=shards)
  assert "\n" not in str(error.value)


@given(
  rates=hnp.arrays(
    np.float64,
    hnp.array_shapes(max_dims=2, max_side=30),
    elements=st.floats(0, 1),
  ),
  break_even=st.floats(1e-3, 1.5),
  granule=st.sampled_from([1, 4, 128]),
)
def test_choice_costs_least(rates, break_even, granule):
  # Costs of 1 for a gathered row, so that a dense one costs break_even.
  costs = DeviceCosts(dense_flops_per_s=2 / break_even, gather_bytes_per_s=2)
  np.testing.assert_allclose(costs.break_even(2), break_even, rtol=1e-12)
  d_ff = rates.shape[-1]
  layers = -np.sort(-rates.reshape(-1, d_ff), axis=1)

  def cost(hot_neurons):
    return sum(
      costs.seconds(layer, hot_neurons, tokens=3, d_model=5) for layer in layers
    )

  chosen = choose_hot_neurons(rates, break_even=break_even, granule=granule)
  assert type(chosen) is int
  choices = [*range(0, d_ff, granule), d_ff]
  assert chosen in choices
  least = min(map(cost, choices))
  assert cost(chosen) <= least * (1 + 1e-9) + 1e-9


def test_choice_of_extremes():
  def choose(rates):
    return choose_hot_neurons(rates, break_even=0.06)

  # 300 is not a multiple of 128, nor is 0 % or 100 % a tie.
  assert choose(np.full(300, 0.05)) == 0
  assert choose(np.full(300, 0.07)) == 300
  assert choose(np.zeros(300)) == 0
  # The costs of both are equal: the fewer.
  assert choose_hot_neurons(np.full(8, 0.25), break_even=0.25, granule=4) == 0
  # One number for layers of which alone one would have 0 and one 300.
  assert choose(np.stack([np.full(300, 0.0), np.full(300, 0.13)])) == 300
  assert choose(np.stack([np.full(300, 0.0), np.full(300, 0.11)])) == 0


# Gate product excluded, in ms, as a script of its own once printed them, for
# rates drawn from the distributions; here are the distributions' quantiles.
# Mean active neurons: uniform rates, then gamma of shape 1, 0.3 and 0.1.
H200_MS = {
  10: (0.24, 0.24, 0.20, 0.14),
  30: (0.73, 0.53, 0.37, 0.22),
  100: (0.96, 0.79, 0.53, 0.30),
  300: (0.96, 0.90, 0.64, 0.37),
}


@pytest.mark.parametrize("active", H200_MS)
@pytest.mark.parametrize("column", range(4))
def test_model_of_an_h200(active, column):
  d_ff = 5632
  quantiles = (np.arange(d_ff) + 0.5) / d_ff
  shape = (None, 1.0, 0.3, 0.1)[column]
  weights = (
    np.ones(d_ff) if shape is None else stats.gamma.ppf(quantiles, shape)
  )

  def rates(log_scale):
    return -np.sort(-np.minimum(1, np.exp(log_scale) * weights))

  by_rate = rates(
    optimize.brentq(lambda log_scale: rates(log_scale).sum() - active, -60, 60)
  )
  hot_neurons = choose_hot_neurons(by_rate, break_even=H200.break_even(2))
  assert hot_neurons % 128 == 0
  seconds = H200.seconds(by_rate, hot_neurons, tokens=16_384, d_model=2048)
  # 2 %, and half of the last digit.
  expected = H200_MS[active][column]
  np.testing.assert_allclose(1e3 * seconds, expected, rtol=0.02, atol=0.005)


def test_costs():
  assert round(100 * H200.break_even(2), 2) == 0.70
  costs = DeviceCosts(dense_flops_per_s=100.0, gather_bytes_per_s=10.0)
  # 7 tokens × 5 numbers × 2 matrices: 2 operations of 3 hot neurons, and 4
  # bytes of the 1.5 cold neurons that fire.
  seconds = costs.seconds(
    np.array([1.0, 1.0, 1.0, 1.0, 0.5]), 3, tokens=7, d_model=5, itemsize=4
  )
  np.testing.assert_allclose(seconds, 70 * (6 / 100 + 1.5 * 4 / 10))
  with pytest.raises(
    ValueError, match=r"gather_bytes_per_s = 0\.0 must be above"
  ):
    DeviceCosts(dense_flops_per_s=1.0, gather_bytes_per_s=0.0)


@pytest.mark.parametrize(
  ("rates", "options", "message"),
  [
    (np.zeros(()), {}, r"rates have shape \(\) but must be \[d_ff\] or"),
    (np.zeros((2, 0)), {}, r"rates have shape \(2, 0\) but must be"),
    ([0.1, 3.0], {}, "rates reach from 0.1 to 3.0 .* divide `fired`"),
    ([0.1, -0.5], {}, "rates reach from -0.5 to 0.1 but must be shares"),
    ([0.1, np.nan], {}, "rates reach from nan to nan"),
    ([0.1], {"break_even": 0.0}, "break_even = 0.0 must be finite and above"),
    ([0.1], {"break_even": np.inf}, "break_even = inf must be finite"),
    ([0.1], {"granule": 0}, "granule = 0 must be an int of at least 1"),
    ([0.1], {"granule": 1.5}, "granule = 1.5 must be an int"),
  ],
)
def test_refuses_to_choose(rates, options, message):
  arguments: dict[str, Any] = {"break_even": 0.01} | options
  with pytest.raises(ValueError, match=message) as error:
    choose_hot_neurons(rates, **arguments)
  assert "\n" not in str(error.value)
