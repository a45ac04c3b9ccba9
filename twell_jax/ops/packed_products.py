"""The products of a layer at its packed entries, by the gathered kernels.

P and U are the gate and up values of the active neurons, in ELL; what has a bar
is the same in the lists of neurons, where the tokens of each neuron are one
after the other (formats/transpose.py). Equations are those of arXiv 2603.23198:

    forward                       gathered rows, of each entry
      U = x Wuᵀ  at P's entries     sddmm               Wu
      h = P ⊙ U
      y = h Wd                      gathered_down       Wd

    backward
      dh̄ = Wd dyᵀ, dWd = h̄ᵀ dy      sddmm_spmm          dy
      dh += dl1 / tokens · sign(h)
      dU = dh ⊙ P,  dP = dh ⊙ U
      dx = dU Wu + dP Wg            spmm_two_matrices   Wu, Wg
      dWu = dŪᵀ x, dWg = dP̄ᵀ x      spmm_two_values     x

Six rows are gathered for an entry. Without residuals the forward pass is one
kernel, gathered_up_down, in which h never leaves the registers. Of a layer that
is not gated h is P, and products with one matrix or value are gathered_down.

Sums over neurons are float32 until the caller rounds them, since hot neurons
and dense tokens have parts in them too.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import gathered, sddmm, spmm, target, tuning, work_list
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.gradient_config import Product
from pallas_kernels.work_list import Work
from twell_jax.formats import EllMatrix, NeuronLists, transpose_ell
from twell_jax.ops.outputs import Gradients


class PackedLayer(NamedTuple):
  """A layer, and which of its neurons are active at which tokens.

  Attributes:
    x: Tokens, rows padded as the kernels need them; so are the matrices'.
    gate: Gate matrix, of all neurons, like the next two.
    up: Up matrix, or None.
    down: Down matrix.
    p: Gate values of the neurons that are not hot, the last p.d_ff ones.
    max_active: Entries that p has at most.
    device: What the kernels run on.
  """

  x: Float[Array, "tokens padded"]
  gate: Float[Array, "d_ff padded"]
  up: Float[Array, "d_ff padded"] | None
  down: Float[Array, "d_ff padded"]
  p: EllMatrix
  max_active: int
  device: target.Device

  @property
  def hot_neurons(self) -> int:
    """Neurons before those of p."""
    return self.gate.shape[0] - self.p.d_ff

  @property
  def used(self) -> Bool[Array, "tokens width"]:
    """Slots that have an entry."""
    slot = jnp.arange(self.p.width, dtype=jnp.int32)[None]
    return slot < self.p.stored[:, None]

  @property
  def columns(self) -> Int32[Array, "slots"]:
    """The row of a matrix of each slot."""
    return (self.p.columns + self.hot_neurons).reshape(-1)

  @property
  def values(self) -> Float32[Array, "tokens width"]:
    """Gate values in the dtype of the kernels' scalars."""
    return self.p.values.astype(jnp.float32)


class Packed(NamedTuple):
  """What `forward` gives.

  Attributes:
    y: In bfloat16, y0 added before the one rounding.
    l1: The sum of |h|.
    u: Up values in ELL, +0 in unused slots; None if the layer is not gated.
  """

  y: Float[Array, "tokens padded"]
  l1: Float32[Array, ""]
  u: Float32[Array, "tokens width"] | None


def forward_only(
  layer: PackedLayer, *, y0: Float32[Array, "tokens padded"] | None
) -> Packed:
  """`forward` without u, which is None, in one kernel."""
  if layer.up is None:
    return forward(layer, y0=y0)
  config = _by_token(layer, matrices=2)
  y, l1 = gathered.gathered_up_down(
    layer.x,
    layer.up,
    layer.down,
    columns=layer.columns,
    values=layer.values.reshape(-1),
    work=_work_by_token(layer, config),
    config=config,
    y0=y0,
  )
  return Packed(y, jnp.sum(l1), None)


def forward(
  layer: PackedLayer, *, y0: Float32[Array, "tokens padded"] | None
) -> Packed:
  """y0 + h down, and what the backward pass needs besides p."""
  u, h = None, layer.values
  if layer.up is not None:
    config = _of_training(layer, Product.SDDMM)
    u = sddmm.sddmm(
      layer.x,
      layer.up,
      columns=layer.columns,
      work=_work_by_token(layer, config),
      config=config,
    ).reshape(h.shape)
    # Not the product alone: the slots without an entry are no zeros where u
    # is not finite.
    h = jnp.where(layer.used, h * u, 0)
  y = _sum_by_token(layer, layer.down, h, dtype=jnp.bfloat16, y0=y0)
  return Packed(y, jnp.sum(jnp.abs(h)), u)


