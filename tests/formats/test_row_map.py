import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_jax.formats import RowMap


@functools.partial(jax.jit, static_argnames="capacity")
def served(wanted, x, *, capacity):
  """-x of the wanted tokens, block by block, and how often each was served."""

  def block(step, carry):
    result, times = carry
    rows = RowMap.choose(wanted, capacity=capacity, first=step * capacity)
    once = rows.put(jnp.zeros_like(times), rows.used.astype(jnp.int32))
    return rows.put(result, -rows.take(x)), times + once

  steps = (jnp.sum(wanted, dtype=jnp.int32) + capacity - 1) // capacity
  start = jnp.zeros_like(x), jnp.zeros(wanted.shape, jnp.int32)
  return jax.lax.fori_loop(0, steps, block, start)


@given(
  st.lists(st.booleans(), min_size=11, max_size=11),
  st.sampled_from([1, 3, 20]),
)
def test_a_loop_serves_every_wanted_token_once(wanted, capacity):
  wanted = jnp.array(wanted)
  x = jnp.arange(1.0, 12.0)[:, None]
  result, times = served(wanted, x, capacity=capacity)
  np.testing.assert_array_equal(times, wanted)
  np.testing.assert_array_equal(result, np.where(wanted[:, None], -x, 0))


def test_unused_slots_read_zeros_and_write_nothing():
  rows = RowMap.choose(jnp.array([False, True, False]), capacity=3)
  array = jnp.array([[jnp.nan, 1], [2, 3], [jnp.inf, jnp.nan]])
  assert rows.tokens.tolist() == [1, -1, -1]
  assert rows.take(array).tolist() == [[2, 3], [0, 0], [0, 0]]
  assert rows.take(jnp.array([True, True, True])).tolist() == [1, 0, 0]
  put = rows.put(jnp.zeros((3, 2)), jnp.full((3, 2), 7.0))
  assert put.tolist() == [[0, 0], [7, 7], [0, 0]]
  nobody = RowMap.choose(jnp.zeros(3, bool), capacity=2)
  assert nobody.take(array).tolist() == [[0, 0], [0, 0]]
  np.testing.assert_array_equal(nobody.put(array, array[:2]), array)


def test_a_row_map_refuses_what_does_not_fit():
  wanted = jnp.array([True, False, True])
  with pytest.raises(ValueError, match="capacity=-1 must be at least 0"):
    RowMap.choose(wanted, capacity=-1)
  rows = RowMap.choose(wanted, capacity=2)
  for array in (jnp.ones(()), jnp.ones((2, 3))):
    with pytest.raises(ValueError, match="must be of 3 tokens"):
      rows.take(array)
    with pytest.raises(ValueError, match="must be of 3 tokens"):
      rows.put(array, array)
  for values in (jnp.ones((3, 4)), jnp.ones((2, 5)), jnp.ones((2, 4), int)):
    with pytest.raises(ValueError, match=r"must be float32\[2, 4\], a row of"):
      rows.put(jnp.ones((3, 4)), values)
