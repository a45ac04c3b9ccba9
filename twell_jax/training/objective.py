"""The training objective: cross entropy plus λ times the mean L1 activity.

  loss = Σ w·CE / Σ w  +  λ(step) · mean over layers of l1
  l1   = mean over tokens of the sum over neurons of |h|

Both terms are normalised once over the tokens of a step, so that neither
depends on how the step is cut into micro-batches or spread over devices. The
published code (arXiv 2603.23198) normalises only the first so: see
`coefficient_from_published`. The first term is computed in cross_entropy.py.
"""

import dataclasses

import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class L1Options:
  """The schedule of the sparsity coefficient λ.

  Attributes:
    coefficient: λ after the warm-up; 0 trains the dense twin.
    start_step: Steps at λ = 0 before the warm-up.
    warmup_steps: Steps over which λ rises linearly from 0.
  """

  coefficient: float = 0.0
  start_step: int = 0
  warmup_steps: int = 0

  def __post_init__(self):
    for name in ("coefficient", "start_step", "warmup_steps"):
      if not getattr(self, name) >= 0:  # NaN is not
        raise ValueError(f"l1 {name} = {getattr(self, name)} must be 0 or more")


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
