"""Evaluation on held-out text."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from twell_jax.training.sharding import HostBatch, place_batch
from twell_jax.training.state import Model
from twell_jax.training.step import EvalStep, make_eval_step


class HeldOut(NamedTuple):
  """An evaluation on held-out text.

  Attributes:
    loss: Cross entropy per target, in nats, without the L1 term.
    active_fraction: Mean active neurons per token over d_ff, all layers.
    active_mean: Mean active neurons per token, for each layer.
  """

  loss: float
  active_fraction: float
  active_mean: list[float]


def evaluate(
  model: Model,
  params: PyTree[Array],
  held_out: Iterable[HostBatch],
  *,
  max_batches: int = 0,
  eval_step: EvalStep | None = None,
) -> HeldOut:
  """The mean loss and activity over held-out batches.

  Args:
    model: The model on its mesh.
    params: Its parameters.
    held_out: The batches.
    max_batches: How many of them at most; 0 is all.
    eval_step: What `make_eval_step(model)` returned, to compile once only.

  Returns:
    The means, each target counting by its weight.

  Raises:
    ValueError: There are no targets.
  """
  eval_step = make_eval_step(model) if eval_step is None else eval_step
  results = [
    eval_step(params, place_batch(batch, model.partitioning))
    for batch in itertools.islice(held_out, max_batches or None)
  ]
  # Summed in double precision on the host, the same for any number of batches.
  sums = (
    jax.tree.map(
      lambda *parts: np.sum(np.asarray(parts, np.float64), axis=0),
      *jax.device_get(results),
    )
    if results
    else None
  )
  if sums is None or not sums.cross_entropy.weight:
    raise ValueError(
      "the held-out input has no targets: give it more text or a larger "
      "held_out_fraction"
    )
  active_mean = sums.active / sums.tokens
  return HeldOut(
    loss=float(sums.cross_entropy.total / sums.cross_entropy.weight),
    active_fraction=float(np.mean(active_mean) / model.config.d_ff),
    active_mean=active_mean.tolist(),
  )
