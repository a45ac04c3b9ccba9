"""Neurons that have fallen silent: which they are, and how they are woken.

The L1 term silences neurons, and one that fires on no token has no gradient
that would let it fire again. A neuron is dead once it has been silent for a
window of tokens. The state of a run counts them, a whole step at a time:

  fired in a step of 4 tokens    1   0   0   0   3
  silent tokens after it         0   4   8  12   0
  dead, with a window of 8       no  no yes yes  no

A window that a step fills makes dead what was silent during the step, as in
arXiv 2603.23198, whose steps have 1,048,576 tokens.

Targeted re-initialisation, of the same paper, moves the gate rows of the dead
neurons j towards new ones, after the update of the optimizer:

  gate[j] ← (1 − ℓ) · gate[j] + ℓ · N(0, σ²)

Nothing is forgotten about a neuron that was re-initialised: it is moved again
until it fires. What the optimizer keeps of its row stays too. Without
gradients, the moments of Adam have decayed to almost nothing by the end of a
window, and the first gradients of a neuron that wakes move it no further than
those of any other.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray, PyTree

from twell_jax.nn import TransformerConfig
from twell_jax.training.sharding import path_name

_LARGEST_COUNT = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeadNeuronOptions:
  """Which neurons are dead, and whether they are re-initialised.

  Attributes:
    window_tokens: Tokens on which a dead neuron has been silent; rounded up to
      whole steps.
    reinitialize_every_steps: Steps between re-initialisations of the neurons
      that are dead; 1 is after every step, as in the paper, and 0 is never.
    mixing: ℓ, the share of a new row.
    std: σ, the standard deviation of a new row's numbers.
  """

  window_tokens: int = 1_048_576
  reinitialize_every_steps: int = 0
  mixing: float = 0.1
  std: float = 0.02

  def __post_init__(self):
    if not 1 <= self.window_tokens <= _LARGEST_COUNT:
      raise ValueError(
        f"dead_neurons window_tokens = {self.window_tokens} must be from 1 to"
        f" {_LARGEST_COUNT}, the largest count of silent tokens"
      )
    if self.reinitialize_every_steps < 0:
      raise ValueError(
        "dead_neurons reinitialize_every_steps ="
        f" {self.reinitialize_every_steps} is negative: 0 is never"
      )
    if not 0 < self.mixing <= 1:  # NaN is not
      raise ValueError(
        f"dead_neurons mixing = {self.mixing} must be above 0 and at most 1"
      )
    if not self.std > 0:
      raise ValueError(f"dead_neurons std = {self.std} must be above 0")


def check_reinitialization(
  config: TransformerConfig, options: DeadNeuronOptions
) -> None:
  """Raises ValueError if a model without dead neurons is to have them woken."""
  if options.reinitialize_every_steps and config.activation != "relu":
    raise ValueError(
      f"activation = {config.activation!r} leaves no neuron dead: leave"
      " dead_neurons reinitialize_every_steps at 0 or choose activation ="
      " 'relu'"
    )


def count_silent(
  silent_tokens: Int32[Array, "layers d_ff"],
  fired: Int32[Array, "layers d_ff"],
  *,
  tokens: int,
) -> Int32[Array, "layers d_ff"]:
  """For how many tokens each neuron has been silent, after one more step.

  Args:
    silent_tokens: The counts before the step.
    fired: Tokens of the step on which each neuron was active.
    tokens: Tokens of the step, at most 2³¹ − 1.

  Returns:
    0 for a neuron that fired, else the sum; it stays at 2³¹ − 1 once there.
  """
  longer = jnp.minimum(silent_tokens, _LARGEST_COUNT - tokens) + tokens
  return jnp.where(fired > 0, 0, longer)


def gate_masks(
  dead: Bool[Array, "layers d_ff"],
) -> PyTree[Bool[Array, "layers d_ff"]]:
  """The mask of `reinitialize_dead` for the gates of a `TransformerLM`."""
  return {"layers": {"ffn": {"gate": dead}}}


def reinitialize_dead(
  *, mixing: float = 0.1, std: float = 0.02
) -> optax.GradientTransformationExtraArgs:
  """Moves the rows of dead neurons towards new ones.

  Chained after an optimizer, so that what it mixes is the updated row:

    w[j] + update[j] ← (1 − mixing) · (w[j] + update[j]) + mixing · N(0, std²)

  It has no state. Its update needs `params` and, by name,

    dead: A tree with a mask [*layers, rows] at the place of each matrix
      [*layers, rows, columns] whose rows may be dead, and nothing elsewhere.
    key: Of this step alone. The numbers depend on it and on the place of a row,
      not on the mesh.

  Layers without a dead neuron cost nothing; the others are drawn one by one.

  Args:
    mixing: The share of a new row.
    std: The standard deviation of its numbers.

  Returns:
    The transformation. Its update raises ValueError without params, or for a
    mask that has not the place and the leading axes of a parameter.

  References:
    Cetin et al., arXiv 2603.23198, targeted re-initialisation.
  """

  def update(
    updates: PyTree[Array],
    state: optax.EmptyState,
    params: PyTree[Array] | None = None,
    *,
    dead: PyTree[Bool[Array, "..."]],
    key: PRNGKeyArray,
    **unused: Any,
  ) -> tuple[PyTree[Array], optax.EmptyState]:
    del unused  # Of other transformations in the chain.
    if params is None:
      raise ValueError("reinitialize_dead needs params: pass them to update")
    masks = {path_name(p): m for p, m in jax.tree.leaves_with_path(dead)}
    number = {name: i for i, name in enumerate(masks)}
    _check_masks(masks, params)

    def mix(path: tuple[Any, ...], update: Array, param: Array) -> Array:
      name = path_name(path)
      if name not in masks:
        return update
      return _mix(
        update,
        param,
        masks[name],
        jax.random.fold_in(key, number[name]),
        mixing=mixing,
        std=std,
      )

    return jax.tree.map_with_path(mix, updates, params), state

  return optax.GradientTransformationExtraArgs(
    lambda _: optax.EmptyState(), update
  )


def _check_masks(masks: dict[str, Array], params: PyTree[Array]) -> None:
  shapes = {
    path_name(path): leaf.shape
    for path, leaf in jax.tree.leaves_with_path(params)
  }
  for name, mask in masks.items():
    if shapes.get(name, ())[:-1] != mask.shape or not mask.ndim:
      raise ValueError(
        f"dead has a mask of shape {mask.shape} at {name}, where the parameters"
        f" have shape {shapes.get(name, 'none')}: give a matrix's shape without"
        " its last axis"
      )


def _mix(
  updates: Float[Array, "*layers rows columns"],
  params: Float[Array, "*layers rows columns"],
  dead: Bool[Array, "*layers rows"],
  key: PRNGKeyArray,
  *,
  mixing: float,
  std: float,
) -> Float[Array, "*layers rows columns"]:
  shape = updates.shape
  updates = updates.reshape(-1, *shape[-2:])
  params = params.reshape(updates.shape)
  dead = dead.reshape(updates.shape[:2])

  def mix_layer(layer: Int32[Array, ""], updates: Array) -> Array:
    update = updates[layer].astype(jnp.float32)
    drawn = std * jax.random.normal(
      jax.random.fold_in(key, layer), update.shape, jnp.float32
    )
    moved = params[layer].astype(jnp.float32) + update
    mixed = update + mixing * (drawn - moved)
    rows = jnp.where(dead[layer][:, None], mixed, update)
    return updates.at[layer].set(rows.astype(updates.dtype))

  def visit(layer: Int32[Array, ""], updates: Array) -> Array:
    return jax.lax.cond(
      jnp.any(dead[layer]),
      mix_layer,
      lambda layer, updates: updates,
      layer,
      updates,
    )

  # Layer by layer: random bits for all of them take several times the memory
  # of the parameters.
  updates = jax.lax.fori_loop(0, len(updates), visit, updates)
  return updates.reshape(shape)
