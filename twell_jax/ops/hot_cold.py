"""Which neurons are computed for all tokens: the split into hot and cold.

A few neurons fire often and many almost never. A neuron that fires at a share p
of the tokens costs p gathered rows per token and matrix, or one dense row
whatever p is, so above a break-even rate p* the dense product is faster:

    rate of the neurons, sorted
      │▇
      │▇▆
    p*│──▅▃──────────────          F neurons above p*: dense products
      │    ▂▂▁▁▁▁▁▁▁▁▁▁▁           the others: rows gathered where active
      └────┴─────────────
       hot F     cold

`hot_neurons=F` of `sparse_ffn` splits a layer so. It takes three steps, once a
model has been trained for a while:

    rates = activity.fired / tokens              # over enough tokens
    hot_neurons = choose_hot_neurons(rates, break_even=H200.break_even(2))
    params = order_by_rate(params, rates)        # the function is unchanged

At few tokens, as in decoding, a dense product waits for memory and
`hot_neurons=0` is the choice, with the same parameters.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32, PyTree


def rate_order(
  rates: Float[ArrayLike, "*layers d_ff"], *, shards: int = 1
) -> Int32[Array, "*layers d_ff"]:
  """The permutation of `order_by_rate`: new neuron j was neuron order[j].

  `jnp.argsort(order)` is the one that undoes it.

  Args:
    rates: How often each neuron fires, on any scale; one layer or a stack.
      NaN counts as the highest.
    shards: Slices of equal size in which the neurons will lie. Each gets every
      `shards`-th neuron of the sorted ones.

  Returns:
    The neurons by falling rate, those of equal rate as they were. With shards,
    the neurons of the first slice, then those of the second, and so on; each
    slice is sorted.

  Raises:
    ValueError: Rates of other than one or two axes, or a d_ff that the shards
      do not divide.
  """
  rates = jnp.asarray(rates)
  if rates.ndim not in (1, 2):
    raise ValueError(
      f"rates have shape {rates.shape} but must be [d_ff] or [layers, d_ff]"
    )
  d_ff = rates.shape[-1]
  if not isinstance(shards, int) or shards < 1 or d_ff % shards:
    raise ValueError(
      f"shards = {shards} must divide d_ff = {d_ff}: give the size of the"
      " mesh axis over which the neurons are split"
    )
  order = jnp.argsort(rates, axis=-1, descending=True, stable=True)
  dealt = order.reshape(*rates.shape[:-1], d_ff // shards, shards)
  return jnp.swapaxes(dealt, -1, -2).reshape(rates.shape).astype(jnp.int32)


def order_by_rate[Params: PyTree](
  params: Params,
  rates: Float[ArrayLike, "*layers d_ff"],
  *,
  shards: int = 1,
) -> Params:
  """The parameters of a layer with its neurons sorted by falling rate.

  The layer's function is unchanged, up to the order of sums: a neuron is one
  row of each matrix, and all rows move alike. Whatever else is kept per neuron
  moves the same way: the moments of an optimizer, the counts of an activity.

  Args:
    params: A pytree of arrays [d_ff, ...] or, of layers that are scanned,
      [layers, d_ff, ...]: the three matrices, the state of a `SparseFFN`, or
      `params["layers"]["ffn"]` of a `TransformerLM`.
    rates: How often each neuron fires: [d_ff] or [layers, d_ff].
    shards: Size of the mesh axis over which the neurons are split, of which
      each device holds a contiguous slice. The neurons are then dealt so that
      every slice starts with its share of the hottest.

  Returns:
    The same pytree, sorted as `rate_order` says.

  Raises:
    ValueError: What `rate_order` refuses, or an array whose leading axes are
      not those of rates.
  """
  order = rate_order(rates, shards=shards)

  def sort(path: tuple, leaf: Array) -> Array:
    leaf = jnp.asarray(leaf)
    if leaf.shape[: order.ndim] != order.shape:
      raise ValueError(
        f"{jax.tree_util.keystr(path)} has shape {leaf.shape} but rates"
        f" {order.shape}, which must be its leading axes: pass the arrays of"
        " the feed-forward layer only"
      )
    rows = order.reshape(order.shape + (1,) * (leaf.ndim - order.ndim))
    return jnp.take_along_axis(leaf, rows, axis=order.ndim - 1)

  return jax.tree_util.tree_map_with_path(sort, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceCosts:
  """Two speeds of a device, from which the split's costs are modelled.

  To fit another device, time a dense product of the layer's shape and the
  gathered product at a few activities, and divide. Where only the break-even
  share was measured (experiments/break_even.py does so for the xla
  implementation on CPU), give that to `choose_hot_neurons`: it is all it needs.

  Attributes:
    dense_flops_per_s: Of a dense product of the layer's shape and dtype; a
      multiply-add is two operations.
    gather_bytes_per_s: Of rows that are read in the order of active neurons.
  """

  dense_flops_per_s: float
  gather_bytes_per_s: float

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if not getattr(self, field.name) > 0:
        raise ValueError(
          f"{field.name} = {getattr(self, field.name)} must be above 0"
        )

  def break_even(self, itemsize: int) -> float:
    """The firing rate above which a neuron's dense product is the faster.

    Args:
      itemsize: Bytes of a number in the layer's matrices.
    """
    dense_s = 2 / self.dense_flops_per_s
    return dense_s / (itemsize / self.gather_bytes_per_s)

  def seconds(
    self,
    rates: Float[np.ndarray, "d_ff"],
    hot_neurons: int,
    *,
    tokens: int,
    d_model: int,
    itemsize: int = 2,
    matrices: int = 2,
  ) -> float:
    """Modelled time of one forward pass without its gate product.

    It is the sum of the dense product's operations and of the bytes of the
    gathered rows, each at its speed: nothing overlaps, nothing else costs.
    Neither holds at few tokens, where a dense product waits for memory.

    Args:
      rates: Share of the tokens at which each neuron fires, in the order in
        which the layer has its neurons.
      hot_neurons: As in `sparse_ffn`.
      tokens: Tokens of the call.
      d_model: Numbers in a row.
      itemsize: Bytes of each.
      matrices: Rows that an active neuron reads: up and down, or 1 without up.
    """
    numbers = tokens * d_model * matrices
    dense_s = 2 * hot_neurons / self.dense_flops_per_s
    firing = float(np.sum(rates[hot_neurons:], dtype=np.float64))
    return numbers * (dense_s + firing * itemsize / self.gather_bytes_per_s)


# A dense bfloat16 product measured on an H200; the gather's speed, from its
# second-level cache, is assumed.
H200 = DeviceCosts(dense_flops_per_s=790e12, gather_bytes_per_s=5.5e12)


def choose_hot_neurons(
  rates: Float[ArrayLike, "*layers d_ff"],
  *,
  break_even: float,
  granule: int = 128,
) -> int:
  """The number of hot neurons that costs least by the model of `DeviceCosts`.

  Computed on the host. In that model all costs are in proportion to tokens and
  d_model, so that the choice depends on neither.

  Args:
    rates: Share of the tokens at which each neuron fires, in any order; with
      several layers, the number is the best one for all of them.
    break_even: Firing rate above which a neuron is better computed for all
      tokens: `DeviceCosts.break_even` of a GPU (0.70 % in bfloat16 on `H200`),
      or the active share at which an implementation was measured to be as fast
      as the dense layer (on CPU about 6 % in float32 and 8 % in bfloat16).
    granule: What the number is a multiple of, unless it is d_ff: the width of
      a tile of the dense product. For a layer whose neurons are split over n
      devices, n times that, and sort with `order_by_rate(..., shards=n)`.

  Returns:
    hot_neurons for `sparse_ffn`, from 0 to d_ff, for neurons sorted by
    `order_by_rate`; the smallest of those that cost the same.

  Raises:
    ValueError: Rates that are no shares, or of other than one or two axes; a
      break-even or granule that is not positive.
  """
  rates = np.asarray(rates, np.float64)
  if rates.ndim not in (1, 2) or rates.size == 0:
    raise ValueError(
      f"rates have shape {rates.shape} but must be [d_ff] or [layers, d_ff]"
      " with sizes of at least 1"
    )
  if not np.all((rates >= 0) & (rates <= 1)):
    raise ValueError(
      f"rates reach from {rates.min()} to {rates.max()} but must be shares of"
      " the tokens, from 0 to 1: divide `fired` by their number"
    )
  if not 0 < break_even < math.inf:
    raise ValueError(f"break_even = {break_even} must be finite and above 0")
  if not isinstance(granule, int) or granule < 1:
    raise ValueError(f"granule = {granule} must be an int of at least 1")
  d_ff = rates.shape[-1]
  by_rate = -np.sort(-rates, axis=-1)
  cumulated = np.cumsum(by_rate.reshape(-1, d_ff).sum(axis=0))
  num_layers = rates.size // d_ff
  choices = np.append(np.arange(0, d_ff, granule), d_ff)
  saved = np.where(choices > 0, cumulated[choices - 1], 0.0)
  # In units of one neuron that fires at every token, less a constant.
  cost = num_layers * break_even * choices - saved
  return int(choices[np.argmin(cost)])
