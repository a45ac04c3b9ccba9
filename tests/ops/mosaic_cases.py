"""Small layers for the mosaic implementation, and its op."""

import functools

import jax
import jax.numpy as jnp

from tests.ops.dense_layer import make_case
from twell_jax.ops import sparse_ffn

# Nothing here divides anything. The neurons are two tiles of TwELL, not more:
# each is a block of the backward pass, and the interpreter is slow.
SIZE = {"tokens": (13,), "d_model": 33, "d_ff": 100}


def bf16_case(rng, activity, **changes):
  return make_case(rng, activity, **SIZE | changes).as_dtype(jnp.bfloat16)


def op_for(hot_neurons, **options):
  """The op, which gathers however many neurons are active."""
  choices = {"hot_neurons": hot_neurons, "dense_above": 1.0} | options
  return functools.partial(sparse_ffn, implementation="mosaic", **choices)


def shapes(tokens, d_model, d_ff):
  """Of x and the three matrices."""
  matrix = jax.ShapeDtypeStruct((d_ff, d_model), jnp.bfloat16)
  x = jax.ShapeDtypeStruct((tokens, d_model), jnp.bfloat16)
  return x, matrix, matrix, matrix
