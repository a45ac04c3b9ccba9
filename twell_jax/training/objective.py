"""The training objective: cross entropy plus λ times the mean L1 activity.

  loss = Σ w·CE / Σ w  +  λ(step) · mean over layers of l1
  l1   = mean over tokens of the sum over neurons of |h|

Both terms are normalised once over the tokens of a step, so that neither
depends on how the step is cut into micro-batches or spread over devices. The
published code (arXiv 2603.23198) normalises only the first so: see
`coefficient_from_published`. The first term is computed in cross_entropy.py.

λ is a schedule of the step. With a target for the active neurons per token, the
schedule is multiplied by a factor which, once the warm-up is over, every step
adjusts by what it measured, on average over tokens and layers:

  ahead  = active · (active / usual)
  factor ← factor · clip(ahead / target, 1/2, 2) ^ gain
  usual  ← usual · (active / usual) ^ (1 / horizon)

with the factor within [1/max_factor, max_factor]. The usual activity lags
behind by the horizon, in steps, so that `ahead` is where the trend leads within
as many. λ rises while that is above the target, and falls while it is below.

Looking ahead is what keeps λ from swinging: activity answers to λ late, so that
without it λ still rises when it is already too large, and neurons which its
peaks silence may stay dead. A gain that is too large for the horizon does that.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int32

from twell_jax.nn import TransformerConfig

# Active neurons per token are not taken for fewer, so that ratios are finite.
_SMALLEST_ACTIVE = 1e-3
# Beyond this ratio of measured and target activity, λ moves no faster.
_LARGEST_RATIO = 2.0


class L1Control(NamedTuple):
  """What is remembered of following a target.

  Attributes:
    factor: What multiplies the scheduled λ; 1 at first.
    usual: Active neurons per token lately, a geometric mean; 0 if there was no
      target yet.
  """

  factor: Float[Array, ""]
  usual: Float[Array, ""]


# The control after a step, from that before it, the active neurons per token
# that the step measured, and the number of updates made before it.
L1Feedback = Callable[
  [L1Control, Float[Array, ""], Int32[Array, ""]], L1Control
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class L1Options:
  """The schedule of the sparsity coefficient λ.

  Attributes:
    coefficient: λ after the warm-up; 0 trains the dense twin.
    start_step: Steps at λ = 0 before the warm-up.
    warmup_steps: Steps over which λ rises linearly from 0.
    target_active: Active neurons per token, on average over the layers, to
      which λ is adjusted from the end of the warm-up; 0 leaves it as scheduled.
    target_gain: How fast λ is adjusted: at most by the factor 2 ^ target_gain
      in a step.
    target_horizon: Steps by which the trend of the activity is looked ahead.
    target_max_factor: Largest ratio of the adjusted λ and the coefficient, up
      and down.
  """

  coefficient: float = 0.0
  start_step: int = 0
  warmup_steps: int = 0
  target_active: float = 0.0
  target_gain: float = 0.02
  target_horizon: float = 100.0
  target_max_factor: float = 10.0

  def __post_init__(self):
    for name in ("coefficient", "start_step", "warmup_steps", "target_active"):
      if not getattr(self, name) >= 0:  # NaN is not
        raise ValueError(f"l1 {name} = {getattr(self, name)} must be 0 or more")
    if not 0 < self.target_gain <= 1:
      raise ValueError(
        f"l1 target_gain = {self.target_gain} must be above 0 and at most 1"
      )
    if not 1 <= self.target_horizon < math.inf:
      raise ValueError(
        f"l1 target_horizon = {self.target_horizon} must be finite and at"
        " least 1"
      )
    if not 1 < self.target_max_factor < math.inf:
      raise ValueError(
        f"l1 target_max_factor = {self.target_max_factor} must be finite and"
        " above 1"
      )
    if self.target_active and not self.coefficient:
      raise ValueError(
        f"l1 target_active = {self.target_active} needs a coefficient above 0,"
        " from which λ is adjusted by factors"
      )


def l1_schedule(options: L1Options) -> optax.Schedule:
  """λ as a function of the step: 0, then a linear rise, then constant."""
  # optax takes a rise over 0 steps for "stay at the first value".
  rise = (
    optax.linear_schedule(0.0, options.coefficient, options.warmup_steps)
    if options.warmup_steps
    else optax.constant_schedule(options.coefficient)
  )
  return optax.join_schedules(
    [optax.constant_schedule(0.0), rise], [options.start_step]
  )


def l1_feedback(options: L1Options) -> L1Feedback | None:
  """How λ follows its target (the module says it); None if it has none."""
  if not options.target_active:
    return None
  begin = options.start_step + options.warmup_steps
  bound = options.target_max_factor

  def feedback(
    control: L1Control, active: Float[Array, ""], step: Int32[Array, ""]
  ) -> L1Control:
    active = jnp.maximum(active, _SMALLEST_ACTIVE)
    usual = jnp.where(control.usual > 0, control.usual, active)
    trend = active / usual
    ratio = jnp.clip(
      active * trend / options.target_active,
      1 / _LARGEST_RATIO,
      _LARGEST_RATIO,
    )
    factor = control.factor * ratio**options.target_gain
    factor = jnp.clip(factor, 1 / bound, bound)
    return L1Control(
      factor=jnp.where(step >= begin, factor, control.factor),
      usual=usual * trend ** (1 / options.target_horizon),
    )

  return feedback


def check_target(config: TransformerConfig, options: L1Options) -> None:
  """Raises ValueError if no λ could bring a model to the target of its own."""
  if not options.target_active:
    return
  if config.activation != "relu":
    raise ValueError(
      f"activation = {config.activation!r} has no L1 term to adjust: leave l1"
      " target_active at 0 or choose activation = 'relu'"
    )
  if options.target_active >= config.d_ff:
    raise ValueError(
      f"l1 target_active = {options.target_active} must be below d_ff ="
      f" {config.d_ff}: it counts active neurons per token"
    )


def coefficient_from_published(
  value: float, *, accumulation_steps: int, world_size: int
) -> float:
  """Our λ for a coefficient of the published training code.

  That code averages cross entropy over the global batch but adds the L1 term of
  every micro-batch on every device whole, so that its effective coefficient is
  value · accumulation_steps · world_size. The published runs have a product of
  64: their 2e-5 is our 1.28e-3.

  Args:
    value: The coefficient as published.
    accumulation_steps: Micro-batches per step of the published run.
    world_size: Devices of the published run.

  Returns:
    The coefficient of this module's formula with the same gradient.
  """
  return value * accumulation_steps * world_size
