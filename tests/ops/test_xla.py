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
    (jnp.float32, True, 0),
    (jnp.float32, False, 40),
    (jnp.float32, True, 100),
    (jnp.bfloat16, True, 40),
    (jnp.float16, False, 0),
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


@pytest.mark.parametrize("chunk_tokens", [1, 13, 64, 65, 66])
def test_any_chunk(chunk_tokens, rng, monkeypatch):
  monkeypatch.setattr(xla_dense, "CHUNK_TOKENS", chunk_tokens)
  case = make_case(rng, "mixed", **SIZE).as_dtype(jnp.float32)
  assert_close(results_of(dense_branch())(case), oracle(case))


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


@pytest.mark.parametrize("hot_neurons", [0, 40])
def test_the_switch(hot_neurons, rng):
  """At as many active neurons as there is room for, and at one more."""
  case = make_case(rng, "heavy tail", **SIZE).as_dtype(jnp.float32)
  expected = oracle(case)
  total = int(expected.fired[hot_neurons:].sum())
  cold = 100 - hot_neurons
  for room, dense_tokens in ((total, 0), (total - 1, 65)):
    op = functools.partial(
      sparse_ffn,
      implementation="xla",
      hot_neurons=hot_neurons,
      dense_above=(room + 0.5) / (65 * cold),
    )
    activity = jax.jit(op)(*case[:4]).activity
    assert activity.dense_tokens == dense_tokens
    assert activity.dense_tokens.dtype == jnp.int32
    assert_close(results_of(op)(case), expected)


@pytest.mark.parametrize("activity", ["nothing", "everything", "one token"])
def test_always_and_never_dense(activity, rng):
  case = make_case(rng, activity, **SIZE).as_dtype(jnp.float32)
  expected = oracle(case)
  for share, dense_tokens in ((0, 65), (1, 0), (1.5, 0)):
    op = functools.partial(sparse_ffn, implementation="xla", dense_above=share)
    activity_of_call = jax.jit(op)(*case[:4]).activity
    assert activity_of_call.dense_tokens == dense_tokens
    assert_close(results_of(op)(case), expected)


def test_the_dense_backward_keeps_the_signs(rng):
  """Made again, z may round to another sign than in the forward pass."""
  case = make_case(rng, "mixed", **SIZE).as_dtype(jnp.float32)
  choices = Choices(dense_above=0.0)
  weights = (case.gate, case.up, case.down)
  kept = kept_of(case.x, *weights, dense_above=0.0)
  active = np.array(unpack(kept.words, 100))
  # As if the forward pass had found them so: 0 active nowhere, 1 everywhere.
  active[:, 0], active[:, 1] = False, True

  def gradients(active):
    words = pack(jnp.asarray(active))
    return xla.backward(
      kept._replace(words=words),
      *(case.x, *weights, case.dy, jnp.zeros(())),
      choices=choices,
    )

  actual = gradients(active)
  for matrix in (actual.gate, actual.up, actual.down):
    assert not matrix[0].any()
  # Its dz is that of an active neuron, whatever its z is.
  u, dt = case.x @ case.up[1], case.dy @ case.down[1]
  exact = (dt * u) @ case.x
  np.testing.assert_allclose(
    actual.gate[1], exact, rtol=0, atol=1e-5 * np.abs(exact).max()
  )
  # The other neurons' gradients are their own.
  expected = oracle(case)
  for matrix, exact in (
    (actual.gate, expected.dgate),
    (actual.up, expected.dup),
  ):
    np.testing.assert_allclose(
      matrix[2:], exact[2:], rtol=0, atol=1e-5 * np.abs(exact).max()
    )
