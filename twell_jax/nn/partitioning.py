"""Parameters with logical axis names, and where those axes lie on a mesh.

A parameter names its axes by meaning; the mesh axis comes from the rules below.

  logical axis                       lies on
  vocab, mlp, heads, kv_heads        the tensor axis (a slice of neurons, heads)
  embed                              the fsdp axis (gathered where it is used)
  layers, head_dim, norm             replicated
  batch (activations)                the batch axes

Logical names are stored as the `out_sharding` metadata of `nnx.Param`, with
eager sharding off: names are not mesh axes, and a model must build without one.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

LogicalAxes = tuple[str, ...]


def parameter(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  axes: LogicalAxes,
  *,
  init_std: float,
  dtype: DTypeLike,
) -> nnx.Param:
  """A weight drawn from N(0, init_std²) whose axes are named."""
  # Drawn in float32 whatever the dtype: bfloat16 draws are coarse.
  value = init_std * jax.random.normal(rngs.params(), shape, jnp.float32)
  return named_parameter(value.astype(dtype), axes)


def named_parameter(value: Array, axes: LogicalAxes) -> nnx.Param:
  """A parameter with logical axis names."""
  return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def logical_axes(model: nnx.Module) -> dict:
  """The logical axis names of each parameter, as a nested dict like the model.

  Args:
    model: A module, or the abstract one that `nnx.eval_shape` returns.
  """
  names = nnx.state(model, nnx.Param)
  return nnx.to_pure_dict(
    jax.tree.map(
      lambda variable: variable.replace(variable.get_metadata("out_sharding")),
      names,
      is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
  )


def num_parameters(model: nnx.Module) -> int:
  """How many numbers the parameters of a (possibly abstract) model hold."""
  return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@dataclasses.dataclass(frozen=True)
class Partitioning:
  """The mesh of a model and the roles of its axes.

  Attributes:
    mesh: A mesh with `AxisType.Auto` axes.
    batch_axes: Mesh axes over which the batch dimension is cut.
    fsdp_axis: Mesh axis over which parameters are stored in slices.
    tensor_axis: Mesh axis over which neurons, heads and vocabulary are cut.
  """

  mesh: Mesh
  batch_axes: tuple[str, ...] = ("data", "fsdp")
  fsdp_axis: str = "fsdp"
  tensor_axis: str = "tensor"

  @property
  def neuron_shards(self) -> int:
    """Slices into which the neurons of a layer are cut."""
    return self.mesh.shape[self.tensor_axis]

  def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
    """Where an array with these logical axes is stored."""
    return NamedSharding(self.mesh, self._spec(axes))

  def gathered(self, axes: Sequence[str | None]) -> NamedSharding:
    """Where a parameter with these logical axes lies while it is used."""
    return NamedSharding(
      self.mesh,
      self._spec([None if axis == "embed" else axis for axis in axes]),
    )

  def _spec(self, axes: Sequence[str | None]) -> PartitionSpec:
    rules = {
      "batch": self.batch_axes,
      "embed": self.fsdp_axis,
      "vocab": self.tensor_axis,
      "mlp": self.tensor_axis,
      "heads": self.tensor_axis,
      "kv_heads": self.tensor_axis,
      "layers": None,
      "head_dim": None,
      "norm": None,
      None: None,
    }
    return PartitionSpec(*(rules[axis] for axis in axes))


def use_weight(
  param: nnx.Param, *, dtype: DTypeLike, partitioning: Partitioning | None
) -> Shaped[Array, "..."]:
  """A parameter's value in the dtype of the computation, gathered for use."""
  axes = param.get_metadata("out_sharding")
  return gather_weight(param[...], axes, dtype=dtype, partitioning=partitioning)


def gather_weight(
  weight: Shaped[Array, "..."],
  axes: Sequence[str | None],
  *,
  dtype: DTypeLike,
  partitioning: Partitioning | None,
) -> Shaped[Array, "..."]:
  """A weight with these logical axes, cast, and gathered for use.

  Constraining the cast weight to its slice first makes XLA gather weights, in
  the narrow dtype; without constraints it gathers activations instead.
  """
  weight = weight.astype(dtype)
  if partitioning is None:
    return weight
  weight = jax.lax.with_sharding_constraint(weight, partitioning.sharding(axes))
  return jax.lax.with_sharding_constraint(weight, partitioning.gathered(axes))


def constrain(
  x: Shaped[Array, "..."],
  axes: Sequence[str | None],
  partitioning: Partitioning | None,
) -> Shaped[Array, "..."]:
  """An activation held where its logical axes say; x itself without a mesh."""
  if partitioning is None:
    return x
  return jax.lax.with_sharding_constraint(x, partitioning.sharding(axes))
