"""The op under transforms of jax, its auxiliary outputs and its errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops import dense_layer
from tests.ops.dense_layer import (
  ACTIVITIES,
  GRADIENTS,
  L1_WEIGHT,
  Results,
  make_case,
  oracle,
)
from tests.ops.exactness import assert_close
from tests.ops.settings import results
from twell_jax.ops import sparse_ffn


def test_vmap(setting, rng):
  size = {"tokens": (7,), "d_model": 33, "d_ff": 100}
  cases = [
    make_case(rng, activity, **size).as_dtype(jnp.float32)
    for activity in ("heavy tail", "everything", "nothing")
  ]
  stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *cases)

  @jax.jit
  def both(stacked):
    everything = jax.vmap(lambda case: results(case, setting))(stacked)
    first = jax.tree.map(lambda array: array[0], stacked)
    weights = (first.gate, first.up, first.down)
    return everything, jax.vmap(lambda x: setting(x, *weights).y)(stacked.x)

  everything, tokens = both(stacked)
  for index, case in enumerate(cases):
    assert_close(Results(*(array[index] for array in everything)), oracle(case))
    exact = oracle(cases[0]._replace(x=case.x)).y
    atol = 1e-5 * np.abs(exact).max()
    np.testing.assert_allclose(tokens[index], exact, rtol=0, atol=atol)


def two_layers(x, layers, layer, wrap):
  """A loss of two layers in a chain, scanned, and its gradients."""

  def loss(x, layers):
    def step(x, weights):
      y, l1 = layer(x, *weights)
      return x + y, l1

    x, l1 = jax.lax.scan(wrap(step), x, layers)
    return jnp.sum(x**2) / 100 + jnp.mean(l1).astype(x.dtype)

  return jax.value_and_grad(loss, (0, 1))(x, layers)


def two_plain_layers(x, layers):
  return two_layers(x, layers, dense_layer.plain, lambda step: step)


@pytest.mark.parametrize("wrap", [lambda step: step, jax.checkpoint])
def test_scan_over_layers(setting, wrap, rng):
  """In float64, where rounding decides no sign."""

  def layer(x, *weights):
    y, activity = setting(x, *weights)
    return y, activity.l1

  x = rng.normal(size=(7, 33))
  layers = tuple(rng.normal(size=(2, 100, 33)) / 6 for _ in range(3))
  with jax.enable_x64(True):
    exact = jax.jit(two_plain_layers)(x, layers)
    actual = jax.jit(lambda x, layers: two_layers(x, layers, layer, wrap))(
      x, layers
    )
  # l1 is float32, as is its cotangent.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=1e-6 * np.abs(b).max()
    ),
    actual,
    exact,
  )


def test_auxiliary_outputs(rng):
  """The activity is an auxiliary output of a loss, and l1 may be alone."""
  case = make_case(rng, "heavy tail", tokens=(7,), d_model=33, d_ff=100)
  case = case.as_dtype(jnp.float32)
  inputs = (case.x, case.gate, case.up, case.down)

  @jax.jit
  def penalty(*inputs):
    def loss(*inputs):
      activity = sparse_ffn(*inputs).activity
      return L1_WEIGHT * activity.l1, activity

    return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*inputs)

  (value, activity), gradients = penalty(*inputs)
  expected = oracle(case._replace(dy=np.zeros_like(case.dy)))
  np.testing.assert_allclose(value, L1_WEIGHT * expected.l1, rtol=1e-5)
  np.testing.assert_array_equal(activity.active, expected.active)
  np.testing.assert_array_equal(activity.fired, expected.fired)
  assert activity.overflowed.dtype == jnp.int32
  assert activity.overflowed == 0
  for name, actual in zip(GRADIENTS, gradients):
    exact = getattr(expected, name)
    np.testing.assert_allclose(
      actual, exact, rtol=0, atol=1e-5 * np.abs(exact).max(), err_msg=name
    )


def test_traced_once_for_all_inputs_of_a_shape(rng):
  traces: list[None] = []

  @jax.jit
  def f(*inputs):
    traces.append(None)
    return sparse_ffn(*inputs)

  for activity in ACTIVITIES:
    case = make_case(rng, activity, tokens=(2, 3), d_model=4, d_ff=5)
    case = case.as_dtype(jnp.float32)
    f(case.x, case.gate, case.up, case.down)
  assert len(traces) == 1
  # Another shape of the same number of tokens is another trace, no more.
  f(case.x.reshape(6, 4), case.gate, case.up, case.down)
  assert len(traces) == 2


def test_no_forward_mode():
  x, weights = jnp.ones((2, 3)), [jnp.ones((4, 3))] * 3

  @jax.jit
  def derivative(x):
    return jax.jvp(lambda x: sparse_ffn(x, *weights).y, (x,), (x,))

  with pytest.raises(TypeError, match="custom_vjp"):
    derivative(x)


def test_default_implementation(rng):
  case = make_case(rng, "mixed", tokens=(3,), d_model=4, d_ff=5)
  inputs = case.as_dtype(jnp.float32)[:4]
  default = jax.jit(sparse_ffn)(*inputs)
  named = jax.jit(sparse_ffn, static_argnames="implementation")(
    *inputs, implementation="xla"
  )
  jax.tree.map(np.testing.assert_array_equal, default, named)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"implementation": "cuda"},
      r"implementation='cuda' is unknown: use one of \['mosaic', 'reference',",
    ),
    ({"x": np.zeros(())}, r"x \(\) and gate \(5, 4\) must be \[..., d_model\]"),
    ({"x": np.zeros((3, 0))}, r"x \(3, 0\) and .* sizes of at least 1"),
    ({"gate": np.zeros((0, 4))}, r"gate \(0, 4\) must be .* at least 1"),
    ({"gate": np.zeros(4)}, r"gate \(4,\) must be .* \[d_ff, d_model\]"),
    (
      {"x": np.zeros((3, 6))},
      r"gate has shape \(5, 4\) but must be \[d_ff, d_model\] = \(5, 6\)",
    ),
    (
      {"up": np.zeros((4, 5))},
      r"up has shape \(4, 5\) but .* = \(5, 4\): .* transpose kernels",
    ),
    ({"down": np.zeros((5, 3))}, r"down has shape \(5, 3\) but .* = \(5, 4\)"),
    (
      {"down": jnp.zeros((5, 4), jnp.bfloat16)},
      "down is bfloat16 and x is float32: cast them to one dtype",
    ),
    (
      {"up": jnp.zeros((5, 4), jnp.float16)},
      "up is float16 and x is float32: cast",
    ),
    (
      {name: jnp.zeros((5, 4), jnp.int32) for name in ("x", "gate", "down")}
      | {"up": None},
      "x is int32 but must be one of bfloat16, float16, float32, float64",
    ),
  ],
)
def test_refuses(changes, message):
  matrix = jnp.zeros((5, 4))
  arguments: dict[str, Any] = {"x": jnp.zeros((3, 4))}
  arguments |= dict.fromkeys(("gate", "up", "down"), matrix)
  for name, value in changes.items():
    is_array = isinstance(value, np.ndarray)
    arguments[name] = jnp.asarray(value) if is_array else value
  with pytest.raises(ValueError, match=message) as error:
    sparse_ffn(**arguments)
  assert "\n" not in str(error.value)


def test_numpy_arrays(setting, rng):
  arrays = [rng.standard_normal((size, 6), np.float32) for size in (5, 9, 9, 9)]
  expected = sparse_ffn(*map(jnp.asarray, arrays), implementation="reference")
  actual = setting(*arrays)
  np.testing.assert_allclose(actual.y, expected.y, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(
    actual.activity.active, expected.activity.active
  )
