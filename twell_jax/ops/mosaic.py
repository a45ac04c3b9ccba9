"""The layer by Mosaic GPU kernels, for Hopper GPUs, in bfloat16.

    forward                                          kept for the backward pass
      x, gate ─► gate_pack: matmul, ReLU and TwELL
                   │
                   ▼
                 ELL rows P ─────────────────────────► P
                   │  └► counts: who overflowed a tile, or the ELL row
                   ▼                    │
                 products at the        │
                 entries: U, h, y ──────┼────────────► U
                   ▲                    ▼
      hot neurons ─┘      dense tokens, in blocks ───► z, u of the first ones
      dense products: y0, z, u ──────────────────────► z, u of the hot ones

    backward
      P ─► lists of each neuron ─► products at the entries ─► dx, dW
                                   dense tokens, in blocks ──► + ─► rounded
                                   hot neurons ──────────────► +

The kernels are in pallas_kernels; packed_products.py composes them, and
dense_part.py and dense_tokens.py have the dense products. Here is what joins
them: sizes, padding, and who is computed how.

A token with more active neurons in a tile than the tile has slots, or more in
all than an ELL row has, is computed by dense products, in blocks: any number of
them, in bounded memory, decided on device. So are all tokens of a call whose
entries are so many that gathering their rows would take longer. The result
depends on none of this.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import rows, target, tuning
from twell_jax.formats import EllMatrix, HybridMatrix, RowMap
from twell_jax.formats.bits import is_active
from twell_jax.ops import dense_part, dense_tokens, packed_products, reference
from twell_jax.ops.choices import Choices
from twell_jax.ops.dense_tokens import DenseRows
from twell_jax.ops.gate import pack_by_kernel, pad_to_multiples
from twell_jax.ops.mosaic_sizes import Sizes, choose_sizes
from twell_jax.ops.outputs import Activity, FFNOutput, Forward, Gradients
from twell_jax.ops.packed_products import Packed, PackedLayer


class _Hot(NamedTuple):
  """What the hot neurons give: y not rounded, the sum of |h|, z and u.

  y has the even elements of a padded row first, then the odd ones, as the
  gathered kernels read a float32 y0: no copy of it is made.
  """

  halves: Float32[Array, "tokens 2 half"]
  l1: Float32[Array, ""]
  z: Float[Array, "tokens hot"]
  u: Float[Array, "tokens hot"] | None


class _Split(NamedTuple):
  """A call, and what is computed how.

  Attributes:
    layer: The entries of the neurons that are not hot; tokens that are computed
      densely have none.
    hot: The part of the hot neurons, if there are any.
    overflowed: Number of tokens that do not fit.
  """

  layer: PackedLayer
  hot: _Hot | None
  overflowed: Int32[Array, ""]

  @property
  def y0(self) -> Float32[Array, "tokens padded"] | None:
    """What the entries' part of y is added to."""
    return None if self.hot is None else _interleaved(self.hot.halves)


def forward(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  choices: Choices,
) -> FFNOutput:
  """The layer and its activity; see ffn.py."""
  sizes = choose_sizes(x, gate.shape[0], choices)
  device = target.device_of(x)
  if choices.hot_neurons == gate.shape[0]:
    return reference.forward(x, gate, up, down, choices=choices)
  split = _split(x, gate, up, down, sizes, device, choices.hot_neurons)
  packed = packed_products.forward_only(split.layer, y0=split.y0)
  return _complete(split, packed, None, x, gate, up, down).output


def forward_with_residuals(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  choices: Choices,
) -> Forward:
  """`forward`, keeping P and U, packed."""
  sizes = choose_sizes(x, gate.shape[0], choices)
  device = target.device_of(x)
  if choices.hot_neurons == gate.shape[0]:
    return reference.forward_with_residuals(x, gate, up, down, choices=choices)
  split = _split(x, gate, up, down, sizes, device, choices.hot_neurons)
  packed = packed_products.forward(split.layer, y0=split.y0)
  dense_rows = None
  if sizes.dense_rows:
    zeros = jnp.zeros((sizes.dense_rows, split.layer.p.d_ff), x.dtype)
    dense_rows = DenseRows(zeros, None if up is None else zeros)
  done = _complete(split, packed, dense_rows, x, gate, up, down)
  return Forward(done.output, _keep(split, packed, done, sizes.dense_rows))


