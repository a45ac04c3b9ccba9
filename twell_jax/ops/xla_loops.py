"""The loops of the xla implementation over active neurons, a step at a time.

Each walks the tiles of a plan (tiles.py) with the sums of a tile's segments in
its carry, and adds them to their rows of the result when the tile is done. The
results start from what the caller has: the part of the hot neurons.

What the forward pass learns of a slot, the gate value p and u, is all that the
backward pass needs, and is stored in blocks of [tile, slots], one per step. The
loop for dx walks the same way and reads them in order; the loop for the weights
walks by neuron and finds them by a token's rank of its neuron.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from twell_jax.formats.bits import Pattern, rank_of
from twell_jax.ops.gathered import accumulation_dtype, add_rows, row_dots
from twell_jax.ops.tiles import (
  Plan,
  make_plan,
  slot_address,
  take_slots,
  take_tile,
)

_NEURON_SLOTS = 8

# Indices made here are in range by construction.
_TRUSTED = "promise_in_bounds"


class Sizes(NamedTuple):
  """Static sizes of the loops, from the shape of a call."""

  tile: int  # segments of tokens in a tile
  slots: int  # active neurons of each segment in a step
  max_active: int  # active neurons of all tokens up to which sparse is faster
  max_steps: int  # steps that these take at most
  neuron_tile: int  # segments of neurons in a tile, for dgate, dup and ddown


class Walk(NamedTuple):
  """Which neurons the loops visit at which tokens, and in which order."""

  pattern: Pattern
  plan: Plan
  sizes: Sizes


def make_walk(pattern: Pattern, sizes: Sizes) -> Walk:
  """The walk over the active neurons of each token."""
  plan = make_plan(
    pattern.counts,
    tile=sizes.tile,
    slots=sizes.slots,
    max_active=sizes.max_active,
  )
  return Walk(pattern, plan, sizes)


class Blocks(NamedTuple):
  """Of each slot of a walk p = z and, if gated, u, in the dtype of x.

  Slots past the end of a segment hold any numbers.
  """

  p: Float[Array, "steps tile slots"]
  u: Float[Array, "steps tile slots"] | None


def no_blocks(dtype: jnp.dtype, sizes: Sizes, *, gated: bool) -> Blocks:
  """Blocks for a walk, with nothing in them."""
  zeros = _zeros(dtype, sizes)
  return Blocks(zeros, zeros if gated else None)


def _zeros(dtype: jnp.dtype, sizes: Sizes) -> Float[Array, "steps tile slots"]:
  return jnp.zeros((sizes.max_steps, sizes.tile, sizes.slots), dtype)


def _masked(
  values: Float[Array, "tile slots"],
  valid: Bool[Array, "tile slots"],
  dtype: jnp.dtype,
) -> Float[Array, "tile slots"]:
  """The values for accumulation, 0 where there is no slot."""
  return jnp.where(valid, values.astype(dtype), 0)


def _add_at(
  matrix: Float[Array, "rows width"],
  rows: Int32[Array, "tile"],
  values: Float[Array, "tile width"],
) -> Float[Array, "rows width"]:
  """Adds the sums of segments to their rows; padding is out of range."""
  return matrix.at[rows].add(values, mode="drop")


def _over_tiles(plan, one_tile, start):
  """The loop over tiles; the first ones may be all padding."""
  empty = jnp.sum(plan.steps == 0, dtype=jnp.int32)
  return lax.fori_loop(empty, plan.steps.shape[0], one_tile, start)


class LoopForward(NamedTuple):
  """Y and the sum of |h|, not yet rounded, and the blocks if stored."""

  y: Float[Array, "tokens d_model"]
  l1: Float[Array, ""]
  blocks: Blocks | None


def loop_forward(
  walk: Walk,
  z: Float[Array, "tokens d_ff"],
  x: Float[Array, "tokens d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  start: LoopForward,
) -> LoopForward:
  """Y and the sum of |h| of the active neurons, added to those of `start`.

  Args:
    walk: The active neurons.
    z: Gate pre-activations.
    x: Tokens.
    up: Up matrix, or None.
    down: Down matrix.
    start: Sums in the accumulation dtype; p and u are stored if it has blocks.
  """
  pattern, plan, sizes = walk
  dtype = accumulation_dtype(x.dtype)

  def one_tile(i, carry):
    y, l1, blocks = carry
    tile = take_tile(plan, pattern, i)
    x_tile = x[tile.read]

    def step(s, carry):
      total, l1_rows, blocks = carry
      columns, valid = take_slots(tile, s, slots=sizes.slots)
      p = z.at[tile.read[:, None], columns].get(mode=_TRUSTED)
      h, u = _masked(p, valid, dtype), None
      if up is not None:
        u = row_dots(x_tile, up, columns)
        # Not the product alone: u may be infinite where there is no slot.
        h = jnp.where(valid, h * u, 0)
        u = u.astype(x.dtype)
      if blocks is not None:
        blocks = _put(blocks, Blocks(p, u), plan.first[i] + s)
      l1_rows += jnp.sum(jnp.abs(h), axis=1)
      return add_rows(total, h, down, columns), l1_rows, blocks

    total = jnp.zeros((sizes.tile, x.shape[1]), dtype)
    l1_rows = jnp.zeros((sizes.tile,), dtype)
    total, l1_rows, blocks = lax.fori_loop(
      0, plan.steps[i], step, (total, l1_rows, blocks)
    )
    l1 += jnp.sum(l1_rows)
    return LoopForward(_add_at(y, tile.write, total), l1, blocks)

  return _over_tiles(plan, one_tile, start)


class LoopDx(NamedTuple):
  """dx, not yet rounded, and dt = dy downᵀ + the l1 term at the slots."""

  dx: Float[Array, "tokens d_model"]
  dt_blocks: Float[Array, "steps tile slots"]


def loop_dx(
  walk: Walk,
  blocks: Blocks,
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  *,
  penalty: Float[Array, ""],
  start: Float[Array, "tokens d_model"],
) -> LoopDx:
  """The active neurons' part of dx, added to `start`.

  Args:
    walk: The active neurons.
    blocks: What `loop_forward` stored.
    gate: Gate matrix.
    up: Up matrix, or None.
    down: Down matrix.
    dy: Cotangent of y.
    penalty: Cotangent of each |h|.
    start: In the accumulation dtype.
  """
  pattern, plan, sizes = walk
  dtype = start.dtype

  def one_tile(i, carry):
    dx, dt_blocks = carry
    tile = take_tile(plan, pattern, i)
    dy_tile = dy[tile.read]

    def step(s, carry):
      total, dt_blocks = carry
      columns, valid = take_slots(tile, s, slots=sizes.slots)
      block = plan.first[i] + s
      p = h = _masked(blocks.p[block], valid, dtype)
      u = None if blocks.u is None else _masked(blocks.u[block], valid, dtype)
      if u is not None:
        h = p * u
      dt = row_dots(dy_tile, down, columns)
      dt = jnp.where(valid, dt + penalty.astype(dtype) * jnp.sign(h), 0)
      dt_blocks = _put(dt_blocks, dt, block)
      total = add_rows(total, dt if u is None else dt * u, gate, columns)
      if up is not None:
        total = add_rows(total, dt * p, up, columns)
      return total, dt_blocks

    total = jnp.zeros((sizes.tile, dy.shape[1]), dtype)
    total, dt_blocks = lax.fori_loop(0, plan.steps[i], step, (total, dt_blocks))
    return LoopDx(_add_at(dx, tile.write, total), dt_blocks)

  return _over_tiles(plan, one_tile, LoopDx(start, _zeros(dtype, sizes)))


def _put[Values](
  blocks: Values, values: Values, block: Int32[Array, ""]
) -> Values:
  """The blocks with one of them replaced."""
  return jax.tree.map(
    lambda array, new: lax.dynamic_update_index_in_dim(
      array, new, block, axis=0
    ),
    blocks,
    values,
  )


class Weights(NamedTuple):
  """Gradients of the matrices, not yet rounded; `up` is None without one."""

  gate: Float[Array, "d_ff d_model"]
  up: Float[Array, "d_ff d_model"] | None
  down: Float[Array, "d_ff d_model"]


def loop_weights(
  walk: Walk,
  transposed: Pattern,
  blocks: Blocks,
  x: Float[Array, "tokens d_model"],
  dy: Float[Array, "tokens d_model"],
  *,
  dt_blocks: Float[Array, "steps tile slots"],
  start: Weights,
) -> Weights:
  """Sums of rows of x and dy at the active neurons, added to `start`.

  Args:
    walk: The active neurons of each token, as the other loops visited them.
    transposed: The same pattern, by neuron.
    blocks: What `loop_forward` stored.
    x: Tokens.
    dy: Cotangent of y.
    dt_blocks: What `loop_dx` stored.
    start: In the accumulation dtype.
  """
  pattern, plan, sizes = walk
  dtype = start.gate.dtype
  neuron_plan = make_plan(
    transposed.counts,
    tile=sizes.neuron_tile,
    slots=_NEURON_SLOTS,
    max_active=sizes.max_active,
  )

  def one_tile(i, carry):
    tile = take_tile(neuron_plan, transposed, i)
    neurons = tile.read[:, None]

    def step(s, totals):
      tokens, valid = take_slots(
        tile,
        s,
        slots=_NEURON_SLOTS,
        word_stride=1,
        bit_stride=transposed.words.shape[1],
      )
      rank = rank_of(pattern, tokens, neurons)
      address = slot_address(plan, tokens, rank, slots=sizes.slots)

      def read(values):
        return _masked(values.at[address].get(mode="clip"), valid, dtype)

      p, dt = read(blocks.p), read(dt_blocks)
      if blocks.u is None:
        dgate, ddown = totals
        return add_rows(dgate, dt, x, tokens), add_rows(ddown, p, dy, tokens)
      u = read(blocks.u)
      dgate, dup, ddown = totals
      return (
        add_rows(dgate, dt * u, x, tokens),
        add_rows(dup, dt * p, x, tokens),
        add_rows(ddown, p * u, dy, tokens),
      )

    zeros = jnp.zeros((sizes.neuron_tile, x.shape[1]), dtype)
    totals = lax.fori_loop(0, neuron_plan.steps[i], step, (zeros,) * len(carry))
    return tuple(
      _add_at(matrix, tile.write, total) for matrix, total in zip(carry, totals)
    )

  matrices = tuple(matrix for matrix in start if matrix is not None)
  gate, *up, down = _over_tiles(neuron_plan, one_tile, matrices)
  return Weights(gate, up[0] if up else None, down)
