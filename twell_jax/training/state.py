"""What a run carries from step to step, and how it comes to lie on a mesh."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int32, PRNGKeyArray, PyTree

from twell_jax.nn import (
  Partitioning,
  TransformerConfig,
  TransformerLM,
  logical_axes,
)
from twell_jax.training.objective import L1Control
from twell_jax.training.sharding import (
  optimizer_shardings,
  parameter_shardings,
  replicated,
)

# What a state also counts, which early checkpoints do not hold.
TRACKED = ("silent_tokens", "l1_control", "skipped")


class Skipped(NamedTuple):
  """Updates left out since their loss or gradient was not finite.

  Attributes:
    total: Of the run so far.
    in_a_row: The last updates, if they were left out.
  """

  total: Int32[Array, ""]
  in_a_row: Int32[Array, ""]


class TrainState(NamedTuple):
  """The state of a run; everything that a checkpoint must hold of the model.

  Attributes:
    step: Updates made so far.
    params: The parameters as nested dicts of arrays.
    opt_state: The optimizer's state.
    rng: The key of the run. A step that draws numbers folds its step number in,
      so that the key itself never changes.
    silent_tokens: Tokens since each neuron last fired (`dead_neurons`).
    l1_control: What multiplies λ where it follows a target (`objective`).
    skipped: Updates that were left out.
  """

  step: Int32[Array, ""]
  params: PyTree[Float[Array, "..."]]
  opt_state: optax.OptState
  rng: PRNGKeyArray
  silent_tokens: Int32[Array, "layers d_ff"]
  l1_control: L1Control
  skipped: Skipped


class Model(NamedTuple):
  """A model without its parameters, and what is known about them beforehand.

  Attributes:
    config: The config that it was made from.
    graphdef: Its structure; `nnx.merge(graphdef, params)` is the module.
    params: Abstract parameters, as nested dicts, with shardings.
    partitioning: The mesh on which it runs.
  """

  config: TransformerConfig
  graphdef: nnx.GraphDef[TransformerLM]
  params: PyTree[jax.ShapeDtypeStruct]
  partitioning: Partitioning

  def bind(self, params: PyTree[Array]) -> TransformerLM:
    """The module with these parameters."""
    return nnx.merge(self.graphdef, params)

  def init(self, key: PRNGKeyArray) -> PyTree[Array]:
    """Draws the parameters."""
    model = TransformerLM(
      self.config, partitioning=self.partitioning, rngs=nnx.Rngs(params=key)
    )
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def abstract_model(
  config: TransformerConfig, partitioning: Partitioning
) -> Model:
  """The model that a config describes; computes nothing.

  Args:
    config: The model.
    partitioning: The mesh.

  Returns:
    The model, its abstract parameters placed on the mesh.

  Raises:
    ValueError: The mesh does not divide a dimension of a parameter.
  """
  module = nnx.eval_shape(
    lambda: TransformerLM(
      config, partitioning=partitioning, rngs=nnx.Rngs(params=0)
    )
  )
  graphdef, variables = nnx.split(module)
  params = nnx.to_pure_dict(variables)
  shardings = parameter_shardings(logical_axes(module), params, partitioning)
  params = jax.tree.map(_placed, params, shardings)
  return Model(config, graphdef, params, partitioning)


def abstract_state(
  model: Model, optimizer: optax.GradientTransformation
) -> TrainState:
  """The state's shapes, dtypes and shardings, without any array."""
  state = jax.eval_shape(
    lambda params: _fresh(
      model, params, optimizer.init(params), jax.random.key(0)
    ),
    model.params,
  )
  everywhere = replicated(model.partitioning)
  params = jax.tree.map(lambda leaf: leaf.sharding, model.params)
  opt_state = optimizer_shardings(
    optimizer, state.opt_state, params, model.partitioning
  )
  shardings = jax.tree.map(lambda _: everywhere, state)._replace(
    params=params, opt_state=opt_state
  )
  return jax.tree.map(_placed, state, shardings)


def initial_state(
  model: Model, optimizer: optax.GradientTransformation, *, seed: int
) -> TrainState:
  """The state before the first step, made on the mesh it will live on.

  The numbers depend on the seed alone; the mesh may change their rounding.
  """

  def init(key: PRNGKeyArray) -> TrainState:
    params_key, run_key = jax.random.split(key)
    params = model.init(params_key)
    return _fresh(model, params, optimizer.init(params), run_key)

  abstract = abstract_state(model, optimizer)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))


def with_tracking(
  fields: Mapping[str, Any], abstract: TrainState
) -> TrainState:
  """A state from those of its fields that a checkpoint holds.

  Args:
    fields: All of them but, perhaps, some of `TRACKED`, which then begin as
      those of a new run.
    abstract: The shapes and places of all.
  """

  # Abstract, whatever the fields' declared type says.
  def fill(leaf: Array, value: int) -> Array:
    return jnp.full(leaf.shape, value, leaf.dtype, device=leaf.sharding)

  begun: dict[str, Any] = {
    "silent_tokens": fill(abstract.silent_tokens, 0),
    "l1_control": L1Control(
      factor=fill(abstract.l1_control.factor, 1),
      usual=fill(abstract.l1_control.usual, 0),
    ),
    "skipped": Skipped(
      total=fill(abstract.skipped.total, 0),
      in_a_row=fill(abstract.skipped.in_a_row, 0),
    ),
  }
  return TrainState(**begun | dict(fields))


def _fresh(
  model: Model, params: PyTree, opt_state: optax.OptState, rng: PRNGKeyArray
) -> TrainState:
  neurons = (model.config.num_layers, model.config.d_ff)
  return TrainState(
    step=jnp.int32(0),
    params=params,
    opt_state=opt_state,
    rng=rng,
    silent_tokens=jnp.zeros(neurons, jnp.int32),
    l1_control=L1Control(factor=jnp.float32(1), usual=jnp.float32(0)),
    skipped=Skipped(total=jnp.int32(0), in_a_row=jnp.int32(0)),
  )


def _placed(
  leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
