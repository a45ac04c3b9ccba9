"""Differentiable operations on activation-sparse layers."""

from twell_jax.ops.ffn import IMPLEMENTATIONS, sparse_ffn
from twell_jax.ops.gate import gate_pack
from twell_jax.ops.hot_cold import (
  H200,
  DeviceCosts,
  choose_hot_neurons,
  order_by_rate,
  rate_order,
)
from twell_jax.ops.outputs import Activity, FFNOutput
from twell_jax.ops.sharded import sharded_sparse_ffn

__all__ = [
  "H200",
  "IMPLEMENTATIONS",
  "Activity",
  "DeviceCosts",
  "FFNOutput",
  "choose_hot_neurons",
  "gate_pack",
  "order_by_rate",
  "rate_order",
  "sharded_sparse_ffn",
  "sparse_ffn",
]
