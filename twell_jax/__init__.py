"""Activation-sparse language models in JAX and Flax."""

from twell_jax import nn
from twell_jax.formats import TwellMatrix
from twell_jax.nn import TransformerConfig
from twell_jax.ops import Activity, FFNOutput, sparse_ffn

__all__ = [
  "Activity",
  "FFNOutput",
  "TransformerConfig",
  "TwellMatrix",
  "nn",
  "sparse_ffn",
]
