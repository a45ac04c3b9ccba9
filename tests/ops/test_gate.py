"""The gate product that writes TwELL, as an operation of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.mosaic_cases import bf16_case
from twell_jax.formats import TwellMatrix
from twell_jax.ops import gate_pack, reference


@pytest.mark.parametrize(("tile_width", "slots"), [(256, 32), (64, 8)])
@pytest.mark.usefixtures("whole_rows")
def test_gate_pack(tile_width, slots, rng):
  case = bf16_case(rng, "heavy tail", d_ff=300)
  x = case.x.copy()
  x[4, 5] = np.nan
  sizes = {"tile_width": tile_width, "slots": slots}
  actual = jax.jit(
    functools.partial(gate_pack, implementation="mosaic", **sizes)
  )(x, case.gate)
  expected = gate_pack(x, case.gate, **sizes)
  assert (actual.d_ff, actual.tile_width) == (300, tile_width)
  np.testing.assert_array_equal(actual.counts, expected.counts)
  np.testing.assert_array_equal(actual.columns, expected.columns)
  np.testing.assert_array_equal(
    actual.values.astype(np.float32), expected.values.astype(np.float32)
  )


def test_gate_pack_on_any_device(rng):
  x = rng.normal(size=(5, 7)).astype(np.float32)
  gate = rng.normal(size=(9, 7)).astype(np.float32)
  matrix = gate_pack(x, gate, tile_width=4, slots=4)
  z = reference.per_neuron(jnp.asarray(x), jnp.asarray(gate))
  jax.tree.map(
    np.testing.assert_array_equal,
    matrix,
    TwellMatrix.pack(z, tile_width=4, slots=4),
  )


@pytest.mark.parametrize(
  ("x", "gate", "message"),
  [
    (np.zeros((2, 3, 4)), np.zeros((5, 4)), r"x \(2, 3, 4\) and gate \(5, 4\)"),
    (np.zeros((2, 3)), np.zeros((5, 4)), r"must be \[tokens, d_model\]"),
    (np.zeros((2, 4), np.int32), np.zeros((5, 4)), "x is int32 and gate is f"),
  ],
)
def test_gate_pack_refuses(x, gate, message):
  with pytest.raises(ValueError, match=message):
    gate_pack(jnp.asarray(x), jnp.asarray(gate))
  with pytest.raises(ValueError, match="'cuda' is unknown: use one of"):
    gate_pack(jnp.zeros((2, 4)), jnp.zeros((5, 4)), implementation="cuda")