def backward(
  layer: PackedLayer,
  u: Float[Array, "tokens width"] | None,
  dy: Float[Array, "tokens padded"],
  *,
  penalty: Float[Array, ""],
) -> Gradients:
  """Gradients at the entries, in float32: of x, and of p.d_ff neurons.

  Args:
    layer: As the forward pass had it.
    u: What the forward pass gave, in any dtype.
    dy: Cotangent of y, of padded rows.
    penalty: Cotangent of each |h|.
  """
  lists = transpose_ell(layer.p)
  used, p = layer.used, layer.values
  h = p
  if u is not None:
    u = u.astype(jnp.float32)
    h = jnp.where(used, p * u, 0)

  config = _of_training(layer, Product.SDDMM_SPMM)
  of_dy = sddmm.sddmm_spmm(
    layer.down[layer.hot_neurons :],
    dy,
    columns=lists.tokens,
    values=lists.from_ell(h),
    work=_work_by_neuron(layer, lists, config),
    config=config,
    dtype=jnp.float32,
  )
  dh = lists.to_ell(of_dy.dots) + penalty * jnp.sign(h)
  dh = jnp.where(used, dh, 0)
  if layer.up is None or u is None:
    return Gradients(
      x=_sum_by_token(layer, layer.gate, dh, dtype=jnp.float32),
      gate=_sum_by_neuron(layer, lists, dh),
      up=None,
      down=of_dy.y,
    )

  du, dp = dh * p, jnp.where(used, dh * u, 0)
  config = _of_training(layer, Product.SPMM_TWO_MATRICES)
  dx = spmm.spmm_two_matrices(
    layer.up,
    layer.gate,
    m=layer.x.shape[0],
    columns=layer.columns,
    a_values=du.reshape(-1),
    b_values=dp.reshape(-1),
    work=_work_by_token(layer, config),
    config=config,
    dtype=jnp.float32,
  )
  config = _of_training(layer, Product.SPMM_TWO_VALUES)
  of_x = spmm.spmm_two_values(
    layer.x,
    m=layer.p.d_ff,
    columns=lists.tokens,
    y_values=lists.from_ell(du),
    z_values=lists.from_ell(dp),
    work=_work_by_neuron(layer, lists, config),
    config=config,
    dtype=jnp.float32,
  )
  return Gradients(x=dx, gate=of_x.z, up=of_x.y, down=of_dy.y)


def _sum_by_token(
  layer: PackedLayer,
  matrix: Float[Array, "d_ff padded"],
  values: Float32[Array, "tokens width"],
  **options: Any,
) -> Float[Array, "tokens padded"]:
  config = _by_token(layer, matrices=1)
  return gathered.gathered_down(
    matrix,
    m=layer.x.shape[0],
    columns=layer.columns,
    values=values.reshape(-1),
    work=_work_by_token(layer, config),
    config=config,
    **options,
  )


def _sum_by_neuron(
  layer: PackedLayer, lists: NeuronLists, values: Float32[Array, "tokens width"]
) -> Float32[Array, "cold padded"]:
  """Σ of values · rows of x, over the tokens of each neuron."""
  # One value is the easier half of two.
  config = _of_training(layer, Product.SPMM_TWO_VALUES)
  return gathered.gathered_down(
    layer.x,
    m=layer.p.d_ff,
    columns=lists.tokens,
    values=lists.from_ell(values),
    work=_work_by_neuron(layer, lists, config),
    config=config,
    dtype=jnp.float32,
  )


def _by_token(layer: PackedLayer, *, matrices: int) -> GatherConfig:
  return tuning.for_gathered(
    layer.device,
    layer.x.shape[0],
    layer.gate.shape[0],
    layer.x.shape[1],
    layer.p.width,
    matrices=matrices,
  )


def _of_training(layer: PackedLayer, product: Product) -> GatherConfig:
  return tuning.for_gradient(
    layer.device,
    product,
    layer.x.shape[0],
    layer.p.d_ff,
    layer.x.shape[1],
    layer.p.width,
  )


def _work_by_token(layer: PackedLayer, config: GatherConfig) -> Work:
  return work_list.of_ell(
    layer.p.stored, width=layer.p.width, length=config.segment_length
  )


def _work_by_neuron(
  layer: PackedLayer, lists: NeuronLists, config: GatherConfig
) -> Work:
  bounds = {
    "width": layer.x.shape[0],
    "length": config.segment_length,
    "total": layer.max_active,
  }
  neurons = layer.p.d_ff
  return work_list.segments(
    lists.starts,
    lists.counts,
    length=config.segment_length,
    capacity=work_list.max_segments(neurons, **bounds),
    part_capacity=work_list.max_parts(neurons, **bounds),
  )
