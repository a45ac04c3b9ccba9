"""`sparse_ffn` on a mesh: tokens split over some axes, neurons over another.

Every neuron adds its own part to y, so a slice of neurons makes a part of y
from its own rows of the three matrices, and the parts add up. Each device runs
the op on what it holds (the custom_vjp is inside the shard_map); the
collectives are one sum of y over the neuron axis, and those of the activity.
"""

import functools

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from twell_jax.formats import Capacities
from twell_jax.ops.choices import Choices
from twell_jax.ops.ffn import check_arguments, sparse_ffn
from twell_jax.ops.outputs import Activity, FFNOutput


def sharded_sparse_ffn(
  x: Float[Array, "batch *tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  mesh: Mesh,
  token_axes: tuple[str, ...] = ("data", "fsdp"),
  neuron_axis: str = "tensor",
  implementation: str | None = None,
  hot_neurons: int = 0,
  capacities: Capacities | None = None,
  dense_above: float | None = None,
) -> FFNOutput:
  """`sparse_ffn` over a mesh, with the same result.

  Args:
    x: Tokens; the first axis is split over `token_axes`.
    gate: Gate matrix, its neurons (rows) split over `neuron_axis`.
    up: Up matrix, split likewise, or None for the non-gated layer.
    down: Down matrix, split likewise.
    mesh: The device mesh; its other axes compute the same thing. On axes of
      type Explicit the arguments must already be split so (`jax.reshard`).
    token_axes: Mesh axes that split the tokens.
    neuron_axis: Mesh axis that splits the neurons.
    implementation: As in `sparse_ffn`.
    hot_neurons: As in `sparse_ffn`, counted over the whole layer: of each slice
      of neurons, the first hot_neurons / shards. `order_by_rate` with that
      number of `shards` deals the hottest neurons to the slices in turn.
    capacities: As in `sparse_ffn`, of each device's tokens and neurons.
    dense_above: As in `sparse_ffn`, of each device's tokens and neurons.

  Returns:
    y split as x, and the activity of the whole call: `l1` and `fired` over all
    tokens, `active` over all neurons. A token counts once for each slice of
    neurons in `overflowed` and in `dense_tokens`.

  Raises:
    ValueError: An unknown mesh axis, a size or hot_neurons that its axes do not
      divide, or what `sparse_ffn` refuses.
  """
  check_arguments(x, gate, up, down)
  Choices(hot_neurons, capacities, dense_above).check(d_ff=gate.shape[0])
  if x.ndim < 2:
    raise ValueError(
      f"x has shape {x.shape} but must have a first axis to split over"
      f" {token_axes}: [batch, ..., d_model]"
    )
  if isinstance(token_axes, str):
    raise ValueError(
      f"{token_axes=} must be a tuple of mesh axes: write ({token_axes!r},)"
    )
  sizes = dict(mesh.shape)
  for axis in (*token_axes, neuron_axis):
    if axis not in sizes:
      raise ValueError(
        f"no axis {axis!r} in the mesh, which has {sizes}; name its axes in"
        " token_axes and neuron_axis"
      )
  token_shards = 1
  for axis in token_axes:
    token_shards *= sizes[axis]
  for name, size, shards in (
    ("x.shape[0]", x.shape[0], token_shards),
    ("d_ff", gate.shape[0], sizes[neuron_axis]),
    ("hot_neurons", hot_neurons, sizes[neuron_axis]),
  ):
    if size % shards:
      raise ValueError(
        f"{name} = {size} must be divisible by {shards}, the shards that mesh"
        f" {sizes} makes of it"
      )
  rows = PartitionSpec(token_axes)
  neurons = PartitionSpec(neuron_axis)
  once = PartitionSpec()

  def local(x, gate, up, down):
    y, activity = sparse_ffn(
      x,
      gate,
      up,
      down,
      implementation=implementation,
      hot_neurons=hot_neurons // sizes[neuron_axis],
      capacities=capacities,
      dense_above=dense_above,
    )
    over_neurons = functools.partial(lax.psum, axis_name=neuron_axis)
    over_tokens = functools.partial(lax.psum, axis_name=token_axes)
    # In the order of Activity's fields.
    return (
      _sum_over(y, neuron_axis),
      lax.pmean(over_neurons(activity.l1), token_axes),
      over_neurons(activity.active),
      over_tokens(activity.fired),
      over_tokens(over_neurons(activity.overflowed)),
      over_tokens(over_neurons(activity.dense_tokens)),
    )

  y, *activity = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(rows, neurons, None if up is None else neurons, neurons),
    out_specs=(rows, once, rows, neurons, once, once),
    # The loops of an implementation carry values that vary over the mesh from
    # constants that do not; every output above is reduced explicitly.
    check_vma=False,
  )(x, gate, up, down)
  return FFNOutput(y, Activity(*activity))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_over(y: Array, axis: str) -> Array:
  """The sum over a mesh axis, without communication in the backward pass.

  Every device holds the whole cotangent of y. A shard_map that does not check
  what varies over the mesh shares it out, divided by the size of the axis, and
  the transpose of psum would add the equal shares up again: an all-reduce of
  all tokens. Here they are multiplied.
  """
  return lax.psum(y, axis)


def _sum_over_fwd(y: Array, axis: str) -> tuple[Array, None]:
  return _sum_over(y, axis), None


def _sum_over_bwd(axis: str, _: None, dy: Array) -> tuple[Array]:
  return (dy * lax.axis_size(axis),)


_sum_over.defvjp(_sum_over_fwd, _sum_over_bwd)
