"""The cross entropy of a language model, whole or a chunk of tokens at a time.

The logits of all tokens are the largest array of a training step: 16384 tokens
and a vocabulary of 49152 make 3 GiB in float32, and their gradient is as large.
The chunked sum never holds them. It goes through the tokens once,

    hidden ─► a chunk ─► logits ─► softmax ─► loss of each token
                            │
                            └► softmax − target ─┬─► gradient of the chunk
                                                 └─► += gradient of the matrix

so that the gradients are known before they are asked for, up to the factor that
multiplies the sum: that of the hidden states, as large as these, and that of
the output matrix, in float32. The backward pass computes nothing else.

On a mesh each device goes through its own tokens. It has the rows of its slice
of the vocabulary, so that the softmax is summed over the tensor axis; it
gathers their columns from the fsdp axis, to which it hands the summed gradient
back in slices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from twell_jax.nn import Partitioning, TransformerLM
from twell_jax.ops import Activity


class CrossEntropy(NamedTuple):
  """Weighted sums from which a mean over any number of batches is made."""

  total: Float[Array, ""]
  weight: Float[Array, ""]


class ModelCrossEntropy(NamedTuple):
  """The cross entropy of a batch, and the model's activity on it."""

  cross_entropy: CrossEntropy
  activity: Activity


def model_cross_entropy(
  model: TransformerLM, batch: dict[str, Array]
) -> ModelCrossEntropy:
  """The cross entropy of a model, computed as its config says.

  Args:
    model: The model.
    batch: "inputs", "targets" and "weights" [batch, seq]; of separate documents
      also "segment_ids" and "positions".

  Returns:
    The sums of `full` or `chunked`, and the activity of each layer.
  """
  targets, weights = batch["targets"], batch["weights"]
  documents = {
    name: batch[name] for name in ("segment_ids", "positions") if name in batch
  }
  if model.config.cross_entropy == "full":
    output = model(batch["inputs"], **documents)
    sums = full(output.logits, targets, weights)
    return ModelCrossEntropy(sums, output.activity)
  states = model.hidden_states(batch["inputs"], **documents)
  sums = chunked(
    states.hidden,
    model.output_matrix[...].astype(states.hidden.dtype),
    targets,
    weights,
    chunk_tokens=model.config.cross_entropy_chunk,
    partitioning=model.partitioning,
  )
  return ModelCrossEntropy(sums, states.activity)


def full(
  logits: Float[Array, "batch seq vocab"],
  targets: Int[Array, "batch seq"],
  weights: Float[Array, "batch seq"],
) -> CrossEntropy:
  """Sum over targets of weight · CE in nats, and the sum of the weights."""
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  return CrossEntropy(jnp.sum(losses * weights), jnp.sum(weights))


def chunked(
  hidden: Float[Array, "batch seq d_model"],
  matrix: Float[Array, "vocab d_model"],
  targets: Int[Array, "batch seq"],
  weights: Float[Array, "batch seq"],
  *,
  chunk_tokens: int,
  partitioning: Partitioning | None = None,
) -> CrossEntropy:
  """`full` of the logits hidden matrixᵀ, a chunk of them at a time.

  Logits and softmax are float32. The gradient of the logits is rounded to the
  dtype of `hidden` before the two products it enters, which accumulate in
  float32. Every argument but the targets has its gradient; there is no forward
  mode, and no gradient of the gradient.

  Args:
    hidden: What the output matrix is applied to.
    matrix: The output matrix, of the dtype of `hidden`; a row for each token of
      the vocabulary.
    targets: Token ids; one outside the vocabulary makes the sum NaN.
    weights: Factors of each token's loss, float32.
    chunk_tokens: How many tokens of a device have logits at a time, at most.
    partitioning: The mesh on which the model runs; None for one device. Tokens
      are cut over its batch axes and its fsdp axis.

  Raises:
    ValueError: chunk_tokens below 1, dtypes that differ, or a number of
      sequences that the mesh does not divide.
  """
  if chunk_tokens < 1:
    raise ValueError(f"chunk_tokens = {chunk_tokens} must be at least 1")
  if matrix.dtype != hidden.dtype:
    raise ValueError(
      f"matrix is {matrix.dtype} and hidden is {hidden.dtype}: cast one of them"
    )
  # On a mesh of one device there is nothing to cut.
  if partitioning is not None and partitioning.mesh.size == 1:
    partitioning = None
  if partitioning is not None:
    pieces = 1
    for axis in _token_axes(partitioning):
      pieces *= partitioning.mesh.shape[axis]
    if hidden.shape[0] % pieces:
      raise ValueError(
        f"batch of {hidden.shape[0]} sequences is not divisible by the {pieces}"
        f" devices of mesh axes {' and '.join(_token_axes(partitioning))}"
      )
  total = _total(chunk_tokens, partitioning, hidden, matrix, targets, weights)
  return CrossEntropy(total, jnp.sum(weights))


