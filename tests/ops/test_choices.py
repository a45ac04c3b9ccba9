"""Choices of speed and memory: what is refused, and what it is called."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from twell_jax.formats import Capacities
from twell_jax.nn import TransformerConfig
from twell_jax.ops import sparse_ffn

SIZES: dict[str, Any] = {
  "vocab_size": 32,
  "d_model": 16,
  "d_ff": 24,
  "num_layers": 1,
  "num_heads": 2,
  "num_kv_heads": 2,
}


@pytest.mark.parametrize(
  ("choices", "message"),
  [
    ({"capacities": 5}, r"capacities = 5 must be a pair of ints: give"),
    ({"capacities": (2,)}, r"capacities = \(2,\) must be a pair"),
    ({"capacities": Capacities(0, 0)}, r"capacities.width = 0 must be an"),
    ({"capacities": Capacities(True, 0)}, r"width = True must be an int"),
    ({"capacities": Capacities(8, -1)}, r"dense_rows = -1 must be an int"),
    ({"dense_above": -0.1}, r"dense_above = -0.1 must be a Python float"),
    ({"dense_above": 1.5}, r"dense_above = 1.5 .* from 0, .* to 1"),
    ({"dense_above": float("nan")}, r"dense_above = nan must be"),
    ({"dense_above": True}, r"dense_above = True must be a Python float"),
    ({"dense_above": np.float32(0.1)}, r"dense_above = .* Python float"),
    ({"dense_above": "much"}, r"dense_above = 'much' must be"),
  ],
)
def test_refuses(choices, message):
  matrix = jnp.zeros((40, 4))
  with pytest.raises(ValueError, match=message) as error:
    sparse_ffn(jnp.zeros((3, 4)), matrix, None, matrix, **choices)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"ell_width": 0}, r"width = 0 must be an int .*\(ell_width of"),
    ({"dense_rows": 4}, r"dense_rows = 4 are kept .* set ell_width too"),
    ({"dense_above": 2.0}, r"dense_above = 2.0 must be"),
    ({"activation": "silu", "ell_width": 8}, r"\(ell_width\) = .* is dense"),
    ({"activation": "silu", "dense_above": 0.1}, r"dense_above = 0.1 is a ch"),
    ({"cross_entropy_chunk": 1.5}, r"cross_entropy_chunk = 1.5 must be an int"),
  ],
)
def test_a_config_refuses(fields, message):
  with pytest.raises(ValueError, match=message):
    TransformerConfig(**SIZES | fields)


def test_a_config_says_how():
  config = TransformerConfig(
    **SIZES, hot_neurons=3, ell_width=8, dense_rows=2, dense_above=0.5
  )
  assert config.choices == (3, Capacities(8, 2), 0.5)
