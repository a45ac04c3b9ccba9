"""A decoder-only transformer whose feed-forward layers are sparse.

The blocks are one module whose parameters are stacked along a leading axis
"layers", run by a scan: compile time does not grow with depth.

What the scan keeps of a block for the backward pass is decided by a policy (the
names are those of `TransformerConfig.remat`). With all but "none" it is the
block's input, and of what the block computes

    matmuls     q, k, v, attention's output, what the FFN asks to be kept
    attention   what the FFN asks to be kept
    layer       nothing

What the FFN asks for is the residuals that `sparse_ffn` names, packed where its
implementation packs them, or z and u of the dense SiLU layer: neither is made
again in the backward pass, unless `TransformerConfig.ffn_residuals` is
"recomputed", under any policy. With cuDNN, "matmuls" and "attention" also keep
its result, before the output matrix, and its softmax statistics; without, it is
made again.

Nothing else is kept, in particular no weight in the form in which it is used:
gathered from the mesh, in the dtype of the computation.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Primitive
from jaxtyping import Array, Float, Int

from twell_jax.nn.attention import Attention
from twell_jax.nn.config import TransformerConfig
from twell_jax.nn.ffn import SparseFFN
from twell_jax.nn.norm import RMSNorm
from twell_jax.nn.partitioning import (
  Partitioning,
  constrain,
  parameter,
  use_weight,
)
from twell_jax.ops import Activity, FFNOutput
from twell_jax.ops.ffn import RESIDUALS

_STACKED = {nnx.PARTITION_NAME: "layers"}


class LMOutput(NamedTuple):
  """What the language model returns.

  Attributes:
    logits: Unnormalised log-probabilities of the next token, float32.
    activity: The `Activity` of every layer, stacked along a first axis: l1 [L],
      active [L, batch, seq], fired [L, d_ff], overflowed [L] and
      dense_tokens [L].
  """

  logits: Float[Array, "batch seq vocab"]
  activity: Activity


class HiddenStates(NamedTuple):
  """What the model computes before its output matrix.

  Attributes:
    hidden: The normalised residual stream, in the dtype of the computation.
    activity: As in `LMOutput`.
  """

  hidden: Float[Array, "batch seq d_model"]
  activity: Activity


class Block(nnx.Module):
  """Attention, then the feed-forward layer; each normalises what it reads."""

  def __init__(
    self,
    config: TransformerConfig,
    *,
    partitioning: Partitioning | None = None,
    rngs: nnx.Rngs,
  ):
    self.partitioning = partitioning
    self.recomputes_ffn = config.ffn_residuals == "recomputed"
    self.attention_norm = _norm(config)
    self.attention = Attention(
      config.d_model,
      num_heads=config.num_heads,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.resolved_head_dim,
      rope_theta=config.rope_theta,
      implementation=config.attention,
      dtype=jnp.dtype(config.dtype),
      param_dtype=jnp.dtype(config.param_dtype),
      init_std=config.init_std,
      partitioning=partitioning,
      rngs=rngs,
    )
    self.ffn_norm = _norm(config)
    self.ffn = SparseFFN(
      config.d_model,
      config.d_ff,
      gated=config.gated,
      activation=config.activation,
      implementation=config.implementation,
      **config.choices._asdict(),
      dtype=jnp.dtype(config.dtype),
      param_dtype=jnp.dtype(config.param_dtype),
      init_std=config.init_std,
      partitioning=partitioning,
      rngs=rngs,
    )

  def __call__(
    self,
    x: Float[Array, "batch seq d_model"],
    *,
    positions: Int[Array, "#batch seq"],
    segment_ids: Int[Array, "batch seq"] | None = None,
  ) -> FFNOutput:
    """Returns the new residual stream and the activity of the FFN."""
    x = constrain(x, ("batch", None, None), self.partitioning)
    x = x + self.attention(
      self.attention_norm(x), positions=positions, segment_ids=segment_ids
    )
    x = constrain(x, ("batch", None, None), self.partitioning)
    run_ffn = SparseFFN.__call__
    if self.recomputes_ffn:
      # The scan already keeps XLA from merging the two computations.
      run_ffn = nnx.remat(run_ffn, prevent_cse=False)
    output = run_ffn(self.ffn, self.ffn_norm(x))
    return FFNOutput(x + output.y, output.activity)


class TransformerLM(nnx.Module):
  """Decoder-only language model: tokens in, logits and FFN activity out."""

  def __init__(
    self,
    config: TransformerConfig,
    *,
    partitioning: Partitioning | None = None,
    rngs: nnx.Rngs,
  ):
    """Draws the parameters.

    Args:
      config: The model.
      partitioning: The mesh on which the model runs; None for one device.
      rngs: Source of the initial parameters (stream "params").
    """
    self.config = config
    self.partitioning = partitioning
    self.embedding = self._vocabulary(rngs)

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(
      in_axes=0,
      out_axes=0,
      axis_size=config.num_layers,
      transform_metadata=_STACKED,
    )
    def stacked_blocks(rngs: nnx.Rngs) -> Block:
      return Block(config, partitioning=partitioning, rngs=rngs)

    self.layers = stacked_blocks(rngs)
    self.final_norm = _norm(config)
    self.head = None if config.tie_embeddings else self._vocabulary(rngs)

  def __call__(
    self,
    tokens: Int[Array, "batch seq"],
    *,
    positions: Int[Array, "#batch seq"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
  ) -> LMOutput:
    """Predicts each next token.

    Args:
      tokens: Token ids below vocab_size; a larger one makes its sequence NaN.
      positions: Rotary positions; 0, 1, 2, … if None.
      segment_ids: Which document of its sequence a token is of: it sees those
        of its own only. All if None.

    Returns:
      Logits for the token after each position, and per-layer activity.
    """
    hidden, activity = self.hidden_states(
      tokens, positions=positions, segment_ids=segment_ids
    )
    matrix = self._use_weight(self.output_matrix)
    logits = jnp.einsum(
      "bsd,vd->bsv", hidden, matrix, preferred_element_type=jnp.float32
    )
    logits = constrain(logits, ("batch", None, "vocab"), self.partitioning)
    return LMOutput(logits, activity)

  def hidden_states(
    self,
    tokens: Int[Array, "batch seq"],
    *,
    positions: Int[Array, "#batch seq"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
  ) -> HiddenStates:
    """What `output_matrix` makes logits of; the arguments are the model's."""
    if positions is None:
      positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    embedding = self._use_weight(self.embedding)
    # "fill" writes NaN for an id outside the table instead of clamping it.
    x = jnp.take(embedding, tokens, axis=0, mode="fill")
    x, activity = self._run_layers(x, positions, segment_ids)
    x = self.final_norm(constrain(x, ("batch", None, None), self.partitioning))
    return HiddenStates(x, activity)

  @property
  def output_matrix(self) -> nnx.Param:
    """A row [d_model] for each token: the head, or the embedding if tied."""
    return self.embedding if self.head is None else self.head

  def _use_weight(self, param: nnx.Param) -> Array:
    return use_weight(
      param,
      dtype=jnp.dtype(self.config.dtype),
      partitioning=self.partitioning,
    )

  def _run_layers(
    self,
    x: Float[Array, "batch seq d_model"],
    positions: Int[Array, "#batch seq"],
    segment_ids: Int[Array, "batch seq"] | None,
  ) -> FFNOutput:
    def run(block, x, positions, segment_ids):
      output = block(x, positions=positions, segment_ids=segment_ids)
      return output.y, output.activity

    if self.config.remat != "none":
      # The scan already keeps XLA from merging the two computations.
      run = nnx.remat(run, prevent_cse=False, policy=remat_policy(self.config))
    scan = nnx.scan(
      run,
      in_axes=(0, nnx.Carry, None, None),
      out_axes=(nnx.Carry, 0),
      transform_metadata=_STACKED,
    )
    return FFNOutput(*scan(self.layers, x, positions, segment_ids))

  def _vocabulary(self, rngs: nnx.Rngs) -> nnx.Param:
    return parameter(
      rngs,
      (self.config.vocab_size, self.config.d_model),
      ("vocab", "embed"),
      init_std=self.config.init_std,
      dtype=jnp.dtype(self.config.param_dtype),
    )


