"""Activation-sparse language models in JAX and Flax."""

from twell_jax import nn
from twell_jax.formats import TwellMatrix
from twell_jax.nn import TransformerConfig
from twell_jax.ops import (
  Activity,
  FFNOutput,
  choose_hot_neurons,
  order_by_rate,
  sparse_ffn,
)

__all__ = [
  "Activity",
  "FFNOutput",
  "TransformerConfig",
  "TwellMatrix",
  "choose_hot_neurons",
  "nn",
  "order_by_rate",
  "sparse_ffn",
]