class _Gradients(NamedTuple):
  """Of the sum of weight · loss."""

  hidden: Float[Array, "batch seq d_model"]
  matrix: Float[Array, "vocab d_model"]
  weights: Float[Array, "batch seq"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(
  chunk_tokens: int,
  partitioning: Partitioning | None,
  hidden: Array,
  matrix: Array,
  targets: Array,
  weights: Array,
) -> Float[Array, ""]:
  def local(hidden, matrix, targets, _):
    vocabulary = _Vocabulary.of(matrix, partitioning)

    def one_chunk(carry, chunk):
      tokens, targets = chunk
      return carry, _softmax(tokens, targets, vocabulary).losses

    chunks = _chunks(chunk_tokens, hidden, targets)
    _, losses = lax.scan(one_chunk, None, chunks)
    return _whole(losses, like=targets)

  run = local
  if partitioning is not None:
    run = _on_mesh(local, partitioning, out_specs=_batch_spec(partitioning))
  return jnp.sum(run(hidden, matrix, targets, weights) * weights)


def _total_forward(
  chunk_tokens, partitioning, hidden, matrix, targets, weights
):
  def local(hidden, matrix, targets, weights):
    vocabulary = _Vocabulary.of(matrix, partitioning)

    def one_chunk(matrix_sum, chunk):
      tokens, targets, weights = chunk
      softmax = _softmax(tokens, targets, vocabulary)
      dlogits = (softmax.probabilities - softmax.is_target) * weights[:, None]
      dlogits = dlogits.astype(tokens.dtype)
      dtokens = vocabulary.sum(_product(dlogits, vocabulary.matrix, (1, 0)))
      matrix_sum += _product(dlogits, tokens, (0, 0))
      return matrix_sum, (softmax.losses, dtokens.astype(tokens.dtype))

    zeros = jnp.zeros(vocabulary.matrix.shape, jnp.float32)
    dmatrix, (losses, dhidden) = lax.scan(
      one_chunk, zeros, _chunks(chunk_tokens, hidden, targets, weights)
    )
    # The sum is linear in the weights: losses are their gradient.
    return (
      _whole(dhidden, like=hidden),
      _summed_slice(dmatrix, partitioning),
      _whole(losses, like=targets),
    )

  run = local
  if partitioning is not None:
    batch, stored = _batch_spec(partitioning), _matrix_spec(partitioning)
    # In the order of the fields.
    run = _on_mesh(local, partitioning, out_specs=(batch, stored, batch))
  gradients = _Gradients(*run(hidden, matrix, targets, weights))
  return jnp.sum(gradients.weights * weights), gradients


def _total_backward(chunk_tokens, partitioning, gradients, dtotal):
  del chunk_tokens, partitioning

  def scaled(gradient: Array, dtype: DTypeLike) -> Array:
    return (gradient.astype(jnp.float32) * dtotal).astype(dtype)

  dtype = gradients.hidden.dtype
  return (
    scaled(gradients.hidden, dtype),
    scaled(gradients.matrix, dtype),
    None,
    scaled(gradients.weights, jnp.float32),
  )


_total.defvjp(_total_forward, _total_backward)


class _Vocabulary(NamedTuple):
  """The rows of the output matrix on this device.

  Attributes:
    matrix: The rows, all their columns.
    first: Token id of the first row.
    size: Rows on all devices.
    axis: Mesh axis over which the rows are cut; None where they are not.
  """

  matrix: Float[Array, "rows d_model"]
  first: Int[Array, ""]
  size: int
  axis: str | None

  @classmethod
  def of(
    cls, matrix: Array, partitioning: Partitioning | None
  ) -> "_Vocabulary":
    rows = matrix.shape[0]
    if partitioning is None:
      return cls(matrix, jnp.int32(0), rows, None)
    matrix = lax.all_gather(matrix, partitioning.fsdp_axis, axis=1, tiled=True)
    axis = partitioning.tensor_axis
    first = lax.axis_index(axis) * rows
    return cls(matrix, first, rows * partitioning.mesh.shape[axis], axis)

  def sum(self, parts: Array) -> Array:
    """The sum of what the slices of the vocabulary contribute."""
    return parts if self.axis is None else lax.psum(parts, self.axis)

  def max(self, parts: Array) -> Array:
    """The largest of what the slices of the vocabulary contribute."""
    return parts if self.axis is None else lax.pmax(parts, self.axis)


class _Softmax(NamedTuple):
  """Of the tokens of a chunk."""

  losses: Float[Array, "chunk"]
  probabilities: Float[Array, "chunk rows"]
  is_target: Float[Array, "chunk rows"]


def _softmax(
  tokens: Float[Array, "chunk d_model"],
  targets: Int[Array, "chunk"],
  vocabulary: _Vocabulary,
) -> _Softmax:
  logits = _product(tokens, vocabulary.matrix, (1, 1))
  top = vocabulary.max(jnp.max(logits, axis=1))
  # With an infinite one, the differences below would be NaN.
  top = jnp.where(jnp.isfinite(top), top, jnp.zeros_like(top))
  exponentials = jnp.exp(logits - top[:, None])
  normaliser = vocabulary.sum(jnp.sum(exponentials, axis=1))
  # Negative ids count from the end, as they do where the logits are indexed.
  targets = jnp.where(targets < 0, targets + vocabulary.size, targets)
  ids = vocabulary.first + jnp.arange(logits.shape[1], dtype=jnp.int32)
  is_target = ids[None] == targets[:, None]
  at_target = vocabulary.sum(jnp.sum(logits, axis=1, where=is_target))
  losses = jnp.log(normaliser) + top - at_target
  is_known = (targets >= 0) & (targets < vocabulary.size)
  return _Softmax(
    losses=jnp.where(is_known, losses, jnp.full_like(losses, jnp.nan)),
    probabilities=exponentials / normaliser[:, None],
    is_target=is_target.astype(jnp.float32),
  )


def _product(
  left: Array, right: Array, contracted: tuple[int, int]
) -> Float[Array, "left right"]:
  axes = ((contracted[0],), (contracted[1],))
  return lax.dot_general(
    left, right, (axes, ((), ())), preferred_element_type=jnp.float32
  )


def _chunks(
  chunk_tokens: int, hidden: Array, *per_token: Array
) -> tuple[Array, ...]:
  """Arrays [batch, seq, ...] as [chunks, tokens, ...].

  Chunks are of one size, and the last one filled with zeros: with a token that
  has no weight.
  """
  tokens = per_token[0].size
  count = max(1, -(-tokens // chunk_tokens))
  size = -(-tokens // count)

  def cut(array):
    flat = array.reshape(tokens, *array.shape[2:])
    fill = [(0, count * size - tokens)] + [(0, 0)] * (flat.ndim - 1)
    return jnp.pad(flat, fill).reshape(count, size, *flat.shape[1:])

  return tuple(cut(array) for array in (hidden, *per_token))


def _whole(chunks: Array, *, like: Array) -> Array:
  """[chunks, tokens, ...] as [batch, seq, ...] again."""
  flat = chunks.reshape(-1, *chunks.shape[2:])
  return flat[: like.shape[0] * like.shape[1]].reshape(like.shape)


def _token_axes(partitioning: Partitioning) -> tuple[str, ...]:
  axes = (*partitioning.batch_axes, partitioning.fsdp_axis)
  return tuple(dict.fromkeys(axes))


def _batch_spec(partitioning: Partitioning) -> PartitionSpec:
  return PartitionSpec(_token_axes(partitioning))


def _matrix_spec(partitioning: Partitioning) -> PartitionSpec:
  return PartitionSpec(partitioning.tensor_axis, partitioning.fsdp_axis)


def _on_mesh(
  local: Callable[..., Any], partitioning: Partitioning, *, out_specs: Any
) -> Callable[..., Any]:
  """On each device, with its tokens and its slice of the matrix."""
  batch = _batch_spec(partitioning)
  return jax.shard_map(
    local,
    mesh=partitioning.mesh,
    in_specs=(batch, _matrix_spec(partitioning), batch, batch),
    out_specs=out_specs,
    # The scan carries a sum that varies over the mesh from zeros that do not.
    check_vma=False,
  )


def _summed_slice(
  dmatrix: Float[Array, "rows d_model"], partitioning: Partitioning | None
) -> Float[Array, "rows columns"]:
  """The sum over all tokens, of the columns that this device stores."""
  if partitioning is None:
    return dmatrix
  fsdp = partitioning.fsdp_axis
  dmatrix = lax.psum_scatter(dmatrix, fsdp, scatter_dimension=1, tiled=True)
  others = [axis for axis in _token_axes(partitioning) if axis != fsdp]
  return lax.psum(dmatrix, tuple(others))
