"""The layer in portable XLA: a dense gate matmul, then active neurons only.

    z = x gateᵀ ─► bit pattern of {z > 0} ─► segments of tokens (tiles.py)
      └► tiles of segments ─► a loop over their slots, 8 at a time:
           column of a slot ─► u = x · up[column] ─► y += (z u) down[column]

A column is searched when its slot is reached: exact for any number of active
neurons, no capacity, no overflow. The backward pass runs the same loop for dx,
and another over segments of neurons, with the transposed pattern, for the
gradients of the weights. That one reads u = x · up[column] and
dt = dy · down[column] where the loops over tokens stored them.

Rows of a matrix are read where they lie: a gather that feeds a multiply-add is
one XLA fusion and materialises nothing. If more than a share of the neurons is
active, both passes compute the dense products instead, by a `lax.cond` on
device: a choice of speed, not of result.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from twell_jax.formats.bits import (
  Pattern,
  columns_pattern,
  is_active,
  rank_of,
  rows_pattern,
)
from twell_jax.ops import reference
from twell_jax.ops.gathered import accumulation_dtype, add_rows, row_dots
from twell_jax.ops.outputs import Activity, FFNOutput, Forward, Gradients
from twell_jax.ops.tiles import (
  Plan,
  make_plan,
  max_steps,
  slot_address,
  take_slots,
  take_tile,
)

# Numbers in the accumulator of a tile: enough to spread the cost of a step, few
# enough for the second-level cache.
_TILE_NUMBERS = 2**18
_MAX_TILE = 256
_NEURON_SLOTS = 8

# Indices made here are in range by construction.
_TRUSTED = "promise_in_bounds"


def forward(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
) -> FFNOutput:
  """The layer and its activity; see reference.py."""
  return _forward(x, gate, up, down, store=False).output


def forward_with_residuals(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
) -> Forward:
  """`forward`, keeping z, its pattern and u at active neurons, if gated."""
  return _forward(x, gate, up, down, store=up is not None)


class _Sizes(NamedTuple):
  """Static sizes of the loops, from the shape of a call."""

  tile: int  # segments of tokens in a tile
  slots: int  # active neurons of each segment in a step
  max_active: int  # active neurons of all tokens up to which sparse is faster
  max_steps: int  # steps that these take at most
  neuron_tile: int  # segments of neurons in a tile, for dgate, dup and ddown


def sparse_share(tokens: int, d_model: int, itemsize: int) -> float:
  """Active share of the neurons up to which the sparse loops win on CPU.

  Dense products of a few tokens wait for memory, and those of 16-bit numbers
  are slow; so are gathered rows of few numbers. Where both break even is
  measured by experiments/break_even.py.
  """
  if tokens <= 8:
    return 0.15
  share = 0.08 if itemsize == 2 else 0.06
  return share * min(1.0, d_model / 256)


def _sizes(x: Float[Array, "tokens d_model"], d_ff: int) -> _Sizes:
  tokens, d_model = x.shape
  if tokens * d_ff >= 2**31:
    raise ValueError(
      f"{tokens} tokens × {d_ff} neurons must be below 2^31, the range of the"
      " counters: call the layer on fewer tokens at once"
    )
  largest = min(_MAX_TILE, max(2, _power_of_two(_TILE_NUMBERS // d_model)))
  tile = min(largest, tokens)
  slots = min(32, max(8, _power_of_two(512 // tile)))
  share = sparse_share(tokens, d_model, x.dtype.itemsize)
  max_active = int(share * tokens * d_ff)
  return _Sizes(
    tile=tile,
    slots=slots,
    max_active=max_active,
    max_steps=max_steps(tokens, tile=tile, slots=slots, max_active=max_active),
    neuron_tile=min(largest // 2, d_ff),
  )


def _power_of_two(number: int) -> int:
  """The largest power of two up to a number; 0 for 0."""
  return 1 << number.bit_length() >> 1


def _by_activity[Result](
  pattern: Pattern,
  sizes: _Sizes,
  sparse: Callable[[], Result],
  dense: Callable[[], Result],
) -> Result:
  """The result of `sparse` or `dense`, whichever should be the faster."""
  if sizes.max_active == 0:
    return dense()
  active = jnp.sum(pattern.counts)
  return lax.cond(active <= sizes.max_active, sparse, dense)


def _forward(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  store: bool,
) -> Forward:
  tokens = x.shape[0]
  x_rows = _pad_gemv(x)
  z_rows = reference.per_neuron(x_rows, gate)
  z = z_rows[:tokens]
  active = is_active(z)
  pattern = rows_pattern(active)
  sizes = _sizes(x, gate.shape[0])

  def dense():
    u = None if up is None else reference.per_neuron(x_rows, up)
    h = reference.hidden(z_rows, u)
    l1 = jnp.sum(jnp.abs(h.astype(accumulation_dtype(x.dtype))))
    return (h @ down)[:tokens], l1, _no_blocks(x, sizes) if store else None

  def sparse():
    return _sparse_forward(x, z, up, down, pattern, sizes, store)

  y, l1, u_blocks = _by_activity(pattern, sizes, sparse, dense)
  activity = Activity(
    l1=l1.astype(jnp.float32) / tokens,
    active=pattern.counts,
    fired=jnp.sum(active, axis=0, dtype=jnp.int32),
    overflowed=jnp.zeros((), jnp.int32),
  )
  kept = (z, *pattern, u_blocks) if store else (z, *pattern)
  return Forward(FFNOutput(y, activity), kept)


def _pad_gemv(x: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
  """A second row of zeros below a single 16-bit row.

  A product with one such row takes XLA:CPU seven times as long as with two.
  """
  alone = x.shape[0] == 1 and x.dtype.itemsize == 2
  return jnp.pad(x, ((0, 1), (0, 0))) if alone else x


def _no_blocks(
  x: Float[Array, "tokens d_model"], sizes: _Sizes
) -> Float[Array, "steps tile slots"]:
  shape = (sizes.max_steps, sizes.tile, sizes.slots)
  return jnp.zeros(shape, accumulation_dtype(x.dtype))


def _gate_values(
  z: Float[Array, "tokens d_ff"],
  tokens: Int32[Array, "#tile #slots"],
  neurons: Int32[Array, "#tile #slots"],
  valid: Bool[Array, "tile slots"],
) -> Float[Array, "tile slots"]:
  """z at the slots, 0 where there is none, for accumulation."""
  values = (
    z.at[tokens, neurons].get(mode=_TRUSTED).astype(accumulation_dtype(z.dtype))
  )
  return jnp.where(valid, values, 0)


def _token_plan(pattern: Pattern, sizes: _Sizes) -> Plan:
  return make_plan(
    pattern.counts,
    tile=sizes.tile,
    slots=sizes.slots,
    max_active=sizes.max_active,
  )


def _add_at(
  matrix: Float[Array, "rows width"],
  rows: Int32[Array, "tile"],
  values: Float[Array, "tile width"],
) -> Float[Array, "rows width"]:
  """Adds the sums of segments to their rows; padding is out of range."""
  return matrix.at[rows].add(values, mode="drop")


def _sparse_forward(x, z, up, down, pattern, sizes, store):
  """y, the sum of |h|, and the blocks of u if they are to be stored."""
  dtype = accumulation_dtype(x.dtype)
  plan = _token_plan(pattern, sizes)

  def one_tile(i, carry):
    y, l1, blocks = carry
    tile = take_tile(plan, pattern, i)
    x_tile = x[tile.read]

    def step(s, carry):
      total, l1_rows, blocks = carry
      columns, valid = take_slots(tile, s, slots=sizes.slots)
      h = _gate_values(z, tile.read[:, None], columns, valid)
      if up is not None:
        u = row_dots(x_tile, up, columns)
        # Not the product alone: u may be infinite where there is no slot.
        h = jnp.where(valid, h * u, 0)
      if store:
        blocks = lax.dynamic_update_index_in_dim(
          blocks, u, plan.first[i] + s, axis=0
        )
      l1_rows += jnp.sum(jnp.abs(h), axis=1)
      return add_rows(total, h, down, columns), l1_rows, blocks

    total = jnp.zeros((sizes.tile, x.shape[1]), dtype)
    l1_rows = jnp.zeros((sizes.tile,), dtype)
    total, l1_rows, blocks = lax.fori_loop(
      0, plan.steps[i], step, (total, l1_rows, blocks)
    )
    return _add_at(y, tile.write, total), l1 + jnp.sum(l1_rows), blocks

  blocks = _no_blocks(x, sizes) if store else None
  start = jnp.zeros(x.shape, dtype), jnp.zeros((), dtype), blocks
  y, l1, blocks = _over_tiles(plan, one_tile, start)
  return y.astype(x.dtype), l1, blocks


def _over_tiles(plan, one_tile, start):
  """The loop over tiles; the first ones may be all padding."""
  empty = jnp.sum(plan.steps == 0, dtype=jnp.int32)
  return lax.fori_loop(empty, plan.steps.shape[0], one_tile, start)


def backward(
  kept: tuple[Array, ...],
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  dl1: Float[Array, ""],
) -> Gradients:
  """Gradients of sum(dy ⊙ y) + dl1 · l1; names as in arXiv 2603.23198."""
  z, pattern = kept[0], Pattern(*kept[1:3])
  u_blocks = None if up is None else kept[3]
  sizes = _sizes(x, gate.shape[0])

  def dense():
    residuals = (z,) if up is None else (z, reference.per_neuron(x, up))
    return reference.backward(residuals, x, gate, up, down, dy, dl1)

  def sparse():
    plan = _token_plan(pattern, sizes)
    dx, dt_blocks = _sparse_dx(
      x, z, u_blocks, gate, up, down, dy, dl1, pattern, plan, sizes
    )
    stored = _Stored(pattern, plan, z, u_blocks, dt_blocks)
    transposed = columns_pattern(is_active(z))
    weights = _sparse_weights(stored, transposed, x, dy, sizes)
    return Gradients(dx, *weights)

  return _by_activity(pattern, sizes, sparse, dense)


def _sparse_dx(x, z, u_blocks, gate, up, down, dy, dl1, pattern, plan, sizes):
  """dx, and the blocks of dt = dy downᵀ + the l1 term at active neurons."""
  dtype = accumulation_dtype(x.dtype)
  penalty = dl1.astype(dtype) / x.shape[0]

  def one_tile(i, carry):
    dx, dt_blocks = carry
    tile = take_tile(plan, pattern, i)
    dy_tile = dy[tile.read]

    def step(s, carry):
      total, dt_blocks = carry
      columns, valid = take_slots(tile, s, slots=sizes.slots)
      block = plan.first[i] + s
      p = _gate_values(z, tile.read[:, None], columns, valid)
      u = None if u_blocks is None else u_blocks[block]
      h = p if u is None else p * u
      dt = row_dots(dy_tile, down, columns) + penalty * jnp.sign(h)
      dt = jnp.where(valid, dt, 0)
      dt_blocks = lax.dynamic_update_index_in_dim(dt_blocks, dt, block, axis=0)
      dz = dt if u is None else jnp.where(valid, dt * u, 0)
      total = add_rows(total, dz, gate, columns)
      if up is not None:
        total = add_rows(total, dt * p, up, columns)
      return total, dt_blocks

    total = jnp.zeros((sizes.tile, x.shape[1]), dtype)
    total, dt_blocks = lax.fori_loop(0, plan.steps[i], step, (total, dt_blocks))
    return _add_at(dx, tile.write, total), dt_blocks

  start = jnp.zeros(x.shape, dtype), _no_blocks(x, sizes)
  dx, dt_blocks = _over_tiles(plan, one_tile, start)
  return dx.astype(x.dtype), dt_blocks


class _Stored(NamedTuple):
  """What the loops over tokens left, to be read by the loop over neurons."""

  pattern: Pattern
  plan: Plan
  z: Float[Array, "tokens d_ff"]
  u_blocks: Float[Array, "steps tile slots"] | None
  dt_blocks: Float[Array, "steps tile slots"]


def _sparse_weights(stored, transposed, x, dy, sizes):
  """Gradients of gate, up and down: rows of x and dy, summed per neuron."""
  gated = stored.u_blocks is not None
  dtype = accumulation_dtype(x.dtype)
  plan = make_plan(
    transposed.counts,
    tile=sizes.neuron_tile,
    slots=_NEURON_SLOTS,
    max_active=sizes.max_active,
  )

  def one_tile(i, carry):
    tile = take_tile(plan, transposed, i)
    neurons = tile.read[:, None]

    def step(s, totals):
      tokens, valid = take_slots(
        tile,
        s,
        slots=_NEURON_SLOTS,
        word_stride=1,
        bit_stride=transposed.words.shape[1],
      )
      rank = rank_of(stored.pattern, tokens, neurons)
      address = slot_address(stored.plan, tokens, rank, slots=sizes.slots)

      def read(blocks):
        values = blocks.at[address].get(mode="clip")
        return jnp.where(valid, values, 0)

      p = _gate_values(stored.z, tokens, neurons, valid)
      dt = read(stored.dt_blocks)
      if not gated:
        dgate, ddown = totals
        return add_rows(dgate, dt, x, tokens), add_rows(ddown, p, dy, tokens)
      u = read(stored.u_blocks)
      dgate, dup, ddown = totals
      return (
        add_rows(dgate, dt * u, x, tokens),
        add_rows(dup, dt * p, x, tokens),
        add_rows(ddown, p * u, dy, tokens),
      )

    zeros = jnp.zeros((sizes.neuron_tile, x.shape[1]), dtype)
    totals = lax.fori_loop(0, plan.steps[i], step, (zeros,) * len(carry))
    return tuple(
      _add_at(matrix, tile.write, total) for matrix, total in zip(carry, totals)
    )

  zeros = jnp.zeros((transposed.words.shape[0], x.shape[1]), dtype)
  grads = _over_tiles(plan, one_tile, (zeros,) * (3 if gated else 2))
  grads = tuple(grad.astype(x.dtype) for grad in grads)
  return grads if gated else (grads[0], None, grads[1])
