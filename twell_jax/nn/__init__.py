"""Flax modules: the sparse feed-forward layer and a transformer LM.

They are nnx modules; `twell_jax.nn.linen` has the layer for linen models.
"""

from twell_jax.nn.attention import Attention, rotate_half_split
from twell_jax.nn.config import PAPER_SIZES, TransformerConfig, paper_config
from twell_jax.nn.convert import (
  from_kernels,
  load_params,
  params_of,
  to_kernels,
)
from twell_jax.nn.ffn import SparseFFN
from twell_jax.nn.norm import RMSNorm
from twell_jax.nn.partitioning import (
  Partitioning,
  logical_axes,
  num_parameters,
)
from twell_jax.nn.transformer import Block, LMOutput, TransformerLM

__all__ = [
  "PAPER_SIZES",
  "Attention",
  "Block",
  "LMOutput",
  "Partitioning",
  "RMSNorm",
  "SparseFFN",
  "TransformerConfig",
  "TransformerLM",
  "from_kernels",
  "load_params",
  "logical_axes",
  "num_parameters",
  "paper_config",
  "params_of",
  "rotate_half_split",
  "to_kernels",
]
