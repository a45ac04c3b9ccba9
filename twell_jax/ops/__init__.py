"""Differentiable operations on activation-sparse layers."""

from twell_jax.ops.ffn import IMPLEMENTATIONS, sparse_ffn
from twell_jax.ops.outputs import Activity, FFNOutput
from twell_jax.ops.sharded import sharded_sparse_ffn

__all__ = [
  "IMPLEMENTATIONS",
  "Activity",
  "FFNOutput",
  "sharded_sparse_ffn",
  "sparse_ffn",
]
