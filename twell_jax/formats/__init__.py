"""Packed formats of sparse activations."""

from twell_jax.formats.twell import TwellMatrix

__all__ = ["TwellMatrix"]
