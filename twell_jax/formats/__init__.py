"""Packed formats of sparse activations."""

from twell_jax.formats.capacity import Capacities, capacities
from twell_jax.formats.ell import EllMatrix
from twell_jax.formats.hybrid import HybridMatrix, RowMap
from twell_jax.formats.transpose import NeuronLists, transpose_ell
from twell_jax.formats.twell import TwellMatrix

__all__ = [
  "Capacities",
  "EllMatrix",
  "HybridMatrix",
  "NeuronLists",
  "RowMap",
  "TwellMatrix",
  "capacities",
  "transpose_ell",
]