def backward(
  kept: "_Kept | tuple[Array, ...]",
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  dy: Float[Array, "tokens d_model"],
  dl1: Float[Array, ""],
  *,
  choices: Choices,
) -> Gradients:
  """Gradients of sum(dy ⊙ y) + dl1 · l1, rounded once."""
  if not isinstance(kept, _Kept):  # All neurons are hot.
    return reference.backward(kept, x, gate, up, down, dy, dl1, choices=choices)
  hot_neurons, d_model = choices.hot_neurons, x.shape[1]
  sizes = choose_sizes(x, gate.shape[0], choices)
  ell = kept.p.ell
  ell = dataclasses.replace(ell, columns=ell.columns.astype(jnp.int32))
  layer = _packed_layer(x, gate, up, down, ell, sizes, target.device_of(x))
  penalty = dl1 / x.shape[0]

  gradients = packed_products.backward(
    layer, kept.u, _pad_rows(dy), penalty=penalty
  )
  dense_rows = None
  if sizes.dense_rows:
    dense_rows = DenseRows(kept.p.dense, kept.u_rows)
  cold = slice(hot_neurons, None)
  gradients = dense_tokens.backward(
    jax.tree.map(lambda part: part[:, :d_model], gradients),
    ell.overflow,
    dense_rows,
    x,
    gate[cold],
    None if up is None else up[cold],
    down[cold],
    dy,
    penalty=penalty,
  )
  if kept.hot_z is not None:
    of_hot = dense_part.backward(
      kept.hot_z, kept.hot_u, x, gate, up, down, dy, dl1
    )
    gradients = _with_hot(gradients, of_hot, hot_neurons)
  return jax.tree.map(lambda part: part.astype(x.dtype), gradients)


class _Kept(NamedTuple):
  """What the backward pass needs besides the inputs: P and U, packed.

  Attributes:
    p: Gate values of the neurons that are not hot, its columns in 16 bits where
      these suffice.
    u: Their up values, in the ELL part.
    u_rows: Likewise, in the dense rows.
    hot_z: Gate pre-activations of the hot neurons.
    hot_u: Their up values.
  """

  p: HybridMatrix
  u: Float[Array, "tokens width"] | None
  u_rows: Float[Array, "dense_rows cold"] | None
  hot_z: Float[Array, "tokens hot"] | None
  hot_u: Float[Array, "tokens hot"] | None


class _Done(NamedTuple):
  """The output, and what there is to keep of the tokens computed densely."""

  output: FFNOutput
  counts: Int32[Array, "tokens"]  # of the neurons that are not hot
  dense_rows: DenseRows | None


def _keep(split: _Split, packed: Packed, done: _Done, dense_rows: int) -> _Kept:
  layer, hot = split.layer, split.hot
  columns = layer.p.columns
  if layer.p.d_ff <= 2**16:
    columns = columns.astype(jnp.uint16)
  ell = dataclasses.replace(layer.p, columns=columns, counts=done.counts)
  dtype = ell.values.dtype
  rows_kept = done.dense_rows
  if rows_kept is None:
    rows_kept = DenseRows(jnp.zeros((0, ell.d_ff), dtype), None)
  return _Kept(
    p=HybridMatrix(
      ell=ell,
      dense=rows_kept.p,
      rows=RowMap.choose(ell.overflow, capacity=dense_rows),
    ),
    u=None if packed.u is None else packed.u.astype(dtype),
    u_rows=rows_kept.u,
    hot_z=None if hot is None else hot.z,
    hot_u=None if hot is None else hot.u,
  )


