"""AdamW with linear warm-up and cosine decay, as in arXiv 2603.23198."""

import dataclasses
from typing import Any

import jax
import optax
from jaxtyping import Array, PyTree

# Last names of the parameters that weight decay leaves alone.
NOT_DECAYED = frozenset({"scale", "bias"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
  """AdamW and its schedule.

  Attributes:
    learning_rate: The peak, reached after the warm-up.
    warmup_steps: Steps of the linear rise from 0.
    b1: Decay of the first moment.
    b2: Decay of the second moment.
    eps: Added to the root of the second moment.
    weight_decay: Decoupled, on every parameter but norms and biases.
    clip_norm: Largest global norm of a gradient.
  """

  learning_rate: float = 1e-3
  warmup_steps: int = 600
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0

  def __post_init__(self):
    for name in ("learning_rate", "eps", "clip_norm"):
      if not getattr(self, name) > 0:
        raise ValueError(
          f"optimizer {name} = {getattr(self, name)} must be above 0"
        )
    for name in ("warmup_steps", "weight_decay"):
      if getattr(self, name) < 0:
        raise ValueError(
          f"optimizer {name} = {getattr(self, name)} must be 0 or more"
        )
    for name in ("b1", "b2"):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(
          f"optimizer {name} = {getattr(self, name)} must be in [0, 1)"
        )


def learning_rate_schedule(
  options: OptimizerOptions, *, steps: int
) -> optax.Schedule:
  """Linear rise to the peak, then a cosine down to 0 at the last step."""
  if options.warmup_steps >= steps:
    raise ValueError(
      f"optimizer warmup_steps = {options.warmup_steps} leaves nothing of "
      f"steps = {steps}: choose fewer warm-up steps or more steps"
    )
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0 if options.warmup_steps else options.learning_rate,
    peak_value=options.learning_rate,
    warmup_steps=options.warmup_steps,
    decay_steps=steps,
    end_value=0.0,
  )


def decay_mask(params: PyTree) -> PyTree[bool]:
  """True for the parameters that are decayed: all but norms and biases."""

  def is_decayed(path: tuple[Any, ...], _: Array) -> bool:
    name = jax.tree_util.keystr(path[-1:], simple=True)
    return name not in NOT_DECAYED

  return jax.tree.map_with_path(is_decayed, params)


def make_optimizer(
  options: OptimizerOptions, *, steps: int
) -> optax.GradientTransformation:
  """Clipping by global norm, then AdamW, for a run of `steps` steps."""
  return optax.chain(
    optax.clip_by_global_norm(options.clip_norm),
    optax.adamw(
      learning_rate_schedule(options, steps=steps),
      b1=options.b1,
      b2=options.b2,
      eps=options.eps,
      weight_decay=options.weight_decay,
      mask=decay_mask,
    ),
  )
