"""Activation-sparse language models in JAX and Flax."""

from twell_jax import nn
from twell_jax.formats import HybridMatrix, TwellMatrix
from twell_jax.nn import TransformerConfig
from twell_jax.ops import (
  Activity,
  FFNOutput,
  choose_hot_neurons,
  gate_pack,
  order_by_rate,
  sparse_ffn,
)

__all__ = [
  "Activity",
  "FFNOutput",
  "HybridMatrix",
  "TransformerConfig",
  "TwellMatrix",
  "choose_hot_neurons",
  "gate_pack",
  "nn",
  "order_by_rate",
  "sparse_ffn",
]
