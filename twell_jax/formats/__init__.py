"""Packed formats of sparse activations."""

from twell_jax.formats.ell import EllMatrix
from twell_jax.formats.twell import TwellMatrix

__all__ = ["EllMatrix", "TwellMatrix"]
