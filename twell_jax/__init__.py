"""Activation-sparse language models in JAX."""

from twell_jax.ops import Activity, FFNOutput, sparse_ffn

__all__ = ["Activity", "FFNOutput", "sparse_ffn"]
