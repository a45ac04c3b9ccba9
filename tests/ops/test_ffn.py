"""What holds for every implementation of the op, whichever branch it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.ops.dense_layer import ACTIVITIES, GRADIENTS, Case, make_case, oracle
from tests.ops.exactness import (
  FLOATING,
  assert_no_less_exact_than_dense,
  assert_no_worse,
)
from tests.ops.settings import SETTINGS, results_of, results_of_plain

# One size serves most tests, so that it is compiled once.
SIZE = {"tokens": (65,), "d_model": 33, "d_ff": 100}


@pytest.mark.parametrize(
  ("dtype", "gated"),
  [
    (jnp.float32, True),
    (jnp.float32, False),
    (jnp.bfloat16, True),
    (jnp.bfloat16, False),
    (jnp.float16, True),
  ],
)
def test_no_less_exact_than_dense(setting, dtype, gated, rng):
  cases = [
    make_case(rng, activity, **SIZE).as_dtype(dtype)
    for activity in ACTIVITIES * 3
  ]
  if not gated:
    cases = [case.without_up() for case in cases]
  assert_no_less_exact_than_dense(cases, setting, dtype)


@pytest.mark.parametrize(
  ("tokens", "d_model", "d_ff", "dtype", "gated"),
  [
    ((), 33, 256, jnp.bfloat16, True),
    ((2, 3), 1, 100, jnp.float32, True),
    ((1,), 192, 1, jnp.float32, False),
    ((7,), 33, 100, jnp.float16, False),
    ((300,), 192, 256, jnp.float32, True),
  ],
)
def test_sizes(setting, tokens, d_model, d_ff, dtype, gated, rng):
  cases = [
    make_case(rng, activity, tokens=tokens, d_model=d_model, d_ff=d_ff)
    for activity in ACTIVITIES * (1 if tokens == (300,) else 4)
  ]
  cases = [case.as_dtype(dtype) for case in cases]
  if not gated:
    cases = [case.without_up() for case in cases]
  assert_no_less_exact_than_dense(cases, setting, dtype)


@pytest.mark.parametrize("tokens", [(0,), (2, 0, 3)])
@pytest.mark.parametrize("gated", [True, False])
def test_no_tokens(setting, tokens, gated, rng):
  case = make_case(rng, "mixed", tokens=tokens, d_model=3, d_ff=5)
  case = case.as_dtype(jnp.bfloat16)
  case = case if gated else case.without_up()
  actual = results_of(setting)(case)
  jax.tree.map(np.testing.assert_array_equal, actual, oracle(case))
  assert actual.y.dtype == jnp.bfloat16


@pytest.mark.parametrize("gated", [True, False])
def test_float64(setting, gated, rng):
  # A power of two, which divides the float32 cotangent of l1 exactly.
  case = make_case(rng, "heavy tail", tokens=(8,), d_model=33, d_ff=100)
  case = case if gated else case.without_up()
  with jax.enable_x64(True):
    actual = results_of(setting)(case)
  assert actual.y.dtype == actual.dx.dtype == jnp.float64
  for name in FLOATING:
    exact = getattr(oracle(case), name)
    if exact is not None:
      # l1 is float32.
      tolerance = 1e-6 if name == "l1" else 1e-13
      np.testing.assert_allclose(
        getattr(actual, name),
        exact,
        rtol=0,
        atol=tolerance * np.abs(exact).max(),
        err_msg=name,
      )


def test_check_grads(setting, rng):
  # A sign for each token and each neuron: z is far from its kink.
  case = make_case(rng, "everything", tokens=(7,), d_model=5, d_ff=12)
  signs = rng.choice([-1, 1], (7, 1)), rng.choice([-1, 1], (12, 1))
  inputs = (case.x * signs[0], case.gate * signs[1], case.up, case.down)
  with jax.enable_x64(True):
    f = jax.jit(lambda *inputs: setting(*inputs).y)
    check_grads(f, inputs, order=1, modes=["rev"])


def test_settings_take_their_branches(rng):
  # Sums in another order are other float32 numbers.
  case = make_case(rng, "mixed", **SIZE).as_dtype(jnp.float32)
  outputs = {
    name: np.asarray(results_of(SETTINGS[name])(case).y)
    for name in ("xla-sparse", "xla-dense")
  }
  assert (outputs["xla-sparse"] != outputs["xla-dense"]).any()
  np.testing.assert_array_equal(
    results_of(SETTINGS["xla"])(case).y, outputs["xla-dense"]
  )


def test_real_numbers(setting, rng):
  """Inputs without structure, of which y and l1 are continuous."""
  shapes = [(65, 33), *[(100, 33)] * 3, (65, 33)]
  cases = [
    Case(*(rng.normal(size=shape) for shape in shapes)).as_dtype(jnp.float32)
    for _ in range(3)
  ]
  runs = [
    (oracle(case), results_of(setting)(case), results_of_plain(case))
    for case in cases
  ]
  for name in ("y", "l1"):
    triples = [[getattr(result, name) for result in run] for run in runs]
    assert_no_worse(name, triples, jnp.float32)


def test_two_calls_give_the_same_bits(setting, rng):
  case = make_case(rng, "heavy tail", **SIZE).as_dtype(jnp.float32)
  first, second = results_of(setting)(case), results_of(setting)(case)
  jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("gated", [True, False])
def test_without_gradients(setting, gated, rng):
  """The forward function alone, which keeps nothing for a backward pass."""
  case = make_case(rng, "heavy tail", **SIZE).as_dtype(jnp.float32)
  case = case if gated else case.without_up()
  forward = jax.jit(lambda *inputs: setting(*inputs))
  y, activity = forward(*case[:4])
  expected = oracle(case)
  np.testing.assert_allclose(
    y, expected.y, rtol=0, atol=1e-5 * np.abs(expected.y).max()
  )
  np.testing.assert_allclose(activity.l1, expected.l1, rtol=1e-5)
  np.testing.assert_array_equal(activity.active, expected.active)
  np.testing.assert_array_equal(activity.fired, expected.fired)
  # An infinite x that leaves no gate positive is not swallowed either.
  silent = -np.abs(case.gate) - 1
  for gate, bad in ((case.gate, np.nan), (silent, np.inf)):
    x = np.abs(case.x)
    x[3, 5] = bad
    broken = case._replace(x=x, gate=gate)
    finite = np.isfinite(forward(*broken[:4]).y)
    plain = np.isfinite(results_of_plain(broken).y)
    np.testing.assert_array_equal(finite, plain)
    assert np.delete(finite, 3, axis=0).all()
    assert not (gated and finite[3].any())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("gated", [True, False])
def test_a_non_finite_token(setting, gated, bad, rng):
  for activity in ("mixed", "nothing", "heavy tail"):
    case = make_case(rng, activity, **SIZE).as_dtype(jnp.float32)
    case = case if gated else case.without_up()
    token = rng.integers(65)
    x = case.x.copy()
    x[token, rng.integers(33)] = bad
    clean = results_of(setting)(case)
    actual = results_of(setting)(case._replace(x=x))
    with np.errstate(invalid="ignore"):
      plain = results_of_plain(case._replace(x=x))

    finite = np.isfinite(actual.y[token])
    np.testing.assert_array_equal(finite, np.isfinite(plain.y[token]))
    if gated:
      assert not finite.any()
    others = np.arange(65) != token
    for name in ("y", "dx", "active"):
      array, expected = getattr(actual, name), getattr(clean, name)
      # All neurons of one token more may change the branch, and then the
      # order of sums.
      scale = np.abs(np.asarray(expected)).max()
      tolerance = 1e-5 * scale if activity == "heavy tail" else 0.0
      np.testing.assert_allclose(
        array[others], expected[others], rtol=0, atol=tolerance, err_msg=name
      )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("field", ["gate", "up", "down", "dy"])
def test_non_finite_parameters_and_cotangents(setting, field, bad, rng):
  for index in (0, 3):
    case = make_case(rng, "heavy tail", **SIZE).as_dtype(jnp.float32)
    array = np.array(getattr(case, field))
    array[index, 5] = bad
    case = case._replace(**{field: array})
    actual, plain = results_of(setting)(case), results_of_plain(case)
    # At most as far as in the dense layer. At NaN itself relu and abs have
    # derivatives by convention only: the broken neuron's own are not compared.
    for name in ("y", "l1", *GRADIENTS):
      allowed = ~np.isfinite(getattr(plain, name))
      if name in ("dgate", "dup", "ddown"):
        allowed[index] = True
      assert (allowed | np.isfinite(getattr(actual, name))).all(), name
    # At least to what is active.
    z = case.x @ case.gate[index]
    if field == "dy":
      assert not np.isfinite(actual.ddown[actual.fired > 0, 5]).all()
    else:
      active = (z > 0) | np.isnan(z)
      broken = ~np.isfinite(actual.y)
      columns = slice(5, 6) if field == "down" else slice(None)
      assert broken[active, columns].all()


def test_an_infinite_u_at_a_silent_neuron_is_skipped(setting, rng):
  case = make_case(rng, "one token", **SIZE).as_dtype(jnp.float32)
  expected = oracle(case)
  token = int(np.argmax(expected.active))
  # u is infinite at the silent tokens: 2 · 3e38 is beyond float32.
  x, up = np.array(case.x), np.array(case.up)
  x[:, 0] = -2
  x[token, 0] = 0
  up[:, 0] = 3e38
  with np.errstate(over="ignore"):
    assert np.isinf(x @ up.T)[np.arange(65) != token].all()
  actual = results_of(setting)(case._replace(x=x, up=up))
  expected = oracle(case._replace(x=x, up=up))
  np.testing.assert_array_equal(actual.active, expected.active)
  for name in ("y", "l1", "dgate", "ddown"):
    exact = getattr(expected, name)
    np.testing.assert_allclose(
      getattr(actual, name), exact, rtol=0, atol=1e-5 * np.abs(exact).max()
    )


@pytest.mark.parametrize("gated", [True, False])
def test_negative_zeros_are_silent(setting, gated, rng):
  case = make_case(rng, "mixed", **SIZE).as_dtype(jnp.float32)
  case = case if gated else case.without_up()
  actual = results_of(setting)(case._replace(x=np.full_like(case.x, -0.0)))
  for name in ("y", "l1", "active", "fired", "dx", "dgate"):
    assert not np.any(getattr(actual, name)), name


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_subnormal_gates(setting, dtype, rng):
  """Those of bfloat16 may be flushed; those of float16 are numbers."""
  case = make_case(rng, "mixed", **SIZE).as_dtype(dtype)
  least = float(jnp.finfo(dtype).smallest_normal)
  gate = (case.gate.astype(np.float64) * least / 64).astype(dtype)
  assert gate.any()
  case = case._replace(gate=gate)
  actual, exact = results_of(setting)(case), oracle(case)
  plain = results_of_plain(case)
  # The least number there is: of h, and of y where the sum is as small.
  unit = float(jnp.finfo(dtype).smallest_subnormal)
  for name in ("y", "ddown"):
    ours, dense = (
      np.abs(np.asarray(getattr(result, name), np.float64) - wanted).max()
      for result in (actual, plain)
      for wanted in [getattr(exact, name)]
    )
    assert ours <= max(1.5 * dense, 4 * unit), name
  if dtype == jnp.float16:
    np.testing.assert_array_equal(actual.active, exact.active)
