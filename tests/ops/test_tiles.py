"""The plan of the xla implementation: every active column, exactly once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_jax.formats.bits import rows_pattern
from twell_jax.ops import tiles, xla
from twell_jax.ops.choices import Choices

COLUMNS = 300
# One shape for all examples, so that it is compiled once.
ROWS = 9


@jax.jit
def visits(active):
  """How often the tiles' steps visit each (row, column), and the plan."""
  pattern = rows_pattern(active)
  plan = tiles.make_plan(
    pattern.counts, tile=4, slots=8, max_active=ROWS * COLUMNS
  )

  def one_tile(i, visited):
    tile = tiles.take_tile(plan, pattern, i)

    def step(s, visited):
      columns, valid = tiles.take_slots(tile, s, slots=8)
      rows = jnp.broadcast_to(tile.write[:, None], columns.shape)
      return visited.at[jnp.where(valid, rows, ROWS), columns].add(
        1, mode="drop"
      )

    return jax.lax.fori_loop(0, plan.steps[i], step, visited)

  start = jnp.zeros((ROWS, COLUMNS), jnp.int32)
  return jax.lax.fori_loop(0, plan.steps.shape[0], one_tile, start), plan


# The lengths of segments end at 64.
COUNTS = st.one_of(
  st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, COLUMNS]),
  st.integers(0, COLUMNS),
)


@given(
  counts=st.lists(COUNTS, min_size=ROWS, max_size=ROWS),
  seed=st.integers(0, 2**32 - 1),
)
def test_every_active_column_is_visited_once(counts, seed):
  rng = np.random.default_rng(seed)
  order = rng.permuted(np.tile(np.arange(COLUMNS), (ROWS, 1)), axis=1)
  active = order < np.array(counts)[:, None]
  visited, plan = visits(jnp.asarray(active))
  np.testing.assert_array_equal(visited, active)

  rows, columns = np.nonzero(active)
  rank = np.cumsum(active, axis=1)[rows, columns] - 1
  address = tiles.slot_address(
    plan, jnp.asarray(rows), jnp.asarray(rank), slots=8
  )
  places = np.stack(address, axis=1)
  assert len(np.unique(places, axis=0)) == len(places)
  assert (places < [max(int(np.sum(plan.steps)), 1), 4, 8]).all()


make_plan = jax.jit(
  tiles.make_plan, static_argnames=("tile", "slots", "max_active")
)


@given(
  counts=st.lists(COUNTS, min_size=60, max_size=60),
  tile=st.sampled_from([1, 7, 32]),
  slots=st.sampled_from([8, 32]),
)
def test_max_steps_bounds_the_steps(counts, tile, slots):
  total = sum(counts)
  max_active = 4096 if total <= 4096 else 60 * COLUMNS
  plan = make_plan(
    jnp.asarray(counts, jnp.int32),
    tile=tile,
    slots=slots,
    max_active=max_active,
  )
  assert int(np.sum(plan.lengths)) == total
  bound = tiles.max_steps(
    len(counts), tile=tile, slots=slots, max_active=max_active
  )
  assert int(np.sum(plan.steps)) <= bound


@pytest.mark.parametrize("d_model", [1, 33, 192, 2048, 2**19])
def test_slots_divide_segments(d_model):
  for tokens in (*range(1, 70), 511, 4096):
    x: Any = jax.ShapeDtypeStruct((tokens, d_model), jnp.float32)
    sizes = xla._sizes(x, 100, Choices())
    assert 64 % sizes.slots == 0
    assert 1 <= sizes.tile <= tokens
    assert sizes.neuron_tile >= 1
