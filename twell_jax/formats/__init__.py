"""Packed formats of sparse activations."""
