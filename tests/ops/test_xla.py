"""The xla implementation: what it keeps, its two branches, and their memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.dense_layer import make_case, oracle
from tests.ops.exactness import assert_close, assert_no_less_exact_than_dense
from tests.ops.settings import results, results_of
from twell_jax.formats.bits import pack, unpack
from twell_jax.ops import sparse_ffn, xla, xla_dense
from twell_jax.ops.choices import Choices

# Five chunks of 16 tokens, the last one of a single token.
SIZE = {"tokens": (65,), "d_model": 33, "d_ff": 100}


def kept_of(x, gate, up, down, **choices):
  forward = xla.forward_with_residuals
  return forward(x, gate, up, down, choices=Choices(**choices)).kept


def float32(*shape) -> Any:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("gated", [True, False])
def test_what_is_kept(dtype, gated):
  x = jax.ShapeDtypeStruct((512, 256), dtype)
  matrix = jax.ShapeDtypeStruct((1024, 256), dtype)
  up = matrix if gated else None

  def kept(**choices):
    return jax.eval_shape(
      lambda x, gate, up, down: kept_of(x, gate, up, down, **choices),
      *(x, matrix, up, matrix),
    )

  packed = kept(dense_above=0.05)
  assert packed.words.shape == (512, 32)
  assert packed.hot is None
  assert (packed.blocks.u is not None) == gated
  for block in jax.tree.leaves(packed.blocks):
    assert block.dtype == dtype
    assert block.ndim == 3
    # Room for the active neurons, and for rows of unequal length.
    assert 0.05 * 512 * 1024 <= block.size <= 0.2 * 512 * 1024
  assert len(jax.tree.leaves(packed)) == (3 if gated else 2)

  split = kept(dense_above=0.05, hot_neurons=48)
  assert split.words.shape == (512, 32)
  for values in jax.tree.leaves(split.hot):
    assert (values.shape, values.dtype) == ((512, 48), dtype)
  assert len(jax.tree.leaves(split.hot)) == (2 if gated else 1)

  # Nothing for loops that never run.
  assert kept(dense_above=0.0).blocks is None
  assert kept(hot_neurons=1024).blocks is None


@pytest.mark.parametrize("hot_neurons", [0, 16])
def test_memory_of_the_backward_pass(hot_neurons, monkeypatch):
  """Of both branches together: less than one array of tokens × d_ff."""
  monkeypatch.setattr(xla_dense, "CHUNK_TOKENS", 64)
  choices = Choices(hot_neurons=hot_neurons, dense_above=0.01)
  matrix = float32(1024, 16)
  x = float32(2048, 16)
  forward = functools.partial(xla.forward_with_residuals, choices=choices)
  kept = jax.eval_shape(forward, x, matrix, matrix, matrix).kept
  backward = jax.jit(functools.partial(xla.backward, choices=choices))
  arguments = (kept, x, matrix, matrix, matrix, x, float32())
  memory = backward.lower(*arguments).compile().memory_analysis()
  assert memory is not None
  assert memory.temp_size_in_bytes < 4 * 2048 * 1024 / 2


def dense_branch(hot_neurons=0):
  """A new function at each call, which is compiled for itself."""
  return functools.partial(
    sparse_ffn, implementation="xla", dense_above=0.0, hot_neurons=hot_neurons
  )


@pytest.mark.parametrize(
  ("dtype", "gated", "hot_neurons"),
  [
    (jnp.bfloat16, True, 0),
    (jnp.bfloat16, False, 40),
    (jnp.float16, True, 40),
  ],
)
def test_chunks(dtype, gated, hot_neurons, rng, monkeypatch):
  monkeypatch.setattr(xla_dense, "CHUNK_TOKENS", 16)
  cases = [
    make_case(rng, activity, **SIZE).as_dtype(dtype)
    for activity in ("mixed", "everything", "heavy tail") * 3
  ]
  if not gated:
    cases = [case.without_up() for case in cases]
  assert_no_less_exact_than_dense(cases, dense_branch(hot_neurons), dtype)


# XLA:CPU sums small float32 products one term at a time, and larger ones in
# blocks, which is more exact: no comparison with the plain layer here.
@pytest.mark.parametrize(
  ("chunk_tokens", "gated", "hot_neurons"),
  [
    (1, True, 0),
    (13, True, 40),
    (16, False, 40),
    (16, True, 100),
    (32, False, 0),
    (64, True, 0),
    (65, True, 0),
    (66, True, 40),
  ],
)
def test_any_chunk(chunk_tokens, gated, hot_neurons, rng, monkeypatch):
  monkeypatch.setattr(xla_dense, "CHUNK_TOKENS", chunk_tokens)
  case = make_case(rng, "mixed", **SIZE).as_dtype(jnp.float32)
  case = case if gated else case.without_up()
  assert_close(results_of(dense_branch(hot_neurons))(case), oracle(case))


def test_chunks_under_vmap(rng, monkeypatch):
  monkeypatch.setattr(xla_dense, "CHUNK_TOKENS", 3)
  cases = [
    make_case(rng, activity, tokens=(7,), d_model=5, d_ff=40)
    for activity in ("heavy tail", "everything")
  ]
  cases = [case.as_dtype(jnp.float32) for case in cases]
  stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *cases)
  op = functools.partial(sparse_ffn, implementation="xla", dense_above=0.5)
  both = jax.jit(jax.vmap(lambda case: results(case, op)))(stacked)
  for index, case in enumerate(cases):
    actual = jax.tree.map(lambda array, index=index: array[index], both)
    assert_close(actual, oracle(case))


def compiled(**choices):
  """The results, and the tokens computed by dense products, by case."""
  op = functools.partial(sparse_ffn, implementation="xla", **choices)

  def function(case):
    return results(case, op), op(*case[:4]).activity.dense_tokens

  return jax.jit(function)


@pytest.mark.parametrize("hot_neurons", [0, 40])
def test_the_switch(hot_neurons, rng):
  """At as many active neurons as there is room for, and at one more."""
  case = make_case(rng, "heavy tail", **SIZE).as_dtype(jnp.float32)
  expected = oracle(case)
  total = int(expected.fired[hot_neurons:].sum())
  cold = 100 - hot_neurons
  for room, expected_tokens in ((total, 0), (total - 1, 65)):
    share = (room + 0.5) / (65 * cold)
    op = compiled(hot_neurons=hot_neurons, dense_above=share)
    actual, dense_tokens = op(case)
    assert dense_tokens == expected_tokens
    assert dense_tokens.dtype == jnp.int32
    assert_close(actual, expected)


@pytest.mark.parametrize(("share", "expected_tokens"), [(0, 65), (1, 0)])
def test_always_and_never_dense(share, expected_tokens, rng):
  op = compiled(dense_above=share)
  for activity in ("nothing", "everything", "one token"):
    case = make_case(rng, activity, **SIZE).as_dtype(jnp.float32)
    actual, dense_tokens = op(case)
    assert dense_tokens == expected_tokens
    assert_close(actual, oracle(case))


def test_the_dense_backward_keeps_the_signs(rng):
  """Made again, z may round to another sign than in the forward pass."""
  case = make_case(rng, "mixed", **SIZE).as_dtype(jnp.float32)
  choices = Choices(dense_above=0.0)
  x, gate, up, down, dy = (jnp.asarray(array) for array in case)
  kept = kept_of(x, gate, up, down, dense_above=0.0)

  def gradients(active):
    replaced = kept._replace(words=pack(jnp.asarray(active)))
    no_penalty = jnp.zeros(())
    return xla.backward(
      replaced, x, gate, up, down, dy, no_penalty, choices=choices
    )

  active = np.array(unpack(kept.words, 100))
  before = gradients(active)
  # As if the forward pass had found them so: 0 active nowhere, 1 everywhere.
  active[:, 0], active[:, 1] = False, True
  after = gradients(active)
  for matrix in (after.gate, after.up, after.down):
    assert not matrix[0].any()
  # Its dz is that of an active neuron, whatever its z is.
  exact = ((dy @ down[1]) * (x @ up[1])) @ x
  np.testing.assert_allclose(
    after.gate[1], exact, rtol=0, atol=1e-5 * np.abs(exact).max()
  )
  for name in ("gate", "up", "down"):
    np.testing.assert_array_equal(
      getattr(after, name)[2:], getattr(before, name)[2:]
    )


@pytest.mark.parametrize("hot_neurons", [0, 7])
@pytest.mark.parametrize("dense_above", [0.0, 1.0])
def test_one_token_and_an_infinite_gate(hot_neurons, dense_above, rng):
  """The row that pads a single 16-bit token adds no 0 · ∞."""
  x, gate, up, down = (
    rng.normal(size=(rows, 6)).astype(jnp.bfloat16) for rows in (1, 20, 20, 20)
  )
  x[:, 0], gate[3, 0] = 1, -np.inf
  choices = {"hot_neurons": hot_neurons, "dense_above": dense_above}
  y, activity = sparse_ffn(x, gate, up, down, implementation="xla", **choices)
  assert activity.fired[3] == 0
  assert np.isfinite(activity.l1)
  assert np.isfinite(y.astype(jnp.float32)).all()