def _split(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  sizes: Sizes,
  device: target.Device,
  hot_neurons: int,
) -> _Split:
  """Packs the activation, and decides who is computed densely."""
  hot = _hot_part(x, gate, up, down, hot_neurons) if hot_neurons else None
  # A copy of the rows, which the kernel reads once. Those of up and down are
  # read where they lie.
  cold_gate = gate[hot_neurons:] if hot_neurons else gate
  config = tuning.for_gate_pack(device, x.shape[0], *cold_gate.shape)
  packed = pack_by_kernel(x, cold_gate, config=config, device=device)
  ell = EllMatrix.from_twell(packed, width=sizes.width)
  overflowed = jnp.sum(ell.overflow, dtype=jnp.int32)
  too_active = jnp.sum(ell.stored, dtype=jnp.int32) > sizes.max_active
  ell = dataclasses.replace(ell, overflow=ell.overflow | too_active)
  layer = _packed_layer(x, gate, up, down, ell, sizes, device)
  return _Split(layer, hot, overflowed)


def _packed_layer(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  ell: EllMatrix,
  sizes: Sizes,
  device: target.Device,
) -> PackedLayer:
  return PackedLayer(
    x=_pad_rows(x),
    gate=_pad_rows(gate),
    up=None if up is None else _pad_rows(up),
    down=_pad_rows(down),
    p=ell,
    max_active=sizes.max_active,
    device=device,
  )


def _hot_part(
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  hot_neurons: int,
) -> _Hot:
  hot = slice(hot_neurons)
  z = reference.per_neuron(x, gate[hot])
  padded = _pad_rows(down[hot])
  halves = jnp.concatenate([padded[:, 0::2], padded[:, 1::2]], axis=1)
  part = dense_part.forward(x, z, None if up is None else up[hot], halves)
  return _Hot(part.y.reshape(x.shape[0], 2, -1), part.l1, z, part.u)


def _complete(
  split: _Split,
  packed: Packed,
  dense_rows: DenseRows | None,
  x: Float[Array, "tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
) -> _Done:
  """The output, from the products at the entries and all other parts."""
  layer, hot, overflowed = split
  tokens, d_model = x.shape
  p = layer.p
  # A slot that holds no entry counts nowhere.
  fired = jnp.zeros((p.d_ff,), jnp.int32)
  columns = jnp.where(layer.used, p.columns, p.d_ff)
  fired = fired.at[columns].add(1, mode="drop")
  added = None
  if hot is not None:

    def added(rows: RowMap) -> Float32[Array, "slots d_model"]:
      return _interleaved(rows.take(hot.halves))[:, :d_model]

  cold = slice(layer.hot_neurons, None)
  sums = dense_tokens.forward(
    dense_tokens.Sums(
      packed.y[:, :d_model], packed.l1, p.counts, fired, dense_rows
    ),
    p.overflow,
    x,
    gate[cold],
    None if up is None else up[cold],
    down[cold],
    added=added,
  )
  active, fired, l1 = sums.active, sums.fired, sums.l1
  if hot is not None:
    hot_active = is_active(hot.z).astype(jnp.int32)
    active += jnp.sum(hot_active, axis=1)
    fired = jnp.concatenate([jnp.sum(hot_active, axis=0), fired])
    l1 += hot.l1
  activity = Activity(
    l1=l1 / tokens,
    active=active,
    fired=fired,
    overflowed=overflowed,
    dense_tokens=jnp.sum(p.overflow, dtype=jnp.int32),
  )
  return _Done(FFNOutput(sums.y, activity), sums.active, sums.rows)


def _with_hot(
  gradients: Gradients, of_hot: Gradients, hot_neurons: int
) -> Gradients:
  """Both parts of dx added up, and of each matrix one above the other."""

  def stacked(rows, cold_rows):
    if rows is None or cold_rows is None:
      return None
    return jnp.concatenate([rows[:hot_neurons], cold_rows])

  return Gradients(
    x=of_hot.x + gradients.x,
    gate=stacked(of_hot.gate, gradients.gate),
    up=stacked(of_hot.up, gradients.up),
    down=stacked(of_hot.down, gradients.down),
  )


def _interleaved(
  halves: Float[Array, "rows 2 half"],
) -> Float[Array, "rows padded"]:
  return jnp.swapaxes(halves, 1, 2).reshape(halves.shape[0], -1)


def _pad_rows(
  matrix: Float[Array, "rows d_model"],
) -> Float[Array, "rows padded"]:
  return pad_to_multiples(matrix, (1, rows.WIDTH_MULTIPLE))
