"""The device mesh, and where the state and the batches of a run lie on it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from twell_jax.nn import Partitioning

MESH_AXES = ("data", "fsdp", "tensor")

HostBatch = Mapping[str, np.ndarray]


def make_mesh(
  *,
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  devices: list[jax.Device] | None = None,
) -> Mesh:
  """A mesh with the axes of `MESH_AXES`.

  Args:
    data: Copies of the parameters; the batch is cut over them. -1: the rest of
      the devices.
    fsdp: Slices of the parameters' embed axis; the batch is cut over them too.
    tensor: Slices of the neurons, heads and vocabulary.
    devices: The devices; all of them if None.

  Returns:
    The mesh, its axes left to the compiler (`AxisType.Auto`).

  Raises:
    ValueError: The sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
  free = [name for name, size in sizes.items() if size == -1]
  for name, size in sizes.items():
    if size < 1 and size != -1:
      raise ValueError(
        f"mesh axis {name} = {size}: give a positive size, or -1 for the rest"
      )
  if len(free) > 1:
    raise ValueError(
      f"mesh axes {' and '.join(free)} are both -1: only one can be the rest"
    )
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if free:
    sizes[free[0]] = len(devices) // fixed
  if math.prod(sizes.values()) != len(devices):
    raise ValueError(
      f"mesh data = {data}, fsdp = {fsdp}, tensor = {tensor} does not divide "
      f"{len(devices)} devices: the sizes must multiply to that number"
    )
  return jax.make_mesh(
    tuple(sizes.values()),
    MESH_AXES,
    axis_types=(AxisType.Auto,) * len(MESH_AXES),
    devices=devices,
  )


def parameter_shardings(
  axes: PyTree[tuple[str, ...]],
  shapes: PyTree[jax.ShapeDtypeStruct],
  partitioning: Partitioning,
) -> PyTree[NamedSharding]:
  """Where each parameter is stored.

  Args:
    axes: Logical axis names of each parameter (`twell_jax.nn.logical_axes`).
    shapes: The parameters, or their abstract values.
    partitioning: The mesh.

  Returns:
    A tree of shardings like `shapes`.

  Raises:
    ValueError: A mesh axis does not divide the dimension it is to cut.
  """

  def place(path, value, names):
    sharding = partitioning.sharding(names)
    for name, size, mesh_axis in zip(names, value.shape, sharding.spec):
      pieces = 1 if mesh_axis is None else partitioning.mesh.shape[mesh_axis]
      if size % pieces:
        raise ValueError(
          f"{path_name(path)}: {name} = {size} is not divisible by mesh axis "
          f"{mesh_axis} = {pieces}: choose a size of that axis which divides it"
        )
    return sharding

  return jax.tree.map_with_path(place, shapes, axes)


def optimizer_shardings(
  optimizer: optax.GradientTransformation,
  opt_state: PyTree,
  params: PyTree[NamedSharding],
  partitioning: Partitioning,
) -> PyTree[NamedSharding]:
  """Where the optimizer state lies: each moment where its parameter does.

  Args:
    optimizer: The transformation that made the state.
    opt_state: Its state, concrete or abstract.
    params: The shardings of the parameters.
    partitioning: The mesh; what belongs to no parameter is replicated on it.

  Returns:
    A tree of shardings like `opt_state`.
  """
  everywhere = replicated(partitioning)
  return map_moments(
    optimizer,
    lambda _, sharding: sharding,
    opt_state,
    params,
    others=lambda _: everywhere,
  )


def map_moments(
  optimizer: optax.GradientTransformation,
  function: Callable[..., Any],
  opt_state: PyTree,
  params: PyTree,
  *,
  others: Callable[[Any], Any],
) -> PyTree:
  """Maps what an optimizer keeps of each parameter, however deep it is nested.

  Args:
    optimizer: The transformation that made the state.
    function: Of an array of a moment, and the leaf of its parameter.
    opt_state: The optimizer's state, concrete or abstract.
    params: A tree like the parameters.
    others: What to make of an array that belongs to no parameter.

  Returns:
    A tree like `opt_state`.
  """

  def is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)

  return optax.tree.map_params(
    optimizer,
    # In the place of a parameter that this part of an optimizer leaves alone.
    lambda leaf, param: leaf if is_masked(leaf) else function(leaf, param),
    opt_state,
    params,
    transform_non_params=others,
    is_leaf=is_masked,
  )


