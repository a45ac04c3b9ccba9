"""Checks of the whole layer through implementation="mosaic".

Gates are those of small integers, so that which neurons are active has one
answer, and active and fired must be equal to it. y is held to 1.5 times the
error of the dense bfloat16 layer, both against the dense layer in float32.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int32

from experiments.on_gpu import inputs, plan
from experiments.on_gpu.compare import (
  UNIT,
  Errors,
  errors_of,
  in_float32,
  limits_of,
  outcome,
  run_twice,
)
from experiments.on_gpu.worker import Stage
from pallas_kernels import gate_pack_config
from twell_jax.ops import FFNOutput, sparse_ffn
from twell_jax.ops.mosaic_sizes import default_ell_width

HOT_SHARES = {"no": 0.0, "some": 0.1, "all": 1.0}


def stages(sizes: plan.Sizes, seed: int) -> Iterator[Stage]:
  """All checks of the op."""
  # The dense layer that y is compared with may take subnormals for 0.
  activities = [name for name in sizes.activities if name != "subnormal"]
  for gated in (True, False):
    for hot in ("no", "some", "all") if gated else ("no", "some"):
      # Where all are hot, nothing is packed or gathered.
      some = activities if hot != "all" else activities[:1]
      for activity in some:
        yield _stage(_Case(gated, hot, activity), sizes.op, seed)
  for shape in sizes.op_others:
    for gated, hot in ((True, "no"), (False, "some")):
      for activity in sizes.other_activities:
        yield _stage(_Case(gated, hot, activity), shape, seed)


class _Case(NamedTuple):
  gated: bool
  hot: str
  activity: str


def _stage(case: _Case, shape: plan.Shape, seed: int) -> Stage:
  tokens, d_model, d_ff = shape
  kind = "gated" if case.gated else "non-gated"
  return Stage(
    f"op, {kind}, {case.hot} hot neurons, {tokens}x{d_model}x{d_ff}:"
    f" {case.activity}",
    "check",
    functools.partial(_check, case, shape, seed),
  )


class Arguments(NamedTuple):
  """A layer and its tokens, in the order of `sparse_ffn`."""

  x: BFloat16[Array, "tokens d_model"]
  gate: BFloat16[Array, "d_ff d_model"]
  up: BFloat16[Array, "d_ff d_model"] | None
  down: BFloat16[Array, "d_ff d_model"]


def make_layer(
  seed: int, activity: str, shape: plan.Shape, *, gated: bool
) -> Arguments:
  """One of the named activity, whose edges are those of the op."""
  tokens, d_model, d_ff = shape
  config = gate_pack_config.default_config(tokens, d_ff, d_model)
  edges = inputs.Edges(config.tile_width, config.slots, default_ell_width(d_ff))
  x, gate, _ = inputs.gate_inputs(seed, activity, shape, edges)
  return Arguments(
    jnp.asarray(x),
    jnp.asarray(gate),
    inputs.normal_matrix(seed, "up", d_ff, d_model) if gated else None,
    inputs.normal_matrix(seed, "down", d_ff, d_model),
  )


def _check(case: _Case, shape: plan.Shape, seed: int) -> dict[str, Any]:
  arguments = make_layer(seed, case.activity, shape, gated=case.gated)
  op = _op("mosaic", int(HOT_SHARES[case.hot] * shape.d_ff))
  twice = run_twice(op, *arguments)
  dense = _op("reference", 0)(*arguments)
  found = jax.tree.map(
    lambda array: array.item(), _compare(twice.result, dense, *arguments)
  )
  errors, limits = found.errors, limits_of(found.dense_errors)
  passed = (
    float(errors.rms) <= limits.rms
    and float(errors.largest) <= limits.largest
    and found.l1 <= UNIT
    and found.wrong == 0
  )
  return outcome(
    passed,
    error=float(errors.rms),
    limit=limits.rms,
    twice=twice,
    largest_error=float(errors.largest),
    largest_limit=limits.largest,
    l1_relative_error=found.l1,
    wrong_numbers=found.wrong,
    overflowed=twice.result.activity.overflowed.item(),
    active_of_a_token=twice.result.activity.active.mean().item(),
  )


@functools.cache
def _op(implementation: str, hot_neurons: int) -> Callable[..., Any]:
  return jax.jit(
    functools.partial(
      sparse_ffn,
      implementation=implementation,
      hot_neurons=hot_neurons,
      # So that what is checked is packed, however much is active.
      dense_above=1.0,
    )
  )


class _Comparison(NamedTuple):
  """Errors of finite tokens, against y in float32; counts of others.

  Attributes:
    errors: Of y.
    dense_errors: The bfloat16 layer's.
    l1: Relative error of l1; 0 if it is not finite.
    wrong: Counts of active and fired that differ, tokens that are finite where
      the dense layer's are not or the other way round, and 1 if l1 is.
  """

  errors: Errors
  dense_errors: Errors
  l1: Float32[Array, ""]
  wrong: Int32[Array, ""]


@jax.jit
def _compare(
  actual: FFNOutput,
  dense: FFNOutput,
  x: BFloat16[Array, "tokens d_model"],
  gate: BFloat16[Array, "d_ff d_model"],
  up: BFloat16[Array, "d_ff d_model"] | None,
  down: BFloat16[Array, "d_ff d_model"],
) -> _Comparison:
  h = jax.nn.relu(in_float32(x, gate.T))
  if up is not None:
    h = h * in_float32(x, up.T)
  y = in_float32(h, down)
  finite = jnp.all(jnp.isfinite(y), axis=1, keepdims=True)

  def finite_tokens(output):
    return jnp.all(jnp.isfinite(output.y), axis=1)

  ours, theirs = actual.activity, dense.activity
  l1_finite = jnp.isfinite(theirs.l1)
  wrong = (
    jnp.sum(ours.active != theirs.active)
    + jnp.sum(ours.fired != theirs.fired)
    + jnp.sum(finite_tokens(actual) != finite_tokens(dense))
    + (jnp.isfinite(ours.l1) != l1_finite).astype(jnp.int32)
  )
  l1_error = jnp.abs(ours.l1 - theirs.l1) / (jnp.abs(theirs.l1) + 1e-30)
  return _Comparison(
    errors_of(actual.y, y, finite),
    errors_of(dense.y, y, finite),
    jnp.where(l1_finite, l1_error, 0),
    wrong,
  )
