"""What a run does about a loss or gradient that is not finite."""

from typing import NamedTuple

from absl import logging
from jaxtyping import Array, Bool, Float, Int32

from twell_jax.training.options import TrainOptions
from twell_jax.training.step import StepStatistics


class Health(NamedTuple):
  """The part of a step's statistics that decides whether to go on."""

  loss: Float[Array, ""]
  gradient_norm: Float[Array, ""]
  finite: Bool[Array, ""]
  skipped_in_a_row: Int32[Array, ""]

  @classmethod
  def of(cls, statistics: StepStatistics) -> "Health":
    """That of a step, still on the device."""
    return cls(*(getattr(statistics, name) for name in cls._fields))


def check_health(options: TrainOptions, step: int, health: Health) -> None:
  """Logs an update that was skipped.

  Raises:
    FloatingPointError: The options do not allow what has happened.
  """
  if health.finite:
    return
  what = (
    f"the loss is {health.loss:g} and the gradient norm"
    f" {health.gradient_norm:g} at step {step}"
  )
  remedy = (
    "resume from the last checkpoint, which is from before, with a smaller"
    " learning rate or L1 coefficient"
  )
  if options.non_finite == "stop":
    raise FloatingPointError(
      f"{what}: {remedy}, or non_finite = 'skip' to leave such updates out"
    )
  if health.skipped_in_a_row >= options.max_skipped_in_a_row:
    raise FloatingPointError(
      f"{what}, the last of {health.skipped_in_a_row} updates skipped in a row"
      f" (max_skipped_in_a_row = {options.max_skipped_in_a_row}): {remedy}"
    )
  logging.warning("%s: this update is skipped", what)
