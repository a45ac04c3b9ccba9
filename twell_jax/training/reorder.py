"""Sorts the neurons of a run by how often they fire, between two steps.

`hot_neurons` of a model are the first neurons of every layer, so those must be
the ones that fire most. While training, rates drift. Re-ordering moves neurons:

            before              after
    fired   2 0 9 5             9 5 2 0     counted by the step just made
    gate    a b c d             c d a b   ┐
    up      a b c d             c d a b   │ a neuron is one row of each, and of
    down    a b c d             c d a b   │ all that the optimizer keeps of it
    moments a b c d             c d a b   │
    silent  0 9 0 0             0 0 0 9   ┘ for so many tokens

Function, gradient and update of a neuron do not depend on its place, so that a
loss curve is that of the run without re-ordering, up to the order of sums. The
counts come from the step, and nothing is remembered between two re-orderings: a
run that is resumed from any checkpoint re-orders as the unbroken one did. Where
dead neurons are re-initialised, the numbers they are given depend on their
place.
"""

from collections.abc import Callable

import jax
import optax
from jaxtyping import Array, Float, Int32, PyTree

from twell_jax.nn import logical_axes
from twell_jax.ops import order_by_rate
from twell_jax.training.sharding import map_moments, replicated
from twell_jax.training.state import Model, TrainState, abstract_state

Fired = Int32[Array, "layers d_ff"]
Reorder = Callable[[TrainState, Fired], TrainState]


def make_reorder(
  model: Model, optimizer: optax.GradientTransformation
) -> Reorder:
  """Compiles the re-ordering; the state passed to it is consumed.

  Args:
    model: The model on its mesh. Neurons that are split over the tensor axis
      are dealt so that every slice starts with its share of the most frequent,
      as `hot_neurons` counts them on a mesh.
    optimizer: The transformation whose state the `TrainState` holds. All that
      it keeps of each neuron moves along, however deep it is nested.

  Returns:
    A function of the state and `StepStatistics.fired` [layers, d_ff] int32 that
    gives the state with the neurons of every layer sorted by falling counts,
    equal ones as they were, and each array where it was on the mesh.

  Raises:
    ValueError: Neurons that are never silent and so have no order; or an
      optimizer that keeps something of the neurons which is not one row each.
  """
  config = model.config
  if config.activation != "relu":
    raise ValueError(
      f"activation = {config.activation!r} leaves no neuron silent to sort by:"
      " leave reorder_neurons_every_steps at 0 or choose activation = 'relu'"
    )
  abstract = abstract_state(model, optimizer)
  is_moved = _per_neuron(model, optimizer, abstract)
  shards = model.partitioning.neuron_shards

  def reorder(state: TrainState, fired: Fired) -> TrainState:
    leaves, structure = jax.tree.flatten(state)
    places = [place for place, moved in enumerate(is_moved) if moved]
    moved = _sort([leaves[place] for place in places], fired, shards)
    for place, leaf in zip(places, moved, strict=True):
      leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)

  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  return jax.jit(
    reorder,
    in_shardings=(shardings, replicated(model.partitioning)),
    out_shardings=shardings,
    donate_argnums=0,
  )


def _sort(
  arrays: list[Float[Array, "layers d_ff ..."]], fired: Fired, shards: int
) -> list[Float[Array, "layers d_ff ..."]]:
  def sort_layer(layer: Int32[Array, ""], arrays: list[Array]) -> list[Array]:
    moved = order_by_rate(
      [array[layer] for array in arrays], fired[layer], shards=shards
    )
    return [
      array.at[layer].set(rows)
      for array, rows in zip(arrays, moved, strict=True)
    ]

  # In place, layer by layer: all at once takes as much memory again as the
  # parameters and moments of all layers, at the peak of a run.
  return jax.lax.fori_loop(0, len(fired), sort_layer, arrays)


def _per_neuron(
  model: Model, optimizer: optax.GradientTransformation, abstract: TrainState
) -> list[bool]:
  """Of each leaf of a state, whether it has a row for every neuron."""
  config = model.config

  def has_rows(leaf: jax.ShapeDtypeStruct, names: tuple[str, ...]) -> bool:
    if "mlp" not in names:
      return False
    if leaf.shape[:2] != (config.num_layers, config.d_ff):
      raise ValueError(
        f"the optimizer keeps an array of shape {leaf.shape} of neurons, which"
        f" does not begin with layers = {config.num_layers} and d_ff ="
        f" {config.d_ff}: leave reorder_neurons_every_steps at 0 or choose an"
        " optimizer that keeps the shape of the parameters"
      )
    return True

  axes: PyTree[tuple[str, ...]] = logical_axes(model.bind(model.params))
  found = jax.tree.map(lambda _: False, abstract)._replace(
    params=jax.tree.map(has_rows, model.params, axes),
    opt_state=map_moments(
      optimizer, has_rows, abstract.opt_state, axes, others=lambda _: False
    ),
    silent_tokens=True,
  )
  return jax.tree.leaves(found)
