"""The Mosaic implementation, interpreted."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import tuning
from pallas_kernels.target import H200
from tests.ops.dense_layer import ACTIVITIES, Case, oracle
from tests.ops.exactness import (
  FLOATING,
  assert_no_less_exact_than_dense,
  assert_no_worse,
)
from tests.ops.mosaic_cases import bf16_case, op_for, shapes
from tests.ops.settings import Setting, results, results_of, results_of_plain
from twell_jax.formats import Capacities
from twell_jax.ops import (
  dense_tokens,
  gate_pack,
  sharded_sparse_ffn,
  sparse_ffn,
)
from twell_jax.ops.mosaic_sizes import default_ell_width


@pytest.mark.parametrize(
  ("gated", "hot_share", "capacities"),
  [
    pytest.param(True, 0.0, None, marks=pytest.mark.slow),
    pytest.param(False, 0.0, Capacities(8, 1), marks=pytest.mark.slow),
    pytest.param(True, 0.4, Capacities(30, 6), marks=pytest.mark.slow),
    (False, 0.4, Capacities(1, 0)),
  ],
)
@pytest.mark.usefixtures("whole_rows")
def test_no_less_exact_than_dense(
  gated, hot_share, capacities, rng, monkeypatch
):
  """Values and gradients; most activities overflow some or all tokens."""
  monkeypatch.setattr(dense_tokens, "BLOCKS", (4, 3))
  cases = [bf16_case(rng, activity) for activity in ACTIVITIES]
  if not gated:
    cases = [case.without_up() for case in cases]
  setting = Setting("mosaic", 1.0, hot_share, capacities)
  assert_no_less_exact_than_dense(cases, setting, jnp.bfloat16)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("cold", [16, 160])
@pytest.mark.usefixtures("whole_rows")
def test_cold_neurons_that_cancel_the_hot_ones(cold, gated, rng):
  """So that the rounding of either sum would be much of what remains.

  160 active neurons are more than an ELL row has.
  """
  hot, tokens, d_model = 896, 3, 256
  d_ff = hot + cold
  # Every h is exact, so that only sums are rounded.
  x = np.zeros((tokens, d_model))
  x[:, 0] = [1, 2, 4]
  gate = np.zeros((d_ff, d_model))
  gate[:, 0] = 1
  down = 1 + rng.normal(size=(d_ff, d_model)) / 10
  down[hot:] *= -hot / cold
  up = gate if gated else None
  case = Case(x, gate, up, down, np.ones_like(x)).as_dtype(jnp.bfloat16)
  y, activity = jax.jit(op_for(hot))(*case[:4])
  assert activity.overflowed == (tokens if cold == 160 else 0)
  exact, dense = oracle(case).y, results_of_plain(case).y
  assert_no_worse("y", [(exact, y, dense)], jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_rows_in_segments(rng):
  """As the config has it for a few tokens: their parts are added."""
  cases = [bf16_case(rng, activity, tokens=(3,)) for activity in ACTIVITIES]
  assert_no_less_exact_than_dense(cases, Setting("mosaic", 1.0), jnp.bfloat16)


def test_all_neurons_hot(rng):
  """Is the dense layer, and runs no kernel."""
  case = bf16_case(rng, "mixed")
  with plgpu.force_gpu_interpret_mode():
    actual = jax.jit(op_for(100))(*case[:4])
    expected = jax.jit(sparse_ffn, static_argnames="implementation")(
      *case[:4], implementation="reference"
    )
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
  ("tokens", "d_model", "d_ff"),
  [pytest.param((), 256, 128, marks=pytest.mark.slow), ((2, 3), 1, 1)],
)
@pytest.mark.usefixtures("whole_rows")
def test_sizes(tokens, d_model, d_ff, rng):
  cases = [
    bf16_case(rng, activity, tokens=tokens, d_model=d_model, d_ff=d_ff)
    for activity in ACTIVITIES
  ]
  assert_no_less_exact_than_dense(cases, Setting("mosaic", 1.0), jnp.bfloat16)


def inputs_with_pattern(rng, pattern):
  """Inputs of which neuron n is active at token m where pattern[m, n] is."""
  tokens, d_ff = pattern.shape
  x = np.eye(tokens)
  gate = np.where(pattern.T, 1, -1) * rng.integers(1, 5, (d_ff, tokens))
  up, down = rng.normal(size=(2, d_ff, tokens))
  return [jnp.asarray(a, jnp.bfloat16) for a in (x, gate, up, down)]


def edge_pattern(rng, tokens, d_ff, config):
  """Tokens with 0, 1, S, S + 1 and all neurons active in a tile, and more."""
  width, slots = config.tile_width, config.slots
  pattern = np.zeros((tokens, d_ff), bool)
  for token, count in enumerate((0, 1, slots, slots + 1, width)):
    tile = width * (token % (d_ff // width))
    pattern[token, tile : tile + count] = True
  # The row's own edge, spread so that no tile overflows.
  row = default_ell_width(d_ff)
  for token, count in ((5, row), (6, row + 1)):
    pattern[token, rng.permutation(d_ff)[:count]] = True
  pattern[7:] = rng.random(pattern[7:].shape) < 0.02
  return pattern


@pytest.mark.usefixtures("whole_rows")
def test_tokens_that_overflow(rng, monkeypatch):
  """Computed by dense products, three at a time."""
  monkeypatch.setattr(dense_tokens, "BLOCKS", (3,))
  tokens, d_ff = 16, 1024
  config = tuning.for_gate_pack(H200, tokens, d_ff, tokens)
  pattern = edge_pattern(rng, tokens, d_ff, config)
  x, gate, up, down = inputs_with_pattern(rng, pattern)
  op = jax.jit(op_for(0))
  exact = reference_in_float64(x, gate, up, down)
  # Nobody, one token of one block, several blocks, and everybody.
  per_tile = pattern.reshape(tokens, -1, config.tile_width).sum(2)
  overflows = (per_tile > config.slots).any(1)
  overflows |= pattern.sum(1) > default_ell_width(d_ff)
  for chosen in (
    np.flatnonzero(~overflows),
    np.append(np.flatnonzero(~overflows), 3),
    np.arange(tokens),
    np.resize(np.flatnonzero(overflows), tokens),
  ):
    chosen = np.resize(chosen, tokens)
    y, activity = op(x[chosen], gate, up, down)
    assert activity.overflowed == overflows[chosen].sum()
    np.testing.assert_array_equal(activity.active, pattern[chosen].sum(1))
    np.testing.assert_array_equal(activity.fired, pattern[chosen].sum(0))
    scale = np.abs(exact).max()
    np.testing.assert_allclose(
      y.astype(jnp.float32), exact[chosen], rtol=0, atol=2**-7 * scale
    )


def reference_in_float64(x, gate, up, down):
  x, gate, up, down = (np.asarray(a, np.float64) for a in (x, gate, up, down))
  return (np.maximum(x @ gate.T, 0) * (x @ up.T)) @ down


# The interpreter's own products warn of the infinities in theirs.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
  ("bad", "hot_neurons"),
  [
    pytest.param(np.nan, 0, marks=pytest.mark.slow),
    (np.inf, 0),
    (-np.inf, 40),
  ],
)
@pytest.mark.usefixtures("whole_rows")
def test_a_non_finite_token(bad, hot_neurons, rng):
  """Its gates at the neurons that only pad d_ff are NaN too."""
  for gated in (True, False):
    case = bf16_case(rng, "heavy tail")
    case = case if gated else case.without_up()
    x = case.x.copy()
    x[4, 5] = bad
    inputs = x, case.gate, case.up, case.down
    y, activity = jax.jit(op_for(hot_neurons))(*inputs)
    expected = sparse_ffn(*inputs, implementation="reference")
    np.testing.assert_array_equal(activity.active, expected.activity.active)
    np.testing.assert_array_equal(activity.fired, expected.activity.fired)
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(expected.y))
    assert np.isfinite(y[np.arange(13) != 4]).all()
    assert not (gated and np.isfinite(y[4]).any())


@pytest.mark.slow
@pytest.mark.parametrize("hot_neurons", [0, 40])
@pytest.mark.usefixtures("whole_rows")
def test_the_switch_to_dense_products(hot_neurons, rng):
  """At the activity up to which rows are gathered, and just above it."""
  tokens, d_ff, active = 13, 100, 5
  pattern = np.zeros((tokens, d_ff), bool)
  for row in pattern:
    row[rng.integers(hot_neurons, d_ff - active) + np.arange(active)] = True
  x, gate, up, down = map(np.asarray, inputs_with_pattern(rng, pattern))
  dy = rng.normal(size=(tokens, tokens)).astype(jnp.bfloat16)
  case = Case(x, gate, up, down, dy)
  expected, plain = oracle(case), results_of_plain(case)
  entries = tokens * (d_ff - hot_neurons)
  for dense_above, computed_densely in (
    ((tokens * active + 0.5) / entries, 0),
    ((tokens * active - 0.5) / entries, tokens),
  ):
    op = op_for(hot_neurons, dense_above=dense_above)

    def run(case, op=op):
      return results(case, op), op(*case[:4]).activity

    actual, activity = jax.jit(run)(case)
    assert activity.overflowed == 0
    assert activity.dense_tokens == computed_densely
    np.testing.assert_array_equal(actual.active, expected.active)
    np.testing.assert_array_equal(actual.fired, expected.fired)
    for name in FLOATING:
      triple = [getattr(result, name) for result in (expected, actual, plain)]
      assert_no_worse(name, [triple], jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.usefixtures("whole_rows")
def test_two_calls_give_the_same_bits(rng):
  case = bf16_case(rng, "heavy tail")
  op = results_of(Setting("mosaic", 1.0))
  jax.tree.map(np.testing.assert_array_equal, op(case), op(case))


@pytest.mark.parametrize(
  ("shape", "hot_neurons"),
  [
    pytest.param((4, 1), 0, marks=pytest.mark.slow),
    pytest.param((1, 4), 0, marks=pytest.mark.slow),
    pytest.param((2, 2), 0, marks=pytest.mark.slow),
    ((2, 2), 40),
  ],
)
@pytest.mark.usefixtures("whole_rows")
def test_on_a_mesh(shape, hot_neurons, rng):
  mesh = jax.make_mesh(
    shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
  )
  case = bf16_case(rng, "heavy tail", tokens=(4, 3))
  op = functools.partial(
    sharded_sparse_ffn,
    mesh=mesh,
    token_axes=("data",),
    hot_neurons=hot_neurons,
    dense_above=1.0,
    implementation="mosaic",
  )
  actual = jax.jit(lambda case: results(case, op))(case)
  expected = oracle(case)
  np.testing.assert_array_equal(actual.active, expected.active)
  np.testing.assert_array_equal(actual.fired, expected.fired)
  for name in ("y", "l1", "dx", "dgate", "dup", "ddown"):
    exact = getattr(expected, name)
    np.testing.assert_allclose(
      np.asarray(getattr(actual, name), np.float64),
      exact,
      rtol=0,
      atol=2**-6 * np.abs(exact).max(),
      err_msg=name,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("whole_rows")
def test_under_transforms(rng):
  """vmap over tokens and scan over layers: values and gradients.

  remat cannot be interpreted; it is compiled below.
  """
  case = bf16_case(rng, "heavy tail", tokens=(2, 3), d_model=256)

  def loss(x, gate, up, down, op):
    # Every layer has the integers of x, for which signs do not depend on the
    # order of sums.
    def layer(total, weights):
      y = jax.vmap(lambda x: op(x, *weights).y)(x).astype(jnp.float32)
      return total + jnp.sum(y * case.dy.astype(np.float32)), y

    weights = jax.tree.map(lambda w: jnp.stack([w, w / 2]), (gate, up, down))
    return jax.lax.scan(layer, jnp.float32(0), weights)

  def results_by(implementation):
    op = functools.partial(
      sparse_ffn, implementation=implementation, dense_above=1.0
    )
    f = jax.grad(functools.partial(loss, op=op), (1, 2, 3), has_aux=True)
    return jax.jit(f)(*map(jnp.asarray, case[:4]))

  actual, expected = results_by("mosaic"), results_by("reference")
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      np.asarray(a, np.float64),
      np.asarray(b, np.float64),
      rtol=0,
      atol=2**-6 * np.abs(np.asarray(b, np.float64)).max(),
    ),
    actual,
    expected,
  )


def test_refuses_what_it_cannot_do():
  for op in (
    lambda x: sparse_ffn(x, x, x, x, implementation="mosaic"),
    lambda x: gate_pack(x, x, implementation="mosaic"),
  ):
    with pytest.raises(NotImplementedError, match=r"float32: .*'xla'"):
      op(jnp.ones((8, 4)))
    with pytest.raises(NotImplementedError, match=r"'cpu'.*'xla'"):
      op(jnp.ones((8, 4), jnp.bfloat16))


def test_refuses_rows_that_are_too_wide():
  x = jnp.ones((1, 8193), jnp.bfloat16)
  with pytest.raises(NotImplementedError, match=r"8192 .* 8193: use .*'xla'"):
    sparse_ffn(x, x, x, x, implementation="mosaic")


def test_refuses_more_slots_than_a_work_list_can_number():
  with pytest.raises(ValueError, match=r"8388608 tokens × 128 slots .* fewer"):
    jax.eval_shape(op_for(0), *shapes(2**23, 256, 512))