def _norm(config: TransformerConfig) -> RMSNorm:
  return RMSNorm(
    config.d_model,
    eps=config.norm_eps,
    dtype=jnp.dtype(config.dtype),
    param_dtype=jnp.dtype(config.param_dtype),
  )


_Policy = Callable[..., Any]
_is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def _is_ffn_product(
  primitive: Primitive, *operands: Any, **params: Any
) -> bool:
  """Whether it multiplies by a matrix of neurons.

  These are [d_ff, d_model]; the weights of attention have an axis of heads.
  """
  return _is_product(primitive, *operands, **params) and any(
    operand.ndim == 2 for operand in operands
  )


def _is_attention_product(
  primitive: Primitive, *operands: Any, **params: Any
) -> bool:
  return _is_product(primitive, *operands, **params) and not _is_ffn_product(
    primitive, *operands, **params
  )


def _is_cudnn_attention(primitive: Primitive, *_: Any, **__: Any) -> bool:
  return primitive.name.startswith("dot_product_attention_fwd")


def remat_policy(config: TransformerConfig) -> _Policy:
  """What a block keeps besides its input, if its `remat` is not "none"."""
  rules: list[_Policy] = [jax.checkpoint_policies.nothing_saveable]
  if config.remat != "layer":
    rules.append(_is_cudnn_attention)
    if config.remat == "matmuls":
      rules.append(_is_attention_product)
    if config.ffn_residuals == "kept":
      rules.append(_is_ffn_product)
      rules.append(jax.checkpoint_policies.save_only_these_names(RESIDUALS))
  return functools.reduce(
    jax.checkpoint_policies.save_from_both_policies, rules
  )