def batch_sharding(partitioning: Partitioning) -> NamedSharding:
  """The sharding of [batch, seq] arrays: sequences over the batch axes."""
  return partitioning.sharding(("batch", None))


def check_batch_size(
  batch_size: int, *, mesh: Mesh, accumulation_steps: int = 1
) -> None:
  """Raises ValueError unless a global batch can be cut for this mesh.

  Args:
    batch_size: Sequences per step, over all hosts.
    mesh: From `make_mesh`.
    accumulation_steps: Micro-batches per step.
  """
  batch_axes = Partitioning(mesh).batch_axes
  pieces = math.prod(mesh.shape[axis] for axis in batch_axes)
  if batch_size % (pieces * accumulation_steps):
    raise ValueError(
      f"batch of {batch_size} sequences is not divisible by "
      f"accumulation_steps = {accumulation_steps} times {pieces}, the devices "
      f"of mesh axes {' and '.join(batch_axes)}: change "
      "batch_size, accumulation_steps or the mesh"
    )


@dataclasses.dataclass(frozen=True)
class DataShard:
  """The part of each batch that a process reads: rows [index, index + 1)/count.

  Attributes:
    index: Which of the equal parts.
    count: How many there are.
  """

  index: int
  count: int


@functools.cache
def data_shard(mesh: Mesh) -> DataShard:
  """What this process reads of each batch.

  Processes whose devices hold the same sequences, because a tensor axis spans
  them, read the same part.

  Args:
    mesh: From `make_mesh`.

  Raises:
    ValueError: A process would hold parts that no equal cut has.
  """
  partitioning = Partitioning(mesh)
  pieces = math.prod(mesh.shape[axis] for axis in partitioning.batch_axes)
  held: dict[int, set[int]] = {}
  cut = batch_sharding(partitioning).devices_indices_map((pieces, 1))
  for device in mesh.devices.flat:
    rows, _ = cut[device]
    piece = rows.indices(pieces)[0]
    held.setdefault(device.process_index, set()).add(piece)
  return equal_part(held, pieces=pieces, process=jax.process_index())


def equal_part(
  held: Mapping[int, set[int]], *, pieces: int, process: int
) -> DataShard:
  """The part of a process, if processes hold equal ones; see `data_shard`.

  Args:
    held: The pieces of a batch that each process holds.
    pieces: How many there are.
    process: Whose part is asked for.
  """
  for number, mine in held.items():
    first, size = min(mine), len(mine)
    if size != len(held[process]) or first % size or max(mine) >= first + size:
      raise ValueError(
        f"of the {pieces} pieces of a batch, process {number} would hold"
        f" {sorted(mine)}, which is no equal cut: start processes with the same"
        " number of devices, and choose mesh axes data and fsdp whose product"
        " divides, or is divided by, the number of processes"
      )
  size = len(held[process])
  return DataShard(min(held[process]) // size, pieces // size)


def place_batch(
  batch: HostBatch, partitioning: Partitioning
) -> dict[str, Array]:
  """Puts a host batch on the mesh.

  Args:
    batch: [batch, seq] arrays; of several processes, the sequences of this
      one's `data_shard`.
    partitioning: The mesh.

  Returns:
    The global batch.

  Raises:
    ValueError: The batch axes of the mesh do not divide the batch.
  """
  sharding = batch_sharding(partitioning)
  global_size = len(batch["inputs"]) * data_shard(partitioning.mesh).count
  check_batch_size(global_size, mesh=partitioning.mesh)
  return {
    name: jax.make_array_from_process_local_data(
      sharding, value, (global_size, *value.shape[1:])
    )
    for name, value in batch.items()
  }


def path_name(path: tuple[Any, ...]) -> str:
  """A readable name of a leaf: the keys of its path joined by slashes."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def replicated(partitioning: Partitioning) -> NamedSharding:
  """The sharding of values that every device holds whole."""
  return NamedSharding(partitioning.mesh, PartitionSpec())
