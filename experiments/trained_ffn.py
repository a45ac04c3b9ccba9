"""The feed-forward layers of a trained model: what they read, how fast."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32, PyTree

from experiments import timing
from experiments.dense_layer import (
  DenseKernels,
  dense_ffn,
  dense_ffn_by_neuron,
)
from twell_jax import nn, training
from twell_jax.nn import TransformerLM
from twell_jax.ops import sparse_ffn
from twell_jax.training.sharding import HostBatch


class LayerCall(NamedTuple):
  """One feed-forward layer of a model, and its input for some text."""

  x: Float[Array, "tokens d_model"]
  gate: Float[Array, "d_ff d_model"]
  up: Float[Array, "d_ff d_model"] | None
  down: Float[Array, "d_ff d_model"]


def unsharded(
  config: nn.TransformerConfig, params: PyTree[Array]
) -> TransformerLM:
  """The trained module on one device, free of the mesh it was trained on."""
  module = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
  return nnx.merge(nnx.split(module)[0], params)


@nnx.jit
def layer_calls(
  model: TransformerLM, tokens: Int32[Array, "batch seq"]
) -> list[LayerCall]:
  """The call of each feed-forward layer when the model reads `tokens`.

  Args:
    model: A module without a mesh (`unsharded`).
    tokens: Text.

  Returns:
    One call per layer, the tokens of all sequences in one axis.
  """
  positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  x = model.embedding[...][tokens]
  structure, stacked = nnx.split(model.layers)
  calls = []
  for layer in range(model.config.num_layers):
    block = nnx.merge(
      structure, jax.tree.map(lambda leaf, i=layer: leaf[i], stacked)
    )
    x = x + block.attention(block.attention_norm(x), positions=positions)
    read = block.ffn_norm(x)
    up = None if block.ffn.up is None else block.ffn.up[...]
    calls.append(
      LayerCall(
        read.reshape(-1, read.shape[-1]),
        block.ffn.gate[...],
        up,
        block.ffn.down[...],
      )
    )
    x = x + block.ffn(read).y
  return calls


class Speed(NamedTuple):
  """The dense and the sparse way to the same result, timed in turn."""

  what: str
  dense: timing.Timing
  sparse: timing.Timing

  @property
  def ratio(self) -> float:
    """How many times as long the dense way takes."""
    return self.dense.median_ms / self.sparse.median_ms


def forward_speed(
  calls: Sequence[LayerCall], *, tokens: int, what: str, min_seconds: float
) -> Speed:
  """Times all the layers, on `tokens` tokens a call.

  The dense side keeps its kernels as it likes best: [in, out] or [out, in].
  """
  starts = range(0, calls[0].x.shape[0] - tokens + 1, tokens)
  # Different tokens in each call, so that decoding does not read the rows of
  # the same few neurons from the cache.
  inputs = [
    [call.x[start : start + tokens] for call in calls]
    for start in itertools.islice(starts, 32)
  ]
  layers = [call[1:] for call in calls]
  kernels = [
    DenseKernels(call.gate.T, None if call.up is None else call.up.T, call.down)
    for call in calls
  ]
  by_neuron = [DenseKernels(call.gate, call.up, call.down.T) for call in calls]

  def over_layers(layer):
    def function(xs, weights):
      return [layer(x, w) for x, w in zip(xs, weights)]

    return function

  times = timing.interleaved(
    {
      "dense": timing.contender(
        over_layers(dense_ffn), [(xs, kernels) for xs in inputs]
      ),
      "dense by neuron": timing.contender(
        over_layers(dense_ffn_by_neuron), [(xs, by_neuron) for xs in inputs]
      ),
      "sparse": timing.contender(
        over_layers(lambda x, w: sparse_ffn(x, *w).y),
        [(xs, layers) for xs in inputs],
      ),
    },
    min_seconds=min_seconds,
  )
  dense = min(times["dense"], times["dense by neuron"])
  return Speed(what, dense, times["sparse"])


def step_speed(
  config: nn.TransformerConfig,
  options: training.TrainOptions,
  params: PyTree[Array],
  batch: HostBatch,
  *,
  mesh: jax.sharding.Mesh,
  min_seconds: float,
) -> Speed:
  """Times a whole update of the trained model, sparse against dense layers."""
  times = timing.interleaved(
    {
      name: _updates(
        dataclasses.replace(config, implementation=implementation),
        options,
        params,
        batch,
        mesh=mesh,
      )
      for name, implementation in (("dense", "reference"), ("sparse", "xla"))
    },
    min_seconds=min_seconds,
  )
  return Speed("train step, whole model", times["dense"], times["sparse"])


def _updates(
  config: nn.TransformerConfig,
  options: training.TrainOptions,
  params: PyTree[Array],
  batch: HostBatch,
  *,
  mesh: jax.sharding.Mesh,
) -> timing.Contender:
  """Updates from the trained parameters, too small to change their activity."""
  model = training.abstract_model(config, nn.Partitioning(mesh))
  still = dataclasses.replace(
    options,
    optimizer=dataclasses.replace(
      options.optimizer, learning_rate=1e-9, weight_decay=0.0
    ),
  )
  optimizer, step = training.make_updates(model, still)
  state = training.initial_state(model, optimizer, seed=options.seed)
  # Copied: an update consumes the state it is given.
  state = state._replace(params=jax.tree.map(jnp.copy, params))
  placed = training.place_batch(batch, model.partitioning)

  def update() -> Array:
    nonlocal state
    state, statistics = step(state, placed)
    return statistics.loss

  return timing.Contender(update, [()], temporary_bytes=None)


def held_out_tokens(
  batches: Sequence[HostBatch], *, tokens: int
) -> Int32[Array, "batch seq"]:
  """Whole sequences of held-out text, at least `tokens` tokens of them."""
  rows = np.concatenate([batch["inputs"] for batch in batches])
  wanted = -(-tokens // rows.shape[1])
  if len(rows) < wanted:
    raise ValueError(
      f"held-out text has {len(rows)} sequences but {wanted} are to be timed:"
      " raise config.data.held_out_fraction"
    )
  return jnp.asarray(rows[:wanted])
