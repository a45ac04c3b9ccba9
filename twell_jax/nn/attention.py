"""Causal self-attention with rotary positions and grouped key/value heads."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from twell_jax.nn.config import ATTENTIONS, check_attention, check_choice
from twell_jax.nn.partitioning import (
  Partitioning,
  constrain,
  parameter,
  use_weight,
)


def rotate_half_split(
  x: Float[Array, "batch seq heads head_dim"],
  positions: Int[Array, "#batch seq"],
  *,
  theta: float,
) -> Float[Array, "batch seq heads head_dim"]:
  """Rotary position embedding, half-split: component i pairs with i + half.

  Pair i turns by the angle position · theta^(−i / half), where half is
  head_dim / 2. Angles and products are float32.
  """
  half = x.shape[-1] // 2
  frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angles = positions[..., None, None].astype(jnp.float32) * frequencies.reshape(
    1, 1, 1, half
  )
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def causal_attention(
  query: Float[Array, "batch seq heads head_dim"],
  key: Float[Array, "batch seq kv_heads head_dim"],
  value: Float[Array, "batch seq kv_heads head_dim"],
  *,
  segment_ids: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
  """Softmax attention of each position to itself and those before it.

  With segment_ids only to those of its own segment.

  Query head i attends with key and value head i // (heads / kv_heads). Scores
  and softmax are float32. `jax.nn.dot_product_attention` computes the same, but
  its bfloat16 gradient mixes dtypes and fails under strict dtype promotion.
  """
  batch, seq, heads, head_dim = query.shape
  kv_heads = key.shape[2]
  grouped = query.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
  scores = jnp.einsum(
    "bqngd,bknd->bngqk", grouped, key, preferred_element_type=jnp.float32
  )
  visible = jnp.tril(jnp.ones((seq, seq), jnp.bool_)).reshape(1, 1, 1, seq, seq)
  if segment_ids is not None:
    same = _same_segment(segment_ids)
    visible = visible & same.reshape(batch, 1, 1, seq, seq)
  scores = jnp.where(visible, scores / math.sqrt(head_dim), -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  mixed = jnp.einsum("bngqk,bknd->bqngd", weights, value)
  return mixed.reshape(query.shape)


def cudnn_attention(
  query: Float[Array, "batch seq heads head_dim"],
  key: Float[Array, "batch seq kv_heads head_dim"],
  value: Float[Array, "batch seq kv_heads head_dim"],
  *,
  segment_ids: Int[Array, "batch seq"] | None = None,
  partitioning: Partitioning | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
  """`causal_attention` by cuDNN's fused kernels, which hold no scores.

  For the backward pass they keep, besides the arguments, the result and the
  logarithm of each softmax's divisor. With segment_ids they read a number for
  each pair of positions of a sequence, which all heads share.

  Args:
    query: In bfloat16 or float16, as key and value.
    key: A head for each group of query heads.
    value: As key.
    segment_ids: As in `causal_attention`.
    partitioning: The mesh over which sequences and heads are cut.

  Raises:
    ValueError: A dtype or head_dim that cuDNN does not take (see
      `TransformerConfig.attention`), a device that is no NVIDIA GPU, or no
      cuDNN.
  """
  check_attention("cudnn", dtype=query.dtype.name, head_dim=query.shape[-1])
  _check_platform(query, partitioning)
  if partitioning is None:
    return _cudnn(query, key, value, segment_ids)
  # Each device computes its own sequences and heads. Left to the partitioner,
  # cuDNN's primitives do not compile where the arrays lie in another way or not
  # alike: their rule refuses such arrays instead of moving them.
  spec = partitioning.sharding(("batch", None, "heads", None)).spec
  rows = partitioning.sharding(("batch", None)).spec
  return jax.shard_map(
    _cudnn,
    mesh=partitioning.mesh,
    in_specs=(spec, spec, spec, None if segment_ids is None else rows),
    out_specs=spec,
  )(query, key, value, segment_ids)


def _same_segment(
  segment_ids: Int[Array, "batch seq"],
) -> Bool[Array, "batch seq seq"]:
  """Whether two positions of a sequence are of one segment."""
  return segment_ids[:, :, None] == segment_ids[:, None, :]


def _cudnn(
  query: Array, key: Array, value: Array, segment_ids: Array | None
) -> Array:
  mask = None
  if segment_ids is not None:
    mask = jnp.expand_dims(_same_segment(segment_ids), 1)
  try:
    return jax.nn.dot_product_attention(
      query, key, value, mask=mask, is_causal=True, implementation="cudnn"
    )
  except RuntimeError as error:
    raise ValueError(
      f"attention = 'cudnn' and JAX has no cuDNN ({error}): install"
      " nvidia-cudnn-cu13, which is part of jax[cuda13], or choose attention ="
      " 'full'"
    ) from error


def _check_platform(x: Array, partitioning: Partitioning | None) -> None:
  """Raises ValueError unless a computation on x is traced for a GPU."""
  if partitioning is not None:
    platform = partitioning.mesh.devices.flat[0].platform
  else:
    # The mesh may be a target without hardware.
    target = jax.typeof(x).sharding.mesh.abstract_device
    platform = jax.default_backend() if target is None else target.platform
  if platform not in ("gpu", "cuda"):
    raise ValueError(
      "attention = 'cudnn' needs an NVIDIA GPU and this device is a"
      f" {platform}: choose attention = 'full'"
    )


class Attention(nnx.Module):
  """Causal attention without biases; scores and softmax are float32.

  Parameters: query [d_model, heads, head_dim], key and value
  [d_model, kv_heads, head_dim], out [heads, head_dim, d_model].
  """

  def __init__(
    self,
    d_model: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope_theta: float = 100_000.0,
    implementation: str = "full",
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    init_std: float = 0.02,
    partitioning: Partitioning | None = None,
    rngs: nnx.Rngs,
  ):
    """Draws the parameters.

    Args:
      d_model: Width of the input and the output.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; a divisor of num_heads.
      head_dim: Width of a head; even.
      rope_theta: Base of the rotary frequencies.
      implementation: "full" or "cudnn", see `TransformerConfig.attention`.
      dtype: Dtype of the computation; None is that of x.
      param_dtype: Dtype of the parameters.
      init_std: Standard deviation of the initial parameters.
      partitioning: The mesh over which sequences and heads are cut.
      rngs: Source of the initial parameters (stream "params").
    """
    check_choice("implementation", implementation, ATTENTIONS)
    self.implementation = implementation
    self.rope_theta = rope_theta
    self.dtype = dtype
    self.partitioning = partitioning

    def projection(shape, axes):
      return parameter(rngs, shape, axes, init_std=init_std, dtype=param_dtype)

    kv_shape = (d_model, num_kv_heads, head_dim)
    kv_axes = ("embed", "kv_heads", "head_dim")
    self.query = projection(
      (d_model, num_heads, head_dim), ("embed", "heads", "head_dim")
    )
    self.key = projection(kv_shape, kv_axes)
    self.value = projection(kv_shape, kv_axes)
    self.out = projection(
      (num_heads, head_dim, d_model), ("heads", "head_dim", "embed")
    )

  def __call__(
    self,
    x: Float[Array, "batch seq d_model"],
    *,
    positions: Int[Array, "#batch seq"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
  ) -> Float[Array, "batch seq d_model"]:
    """Attends from each token to itself and the tokens before it.

    Args:
      x: The input.
      positions: Angles of the rotary embedding; 0, 1, 2, … if None. They do not
        change who sees whom: that is the order in the sequence.
      segment_ids: Tokens see those with their own number only; None: all.

    Returns:
      The attended values, projected back to d_model.
    """
    dtype = x.dtype if self.dtype is None else self.dtype
    x = x.astype(dtype)
    if positions is None:
      positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]

    def project(param, heads_axis):
      weight = use_weight(param, dtype=dtype, partitioning=self.partitioning)
      heads = jnp.einsum("bsd,dhk->bshk", x, weight)
      return constrain(
        heads, ("batch", None, heads_axis, None), self.partitioning
      )

    query = rotate_half_split(
      project(self.query, "heads"), positions, theta=self.rope_theta
    )
    key = rotate_half_split(
      project(self.key, "kv_heads"), positions, theta=self.rope_theta
    )
    value = project(self.value, "kv_heads")
    if self.implementation == "cudnn":
      mixed = cudnn_attention(
        query,
        key,
        value,
        segment_ids=segment_ids,
        partitioning=self.partitioning,
      )
    else:
      mixed = causal_attention(query, key, value, segment_ids=segment_ids)
    out = use_weight(self.out, dtype=dtype, partitioning=self.partitioning)
    return jnp.einsum("bshk,hkd->bsd", mixed, out)
