"""Tokens computed by dense products, whoever they are and however many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.dense_layer import L1_WEIGHT, make_case, oracle
from twell_jax.formats.bits import is_active
from twell_jax.ops import dense_tokens
from twell_jax.ops.dense_tokens import DenseRows, Sums
from twell_jax.ops.outputs import Gradients

TOKENS, D_MODEL, D_FF = 11, 6, 20


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(dense_tokens, "BLOCKS", (4, 2))


def case_of(rng, gated):
  sizes = {"tokens": (TOKENS,), "d_model": D_MODEL, "d_ff": D_FF}
  case = make_case(rng, "mixed", **sizes).as_dtype(jnp.float32)
  return case if gated else case.without_up()


def without(case, wanted):
  """The case in which only the wanted tokens are there."""
  x = np.where(wanted[:, None], case.x, 0)
  return case._replace(x=x, dy=np.where(wanted[:, None], case.dy, 0))


@jax.jit
def run_forward(*inputs):
  return dense_tokens.forward(*inputs, added=None)


@jax.jit
def run_backward(*inputs):
  penalty = jnp.float32(L1_WEIGHT / TOKENS)
  return dense_tokens.backward(*inputs, penalty=penalty)


def forward(case, wanted, dense_rows):
  """From sums of nothing, with marks where nothing may be written."""
  rows = None
  if dense_rows:
    zeros = jnp.zeros((dense_rows, D_FF))
    rows = DenseRows(zeros, None if case.up is None else zeros)
  start = Sums(
    jnp.full(case.x.shape, 7.0),
    jnp.float32(0),
    jnp.full((TOKENS,), -1, jnp.int32),
    jnp.zeros((D_FF,), jnp.int32),
    rows,
  )
  return run_forward(start, wanted, *case[:4])


def backward(case, wanted, rows):
  zeros = jnp.zeros(case.gate.shape)
  dup = None if case.up is None else zeros
  start = Gradients(jnp.full(case.x.shape, 7.0), zeros, dup, zeros)
  return run_backward(start, wanted, rows, *case)


def wanted_tokens(rng, number):
  wanted = np.zeros(TOKENS, bool)
  wanted[rng.permutation(TOKENS)[:number]] = True
  return wanted


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2, 4, 7, 11])
@pytest.mark.parametrize("dense_rows", [0, 1, 4, 11])
def test_values_and_gradients(gated, number, dense_rows, rng):
  case, wanted = case_of(rng, gated), wanted_tokens(rng, number)
  expected = oracle(without(case, wanted))
  sums = forward(case, wanted, dense_rows)
  np.testing.assert_allclose(
    sums.y, np.where(wanted[:, None], expected.y, 7), atol=1e-5
  )
  np.testing.assert_allclose(sums.l1, expected.l1 * TOKENS, rtol=1e-5)
  np.testing.assert_array_equal(
    sums.active, np.where(wanted, expected.active, -1)
  )
  np.testing.assert_array_equal(sums.fired, expected.fired)

  gradients = backward(case, wanted, sums.rows)
  np.testing.assert_allclose(
    gradients.x, np.where(wanted[:, None], expected.dx, 7), atol=1e-5
  )
  for name in ("gate", "up", "down"):
    exact = getattr(expected, f"d{name}")
    if exact is None:
      assert getattr(gradients, name) is None
    else:
      np.testing.assert_allclose(getattr(gradients, name), exact, atol=1e-5)


@pytest.mark.parametrize("gated", [True, False])
def test_what_is_kept_is_what_is_read(gated, rng):
  """Bit for bit in the order of the tokens, instead of computing it again."""
  case, wanted = case_of(rng, gated), wanted_tokens(rng, 7)
  rows = forward(case, wanted, 8).rows
  x = case.x[wanted]
  z = jnp.asarray(x @ case.gate.T)
  np.testing.assert_array_equal(rows.p[:7], jnp.where(is_active(z), z, 0))
  assert not rows.p[7].any()
  if gated:
    np.testing.assert_allclose(rows.u[:7], x @ case.up.T, atol=1e-6)
  # Nothing is active in what is read, though much would be if it were made.
  silent = jax.tree.map(jnp.zeros_like, rows)
  gradients = backward(case, wanted, silent)
  assert not np.any(gradients.gate)
  assert not np.any(gradients.x[wanted])


@pytest.mark.parametrize("bad", [-np.inf, np.inf, np.nan])
def test_unused_slots_of_a_block_are_silent(bad, rng):
  """Also where a gate is not finite, and 0 · ∞ = NaN."""
  case, wanted = case_of(rng, gated=True), wanted_tokens(rng, 1)
  case.x[:, 0] = 1
  case.gate[3, 0] = bad
  with np.errstate(invalid="ignore"):
    fired = ~(case.x[wanted] @ case.gate.T <= 0)[0]
  sums = forward(case, wanted, 2)
  np.testing.assert_array_equal(sums.fired, fired)
  assert not np.any(sums.rows.p[1])
  if bad == -np.inf:
    assert np.isfinite(sums.l1)
    gradients = backward(case, wanted, sums.rows)
    for name in ("gate", "up", "down"):
      assert np.isfinite(getattr(gradients, name)).all()
