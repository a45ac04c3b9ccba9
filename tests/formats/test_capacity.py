import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_jax.formats import Capacities, HybridMatrix, capacities


def least_memory(active, *, d_ff, tokens, slack, value_bytes):
  """The rule of `capacities`, by trying every width."""
  best = None
  for width in range(1, d_ff + 1):
    if width % 128 and width != d_ff:
      continue
    beyond = max((layer > width).sum() for layer in active)
    rows = math.ceil(slack * beyond * tokens / active.shape[1])
    rows = min(tokens, 64 * max(1, math.ceil(rows / 64)))
    if width == d_ff:
      rows = 0
    size = tokens * width * (value_bytes + 2) + rows * d_ff * value_bytes
    if best is None or size < best[0]:
      best = size, Capacities(width, rows)
  assert best is not None
  return best[1]


@given(
  seed=st.integers(0, 2**32 - 1),
  d_ff=st.sampled_from([1, 100, 128, 129, 1024, 5632]),
  layers=st.integers(1, 3),
  tokens=st.sampled_from([1, 63, 300, 16384]),
  slack=st.sampled_from([1.0, 1.5, 4.0]),
  value_bytes=st.sampled_from([2, 4, 8]),
)
def test_capacities_take_the_least_memory(
  seed, d_ff, layers, tokens, slack, value_bytes
):
  rng = np.random.default_rng(seed)
  # Heavy tails about means of very different sizes.
  mean = np.exp(rng.uniform(0, np.log(d_ff + 1), size=(layers, 1)))
  active = rng.lognormal(np.log(mean), 1.0, size=(layers, 200))
  active = np.minimum(active, d_ff).astype(np.int32)
  options = {
    "d_ff": d_ff,
    "tokens": tokens,
    "slack": slack,
    "value_bytes": value_bytes,
  }
  sizes = capacities(active, **options)
  assert sizes == least_memory(active, **options)
  # They fit what they are for.
  shape = jax.ShapeDtypeStruct((tokens, d_ff), jnp.bfloat16)
  jax.eval_shape(functools.partial(HybridMatrix.pack, **sizes._asdict()), shape)


def test_capacities_of_known_activity():
  # 30 active in most tokens, and one token in 50 with 1000.
  active = np.where(np.arange(1000) % 50 == 0, 1000, 30)
  assert capacities(active, d_ff=5632) == (128, 64)
  assert capacities(active, d_ff=5632, tokens=16384) == (128, 512)
  assert capacities(active, d_ff=5632, tokens=16384, slack=3) == (128, 1024)
  # Shared with a layer that has one token in 4 with 200.
  layers = np.stack([active, np.where(np.arange(1000) % 4 == 0, 200, 30)])
  assert capacities(layers, d_ff=5632, tokens=16384) == (256, 512)
  # As at initialisation: half of the neurons of every token.
  half = np.full(1000, 2816)
  assert capacities(half, d_ff=5632, tokens=1000) == (2816, 64)
  silent = np.zeros(1000, int)
  assert capacities(silent, d_ff=5632, tokens=16384) == (128, 64)
  assert capacities(silent, d_ff=100, tokens=16384) == (100, 0)


def test_capacities_break_even_where_the_docstring_says():
  def width(one_in):
    active = np.where(np.arange(2**14) % one_in == 0, 200, 30)
    return capacities(active, d_ff=5632).width

  assert (width(40), width(50)) == (256, 128)


@pytest.mark.parametrize(
  ("active", "options", "message"),
  [
    (np.zeros(0, int), {}, r"active is int64\[0\] but must be integers"),
    (np.array(3), {}, r"active is int64\[\] but must be integers"),
    (np.ones(3), {}, r"active is float64\[3\] but must be integers"),
    (np.array([1, 9]), {}, r"active is in 1\.\.9 but must be in 0\.\.d_ff=8"),
    (np.array([-1, 2]), {}, r"active is in -1\.\.2 but must be in 0\.\.d_ff=8"),
    (np.array([0]), {"d_ff": 0}, r"in 0\.\.d_ff=0, which is at least 1"),
    (np.array([1]), {"tokens": 0}, "tokens=0 must be at least 1"),
    (np.array([1]), {"slack": 0.9}, r"slack=0\.9 must be at least 1"),
    (np.array([1]), {"slack": math.nan}, "slack=nan must be at least 1"),
    (np.array([1]), {"slack": math.inf}, "slack=inf .* and finite"),
    (np.array([1]), {"value_bytes": 0}, "value_bytes=0 must be at least 1"),
  ],
)
def test_capacities_refuses(active, options, message):
  with pytest.raises(ValueError, match=message) as error:
    capacities(active, **{"d_ff": 8, **options})
  assert "\n" not in str(error.value)
