"""Tokens that are computed by dense products, any number of them.

Sparse products are given a fixed room: slots of a tile, of a row, of a work
list. Tokens that do not fit are computed here instead, from x, exactly, a block
at a time: in the memory of one block, decided on device.

    wanted tokens, in order   ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
    blocks, forward           │512│512│512│512│512│512│512│512│
            backward          │   2048    │   2048    │512│512│

Most calls have none or a few, for which a small block costs little. Where all
tokens come this way, as in the first steps of training, the backward pass takes
large blocks first, to add up the weights' gradients less often.

The forward pass may keep z and u of the first of these tokens, the dense rows
of a hybrid matrix; the backward pass then makes them again for the others only.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from twell_jax.formats import RowMap
from twell_jax.formats.bits import chosen_entries, is_active
from twell_jax.formats.hybrid import active_entries
from twell_jax.ops import dense_part, reference
from twell_jax.ops.outputs import Gradients

# Sizes of blocks; those of the forward pass are of the last one.
BLOCKS = (2048, 512)


class DenseRows(NamedTuple):
  """What is kept of the first tokens, in their order; +0 where unused.

  Attributes:
    p: Active gate values, +0 elsewhere.
    u: Up pre-activations; None if the layer is not gated.
  """

  p: Float[Array, "dense_rows d_ff"]
  u: Float[Array, "dense_rows d_ff"] | None


class Sums(NamedTuple):
  """What the forward pass adds up, over the neurons of this layer.

  Attributes:
    y: The result, in the dtype of x.
    l1: The sum of |h| over all tokens.
    active: Active neurons of each token.
    fired: Tokens on which each neuron was active.
    rows: What is kept, if anything.
  """

  y: Float[Array, "tokens d_model"]
  l1: Float[Array, ""]
  active: Int32[Array, "tokens"]
  fired: Int32[Array, "d_ff"]
  rows: DenseRows | None


def forward(
  sums: Sums,
  wanted: Bool[Array, "tokens"],
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  added: Callable[[RowMap], Float[Array, "slots d_model"]] | None,
) -> Sums:
  """The sums with the wanted tokens in them, of which they have nothing yet.

  Args:
    sums: Of the other tokens; the wanted ones' y and active are replaced.
    wanted: Tokens to compute.
    x: All tokens.
    gate: Gate matrix.
    up: Up matrix, or None.
    down: Down matrix.
    added: What to add to y before it is rounded, of chosen tokens, in the
      accumulation dtype; None for nothing.
  """

  def block(rows: RowMap, place: Int32[Array, "slots"], sums: Sums) -> Sums:
    x_rows = rows.take(x)
    z = _gate_values(rows, x_rows, gate)
    part = dense_part.forward(x_rows, z, up, down)
    y = part.y if added is None else part.y + added(rows)
    active = is_active(z).astype(jnp.int32)
    kept = sums.rows
    if kept is not None:
      p = kept.p.at[place].set(active_entries(z), mode="drop")
      u = kept.u
      if u is not None:
        u = u.at[place].set(part.u, mode="drop")
      kept = DenseRows(p, u)
    return Sums(
      y=rows.put(sums.y, y.astype(x.dtype)),
      l1=sums.l1 + part.l1,
      active=rows.put(sums.active, jnp.sum(active, axis=1)),
      fired=sums.fired + jnp.sum(active, axis=0),
      rows=kept,
    )

  return _in_blocks(wanted, block, sums, sizes=BLOCKS[-1:])


def backward(
  gradients: Gradients,
  wanted: Bool[Array, "tokens"],
  rows: DenseRows | None,
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  *,
  penalty: Float[Array, ""],
) -> Gradients:
  """The gradients with those of the wanted tokens in them.

  Args:
    gradients: Of the other tokens, in the accumulation dtype; the wanted ones'
      dx is replaced.
    wanted: Tokens to compute.
    rows: What `forward` kept.
    x: All tokens.
    gate: Gate matrix.
    up: Up matrix, or None.
    down: Down matrix.
    dy: Cotangent of y.
    penalty: Cotangent of each |h|.
  """
  num_wanted = jnp.sum(wanted, dtype=jnp.int32)

  def block(
    rows_of_block: RowMap, place: Int32[Array, "slots"], sums: Gradients
  ) -> Gradients:
    x_rows, dy_rows = rows_of_block.take(x), rows_of_block.take(dy)

    def again() -> tuple[Array, Array | None]:
      z = _gate_values(rows_of_block, x_rows, gate)
      return z, None if up is None else reference.per_neuron(x_rows, up)

    def read(rows: DenseRows) -> tuple[Array, Array | None]:
      def take(array):
        return array.at[place].get(mode="fill", fill_value=0)

      return take(rows.p), None if rows.u is None else take(rows.u)

    if rows is None:
      z, u = again()
    else:
      last = jnp.minimum(place[-1], num_wanted - 1)
      z, u = lax.cond(last < rows.p.shape[0], read, lambda _: again(), rows)
    part = dense_part.gradients(
      z, u, x_rows, gate, up, down, dy_rows, penalty=penalty
    )
    dx = rows_of_block.put(sums.x, part.x)
    return sums.add_matrices(part)._replace(x=dx)

  return _in_blocks(wanted, block, gradients, sizes=BLOCKS)


def _gate_values(
  rows: RowMap,
  x_rows: Float[Array, "slots d_model"],
  gate: Float[Array, "d_ff d_model"],
) -> Float[Array, "slots d_ff"]:
  """z, and 0 in unused slots, also where a gate is not finite: 0 · ∞ = NaN."""
  z = reference.per_neuron(x_rows, gate)
  return chosen_entries(rows.used[:, None], z)


def _in_blocks[Carry](
  wanted: Bool[Array, "tokens"],
  block: Callable[[RowMap, Int32[Array, "slots"], Carry], Carry],
  carry: Carry,
  *,
  sizes: tuple[int, ...],
) -> Carry:
  """Takes `block` through the wanted tokens: no step where there are none.

  Args:
    wanted: Tokens that it is to see, each once.
    block: Given some tokens, their places among the wanted ones (also those of
      unused slots), and the carry.
    carry: What it starts with.
    sizes: Of blocks, each used while so many tokens are left.
  """
  tokens = wanted.shape[0]
  num_wanted = jnp.sum(wanted, dtype=jnp.int32)
  done = jnp.int32(0)
  possible = sorted({min(size, tokens) for size in sizes}, reverse=True)
  for size in possible:
    # The last blocks are of the smallest size, and may have unused slots.
    left = num_wanted - done
    steps = left // size if size > possible[-1] else -(-left // size)

    def step(i, carry, *, size=size, start=done):
      first = start + i * size
      rows = RowMap.choose(wanted, capacity=size, first=first)
      return block(rows, first + jnp.arange(size, dtype=jnp.int32), carry)

    carry = lax.fori_loop(0, steps, step, carry)
    done += steps * size
  return carry
