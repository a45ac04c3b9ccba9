"""What holds for every implementation of the op, whichever branch it takes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.ops import dense_layer
from tests.ops.dense_layer import L1_WEIGHT, Case, Results, make_case, oracle
from tests.ops.settings import (
  SETTINGS,
  results,
  results_of,
  results_of_plain,
)
from twell_jax.ops import sparse_ffn

ACTIVITIES = ("mixed", "nothing", "everything", "one token", "heavy tail")
FLOATING = ("y", "l1", "dx", "dgate", "dup", "ddown")
GRADIENTS = ("dx", "dgate", "dup", "ddown")

# One size serves most tests, so that it is compiled once.
SIZE = {"tokens": (65,), "d_model": 33, "d_ff": 100}


class Spread(NamedTuple):
  """Errors of many numbers, in units of the rounding of the output."""

  largest: float
  rms: float


def spread(pairs, dtype) -> Spread:
  """Of (actual, expected) pairs, each in units of its own scale."""
  unit = float(jnp.finfo(dtype).eps)
  largest, squares = [], []
  for actual, expected in pairs:
    error = np.abs(np.asarray(actual, np.float64) - expected).ravel()
    if not expected.any():
      assert not error.any()
      continue
    largest.append(error.max() / np.abs(expected).max())
    squares.append(np.mean(error**2) / np.mean(expected**2))
  return Spread(max(largest) / unit, np.sqrt(np.mean(squares)) / unit)


def assert_no_worse(name, triples, dtype):
  """Errors of (exact, actual, plain) against 1.5 × those of plain.

  As much as the rounding of the output, one unit, is allowed in any case. Few
  numbers are held to four instead of either, since the sums that they come from
  may all cancel: with one feature those of a case are multiples of one another.
  """
  few = np.shape(triples[0][0])[-1:] in ((), (1,))
  factor, units = (4, 4) if few else (1.5, 1)
  if few:
    triples = pooled(triples)
  ours = spread([(actual, exact) for exact, actual, _ in triples], dtype)
  dense = spread([(plain, exact) for exact, _, plain in triples], dtype)
  assert ours.rms <= max(factor * dense.rms, units), (name, ours, dense)
  # The largest of many errors is about four times their root mean square.
  largest = max(factor * dense.largest, 4 * units)
  assert ours.largest <= largest, (name, ours, dense)


def pooled(triples):
  """One (exact, actual, plain) of all: small results, beside larger ones."""
  return [
    tuple(
      np.concatenate(
        [np.ravel(np.asarray(array, np.float64)) for array in part]
      )
      for part in zip(*triples)
    )
  ]


def assert_no_less_exact_than_dense(cases, setting, dtype):
  """Errors of at most 1.5 × those of the plain layer, or a rounding unit.

  They are taken over all cases, since the largest of few errors is a matter of
  luck.
  """
  runs = [
    (oracle(case), results_of(setting)(case), results_of_plain(case))
    for case in cases
  ]
  for expected, actual, _ in runs:
    np.testing.assert_array_equal(actual.active, expected.active)
    np.testing.assert_array_equal(actual.fired, expected.fired)
    assert actual.active.dtype == actual.fired.dtype == jnp.int32
    assert actual.y.shape == expected.y.shape
    assert (actual.l1.dtype, actual.l1.shape) == (jnp.float32, ())
  for name in FLOATING:
    triples = [[getattr(result, name) for result in run] for run in runs]
    if triples[0][0] is None:
      assert all(actual is None for _, actual, _ in triples)
      continue
    if name != "l1":
      assert triples[0][1].dtype == dtype
    assert_no_worse(name, triples, dtype)


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
  with pytest.MonkeyPatch.context() as patch:
    outputs = {}
    for name, share in (("xla-sparse", 128.0), ("xla-dense", 0.0)):
      patch.setattr(
        "twell_jax.ops.xla._SPARSE_LIMIT", dict.fromkeys((2, 4, 8), share)
      )
      outputs[name] = np.asarray(results_of(SETTINGS[name])(case).y)
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


def assert_close(actual: Results, expected: Results, *, tolerance=1e-5):
  """Equal within a tolerance relative to the largest number."""
  for name, exact in expected._asdict().items():
    if exact is None:
      continue
    np.testing.assert_allclose(
      getattr(actual, name),
      exact,
      rtol=0,
      atol=tolerance * np.abs(exact).max(),
      err_msg=name,
    )


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
      r"implementation='cuda' is unknown: use one of \['reference', 'xla'\]",
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
