import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies

from twell_jax import training
from twell_jax.nn import Partitioning
from twell_jax.training import cross_entropy

VOCABULARY = 12
D_MODEL = 8


def problem(*, dtype=jnp.float32, sequences=8, seq=6, seed=0):
  """Hidden states, an output matrix, targets and weights, some of them 0."""
  rng = np.random.default_rng(seed)
  tokens = (sequences, seq)
  weights = rng.random(tokens) * (rng.random(tokens) > 0.3)
  return (
    jnp.asarray(2 * rng.normal(size=(*tokens, D_MODEL)), dtype),
    jnp.asarray(rng.normal(size=(VOCABULARY, D_MODEL)), dtype),
    jnp.asarray(rng.integers(0, VOCABULARY, tokens), jnp.int32),
    jnp.asarray(weights, jnp.float32),
  )


def full(hidden, matrix, targets, weights):
  logits = jnp.einsum(
    "bsd,vd->bsv", hidden, matrix, preferred_element_type=jnp.float32
  )
  return cross_entropy.full(logits, targets, weights)


def value_and_gradient(of, arguments, **options):
  """Of a multiple of the total, and the sum of the weights."""

  def scaled(hidden, matrix, targets, weights):
    sums = of(hidden, matrix, targets, weights, **options)
    return 0.3 * sums.total, sums.weight

  gradient = jax.value_and_grad(scaled, (0, 1, 3), has_aux=True)
  return jax.jit(gradient)(*arguments)


def assert_close(actual, expected, *, tolerance):
  """Relative to the largest element of each array."""

  def compare(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())

  jax.tree.map(compare, actual, expected)


def test_full_counts_weights():
  logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]]))
  targets, weights = jnp.array([[1, 0]]), jnp.array([[2.0, 0.0]])
  entropy = cross_entropy.full(logits, targets, weights)
  np.testing.assert_allclose(entropy.total, 2 * np.log(4), rtol=1e-6)
  assert entropy.weight == 2


@hypothesis.given(
  chunk_tokens=strategies.integers(1, 60),
  sequences=strategies.integers(1, 5),
  seq=strategies.integers(1, 10),
  seed=strategies.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=8)
def test_chunks_are_the_whole(chunk_tokens, sequences, seq, seed):
  arguments = problem(sequences=sequences, seq=seq, seed=seed)
  # Something to be relative to.
  arguments = (*arguments[:3], arguments[3].at[0, 0].set(1))
  assert_close(
    value_and_gradient(
      cross_entropy.chunked, arguments, chunk_tokens=chunk_tokens
    ),
    value_and_gradient(full, arguments),
    tolerance=1e-5,
  )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_good_as_the_whole(dtype):
  """Against the same numbers in float32; the softmax is float32 in both."""
  arguments = problem(dtype=dtype)
  wide = tuple(
    array.astype(jnp.float32) if array.dtype == dtype else array
    for array in arguments
  )
  exact = value_and_gradient(full, wide)
  chunked = value_and_gradient(cross_entropy.chunked, arguments, chunk_tokens=7)
  assert_close(chunked[0], exact[0], tolerance=1e-6)
  # Gradients are rounded to the dtype once more than they must be.
  rounding = float(jnp.finfo(dtype).eps)
  assert_close(chunked[1], exact[1], tolerance=rounding)
  assert [leaf.dtype for leaf in chunked[1]] == [dtype, dtype, jnp.float32]


@pytest.mark.parametrize(
  ("sizes", "batch_axes"),
  [
    ({"data": 4}, ("data", "fsdp")),
    ({"data": 1, "fsdp": 4}, ("data", "fsdp")),
    ({"data": 1, "fsdp": 2, "tensor": 2}, ("data", "fsdp")),
    ({"data": 2, "fsdp": 2}, ("data",)),
  ],
  ids=["data", "fsdp", "tensor", "batch not over fsdp"],
)
def test_on_a_mesh(sizes, batch_axes):
  mesh = training.make_mesh(**sizes)
  partitioning = Partitioning(mesh, batch_axes=batch_axes)
  arguments = problem()
  expected = value_and_gradient(full, arguments)
  placed = [
    jax.device_put(array, partitioning.sharding(axes))
    for array, axes in zip(
      arguments,
      [
        ("batch", None, None),
        ("vocab", "embed"),
        ("batch", None),
        ("batch", None),
      ],
    )
  ]
  options: dict[str, Any] = {"chunk_tokens": 5, "partitioning": partitioning}
  result = value_and_gradient(cross_entropy.chunked, placed, **options)
  assert_close(result, expected, tolerance=1e-5)
  # The matrix' gradient comes in the slices in which the matrix is stored.
  assert result[1][1].sharding.is_equivalent_to(placed[1].sharding, 2)
  # Without gradients too.
  alone = functools.partial(cross_entropy.chunked, **options)
  sums = jax.jit(alone)(*placed)
  np.testing.assert_allclose(0.3 * sums.total, expected[0][0], rtol=1e-5)


