"""The two compiled functions of a run: one update, and one evaluation.

A step's batch [accumulation · micro, seq] is cut into micro-batches that a scan
works through. Each contributes its share of the global means, so the gradient
is that of the whole batch: the split and the mesh change rounding only.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from twell_jax.training.cross_entropy import CrossEntropy, model_cross_entropy
from twell_jax.training.dead_neurons import (
  DeadNeuronOptions,
  count_silent,
  gate_masks,
  reinitialize_dead,
)
from twell_jax.training.objective import L1Feedback
from twell_jax.training.sharding import batch_sharding, replicated
from twell_jax.training.state import (
  Model,
  Skipped,
  TrainState,
  abstract_state,
)

Batch = dict[str, Array]
# What a loss or gradient that is NaN or infinite does.
NonFinite = Literal["stop", "skip"]


class StepStatistics(NamedTuple):
  """What a step measured, as arrays on device.

  Attributes:
    loss: The objective.
    cross_entropy: Mean over target weights, in nats.
    l1: Mean over tokens of Σ|h|, for each layer.
    active: Active neurons of each token of each layer, int32.
    fired: Tokens of the step on which each neuron was active.
    dead: Neurons that were silent during the window that ends with the step,
      for each layer; 0 until there were as many tokens.
    reinitialized: Those of them that the step re-initialised.
    overflowed: Tokens beyond a format's capacity, for each layer.
    dense_tokens: Tokens computed by dense products, for each layer.
    gradient_norm: Global norm before clipping.
    learning_rate: The one of this update.
    l1_coefficient: The λ of this update.
    finite: Whether the loss and the gradient are.
    skipped_updates: Updates left out so far, this one included if it was.
    skipped_in_a_row: How many of them the last ones were.
  """

  loss: Float[Array, ""]
  cross_entropy: Float[Array, ""]
  l1: Float[Array, "layers"]
  active: Int32[Array, "accumulation layers micro_batch seq"]
  fired: Int32[Array, "layers d_ff"]
  dead: Int32[Array, "layers"]
  reinitialized: Int32[Array, "layers"]
  overflowed: Int32[Array, "layers"]
  dense_tokens: Int32[Array, "layers"]
  gradient_norm: Float[Array, ""]
  learning_rate: Float[Array, ""]
  l1_coefficient: Float[Array, ""]
  finite: Bool[Array, ""]
  skipped_updates: Int32[Array, ""]
  skipped_in_a_row: Int32[Array, ""]


class StepResult(NamedTuple):
  """The state after an update, and what the update measured."""

  state: TrainState
  statistics: StepStatistics


class EvalStatistics(NamedTuple):
  """Sums over one batch of held-out text.

  Attributes:
    cross_entropy: Weighted sums, from which the mean over batches is made.
    active: Sum over tokens of active neurons, for each layer, float32.
    tokens: Number of tokens, float32.
  """

  cross_entropy: CrossEntropy
  active: Float[Array, "layers"]
  tokens: Float[Array, ""]


class _Share(NamedTuple):
  """A micro-batch's share of the step's means, and its activity."""

  cross_entropy: Float[Array, ""]
  l1: Float[Array, "layers"]
  active: Int32[Array, "layers micro_batch seq"]
  fired: Int32[Array, "layers d_ff"]
  overflowed: Int32[Array, "layers"]
  dense_tokens: Int32[Array, "layers"]


TrainStep = Callable[[TrainState, Batch], StepResult]
EvalStep = Callable[[PyTree[Array], Batch], EvalStatistics]


def make_train_step(
  model: Model,
  optimizer: optax.GradientTransformation,
  *,
  learning_rate: optax.Schedule,
  l1_coefficient: optax.Schedule,
  accumulation_steps: int = 1,
  dead_neurons: DeadNeuronOptions | None = None,
  l1_feedback: L1Feedback | None = None,
  non_finite: NonFinite = "stop",
) -> TrainStep:
  """Compiles one update; the state passed to it is consumed.

  Args:
    model: The model on its mesh.
    optimizer: The transformation whose state the `TrainState` holds.
    learning_rate: The optimizer's schedule, to report it.
    l1_coefficient: λ as a function of the step.
    accumulation_steps: Micro-batches per step.
    dead_neurons: Which neurons are dead, and whether they are re-initialised
      after the optimizer's update; None is `DeadNeuronOptions()`.
    l1_feedback: How the state's factor of λ follows a target; None leaves the
      state's control as it is and λ as scheduled.
    non_finite: With "skip", a loss or gradient that is NaN or infinite leaves
      the state as it was, but for the step and the count of such updates. With
      "stop", the update is made, and the caller is to look at `finite`.

  Returns:
    A function of the state and a global batch of "inputs", "targets" and
    "weights" [batch, seq].
  """
  dead_neurons = dead_neurons or DeadNeuronOptions()
  every_steps = dead_neurons.reinitialize_every_steps
  reinitialize = reinitialize_dead(
    mixing=dead_neurons.mixing, std=dead_neurons.std
  )

  def objective(
    params: PyTree, micro: Batch, weight_sum: Array, coefficient: Array
  ) -> tuple[Array, _Share]:
    entropy, activity = model_cross_entropy(model.bind(params), micro)
    share = _Share(
      cross_entropy=entropy.total / weight_sum,
      l1=activity.l1 / accumulation_steps,
      active=activity.active,
      fired=activity.fired,
      overflowed=activity.overflowed,
      dense_tokens=activity.dense_tokens,
    )
    return share.cross_entropy + coefficient * jnp.mean(share.l1), share

  def gradient(
    params: PyTree, batch: Batch, coefficient: Array
  ) -> tuple[PyTree, _Share]:
    total = jnp.sum(batch["weights"])
    # A batch of padding alone has no targets, and a loss of zero.
    weight_sum = jnp.where(total > 0, total, 1.0)

    def accumulate(gradient_sum, micro):
      micro_gradient, share = jax.grad(objective, has_aux=True)(
        params, micro, weight_sum, coefficient
      )
      gradient_sum = jax.tree.map(
        lambda total, part: total + part.astype(jnp.float32),
        gradient_sum,
        micro_gradient,
      )
      return gradient_sum, share

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return jax.lax.scan(
      accumulate, zeros, split_batch(batch, accumulation_steps)
    )

  def train_step(state: TrainState, batch: Batch) -> StepResult:
    coefficient = _evaluate(l1_coefficient, state.step)
    if l1_feedback is not None:
      coefficient = coefficient * state.l1_control.factor
    grads, shares = gradient(state.params, batch, coefficient)
    gradient_norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    with _optax_promotion():
      updates, opt_state = optimizer.update(
        grads, state.opt_state, state.params
      )
    tokens = batch["inputs"].size
    fired = jnp.sum(shares.fired, axis=0)
    silent_tokens = count_silent(state.silent_tokens, fired, tokens=tokens)
    dead = silent_tokens >= dead_neurons.window_tokens
    chosen = jnp.zeros_like(dead)
    if every_steps:
      chosen = dead & ((state.step + 1) % every_steps == 0)
      updates, _ = reinitialize.update(
        updates,
        optax.EmptyState(),
        state.params,
        dead=gate_masks(chosen),
        key=jax.random.fold_in(state.rng, state.step),
      )
    params = optax.apply_updates(state.params, updates)
    l1_control = state.l1_control
    if l1_feedback is not None:
      active = jnp.mean(jnp.sum(fired.astype(jnp.float32), axis=1)) / tokens
      l1_control = l1_feedback(l1_control, active, state.step)
    entropy = jnp.sum(shares.cross_entropy)
    l1 = jnp.sum(shares.l1, axis=0)
    loss = entropy + coefficient * jnp.mean(l1)
    finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
    new_state = TrainState(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      rng=state.rng,
      silent_tokens=silent_tokens,
      l1_control=l1_control,
      skipped=state.skipped,
    )
    if non_finite == "skip":
      new_state = _unless_skipped(new_state, state, finite=finite)
    statistics = StepStatistics(
      loss=loss,
      cross_entropy=entropy,
      l1=l1,
      active=shares.active,
      fired=fired,
      dead=jnp.sum(dead, axis=1, dtype=jnp.int32),
      reinitialized=jnp.sum(chosen, axis=1, dtype=jnp.int32),
      overflowed=jnp.sum(shares.overflowed, axis=0),
      dense_tokens=jnp.sum(shares.dense_tokens, axis=0),
      gradient_norm=gradient_norm,
      learning_rate=_evaluate(learning_rate, state.step),
      l1_coefficient=coefficient,
      finite=finite,
      skipped_updates=new_state.skipped.total,
      skipped_in_a_row=new_state.skipped.in_a_row,
    )
    return StepResult(new_state, statistics)

  shardings = jax.tree.map(
    lambda leaf: leaf.sharding, abstract_state(model, optimizer)
  )
  everywhere = replicated(model.partitioning)
  fields: dict[str, Any] = dict.fromkeys(StepStatistics._fields, everywhere)
  fields["active"] = model.partitioning.sharding((None, None, "batch", None))
  return jax.jit(
    train_step,
    in_shardings=(shardings, batch_sharding(model.partitioning)),
    out_shardings=StepResult(shardings, StepStatistics(**fields)),
    donate_argnums=0,
  )


def make_eval_step(model: Model) -> EvalStep:
  """Compiles the evaluation of one batch: a function of params and batch."""

  def eval_step(params: PyTree, batch: Batch) -> EvalStatistics:
    entropy, activity = model_cross_entropy(model.bind(params), batch)
    return EvalStatistics(
      cross_entropy=entropy,
      active=jnp.sum(activity.active, (1, 2), dtype=jnp.float32),
      tokens=jnp.float32(batch["inputs"].size),
    )

  shardings = jax.tree.map(lambda leaf: leaf.sharding, model.params)
  return jax.jit(
    eval_step,
    in_shardings=(shardings, batch_sharding(model.partitioning)),
    out_shardings=replicated(model.partitioning),
  )


def split_batch(batch: Batch, accumulation_steps: int) -> Batch:
  """[accumulation · micro, seq] arrays as [accumulation, micro, seq].

  Micro-batch i holds the sequences i, i + accumulation, …: each device then
  takes its micro-batches from the sequences that it already holds.
  """
  size = len(batch["inputs"])
  if size % accumulation_steps:
    raise ValueError(
      f"batch of {size} sequences is not divisible by accumulation_steps = "
      f"{accumulation_steps}: change batch_size or accumulation_steps"
    )
  return jax.tree.map(
    lambda value: jnp.swapaxes(
      value.reshape(
        size // accumulation_steps, accumulation_steps, *value.shape[1:]
      ),
      0,
      1,
    ),
    batch,
  )


def _unless_skipped(
  new_state: TrainState, state: TrainState, *, finite: Bool[Array, ""]
) -> TrainState:
  """The state after an update that is made only if it is finite."""
  chosen = jax.tree.map(
    lambda new, old: jnp.where(finite, new, old), new_state, state
  )
  left_out = (~finite).astype(jnp.int32)
  return chosen._replace(
    step=new_state.step,
    skipped=Skipped(
      total=state.skipped.total + left_out,
      in_a_row=(state.skipped.in_a_row + 1) * left_out,
    ),
  )


def _evaluate(schedule: optax.Schedule, step: Array) -> Float[Array, ""]:
  with _optax_promotion():
    return jnp.asarray(schedule(step), jnp.float32)


def _optax_promotion():
  # Optax mixes its integer counters with floats, which a caller may forbid.
  return jax.numpy_dtype_promotion("standard")
