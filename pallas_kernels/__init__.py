"""Mosaic GPU kernels for Hopper, written in Pallas: arrays in, arrays out.

One module per kernel, each with its frozen config and a docstring that says
what moves where. No autodiff and no Flax: those are twell_jax's.
"""