def test_memory_does_not_grow_with_the_vocabulary_times_tokens():
  tokens, vocabulary, d_model = 4096, 8192, 32
  shapes = (
    jax.ShapeDtypeStruct((4, tokens // 4, d_model), jnp.float32),
    jax.ShapeDtypeStruct((vocabulary, d_model), jnp.float32),
    jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32),
    jax.ShapeDtypeStruct((4, tokens // 4), jnp.float32),
  )

  def temporaries(of, **options):
    gradient = jax.grad(
      lambda *arrays: of(*arrays, **options).total, argnums=(0, 1)
    )
    memory = jax.jit(gradient).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes

  logits = 4 * tokens * vocabulary
  assert temporaries(full) >= logits
  # Logits of a chunk, their gradient, what is between them, and gradients of
  # the hidden states and of the matrix.
  chunked = temporaries(cross_entropy.chunked, chunk_tokens=128)
  assert chunked < 6 * 4 * 128 * vocabulary + 4 * 4 * tokens * d_model
  assert chunked < logits / 4


@pytest.mark.parametrize("target", [-1, -VOCABULARY, VOCABULARY, -13, 99])
def test_a_target_outside_the_vocabulary_is_as_in_the_whole(target):
  hidden, matrix, targets, weights = problem()
  targets = targets.at[2, 3].set(target)
  arguments = (hidden, matrix, targets, weights)
  expected = full(*arguments).total
  total = cross_entropy.chunked(*arguments, chunk_tokens=9).total
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  assert np.isnan(total) == (not -VOCABULARY <= target < VOCABULARY)


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan, 1e30])
def test_logits_that_are_not_finite_are_as_in_the_whole(value):
  hidden, matrix, targets, weights = problem()
  hidden = jnp.abs(hidden).at[1, 2, 3].set(value)
  matrix = jnp.abs(matrix)
  arguments = (hidden, matrix, targets, weights.at[1, 2].set(1))
  expected = full(*arguments).total
  total = cross_entropy.chunked(*arguments, chunk_tokens=9).total
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  assert not np.isfinite(expected) or value == 1e30


def test_it_works_in_a_scan():
  hidden, matrix, targets, weights = problem()

  def one_after_the_other(hidden, matrix, targets, weights):
    def add(total, micro):
      h, t, w = (array[None] for array in micro)
      sums = cross_entropy.chunked(h, matrix, t, w, chunk_tokens=4)
      return total + sums.total, None

    total, _ = jax.lax.scan(add, jnp.float32(0), (hidden, targets, weights))
    return cross_entropy.CrossEntropy(total, jnp.sum(weights))

  arguments = (hidden, matrix, targets, weights)
  assert_close(
    value_and_gradient(one_after_the_other, arguments),
    value_and_gradient(full, arguments),
    tolerance=1e-5,
  )


def test_mistakes():
  hidden, matrix, targets, weights = problem()
  with pytest.raises(ValueError, match="chunk_tokens = 0 must be at least 1"):
    cross_entropy.chunked(hidden, matrix, targets, weights, chunk_tokens=0)
  half = matrix.astype(jnp.bfloat16)
  with pytest.raises(ValueError, match="matrix is bfloat16 and hidden is"):
    cross_entropy.chunked(hidden, half, targets, weights, chunk_tokens=4)
  partitioning = Partitioning(training.make_mesh(data=2, fsdp=2))
  with pytest.raises(ValueError, match=r"batch of 3 sequences .* 4 devices of"):
    cross_entropy.chunked(
      hidden[:3],
      matrix,
      targets[:3],
      weights[:3],
      chunk_tokens=4,
      partitioning=partitioning,
    )


@pytest.mark.parametrize(
  ("changes", "sizes", "accumulation_steps"),
  [
    ({"tie_embeddings": False}, {"data": 1}, 2),
    ({"remat": "attention"}, {"data": 1, "fsdp": 2, "tensor": 2}, 2),
  ],
  ids=["head", "mesh, remat"],
)
def test_a_step_is_that_of_the_full_logits(
  config, corpus, changes, sizes, accumulation_steps
):
  """The model's losses and parameters after an update of plain SGD."""
  devices = jax.devices()[: int(np.prod(list(sizes.values())))]
  mesh = training.make_mesh(**sizes, devices=devices)
  batch = next(corpus.batches())

  def run(cross_entropy):
    model = training.abstract_model(
      dataclasses.replace(
        config, cross_entropy=cross_entropy, cross_entropy_chunk=7, **changes
      ),
      Partitioning(mesh),
    )
    optimizer = optax.sgd(1.0)
    step = training.make_train_step(
      model,
      optimizer,
      learning_rate=optax.constant_schedule(1.0),
      l1_coefficient=optax.constant_schedule(0.1),
      accumulation_steps=accumulation_steps,
    )
    state = training.initial_state(model, optimizer, seed=0)
    placed = training.place_batch(batch, model.partitioning)
    held_out = training.make_eval_step(model)(state.params, placed)
    result = step(state, placed)
    return held_out, result.statistics, result.state.params

  held_out, statistics, params = run("chunked")
  expected = run("full")
  assert_close(held_out, expected[0], tolerance=1e-5)
  assert statistics.loss == pytest.approx(float(expected[1].loss), rel=1e-5)
  assert_close(params, expected[2], tolerance=1e-5)
