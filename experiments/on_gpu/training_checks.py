"""Checks of the whole layer's gradients through implementation="mosaic".

Inputs are those of op_checks.py, so that which neurons are active has one
answer. y, l1 and each gradient are held to 1.5 times the error of the dense
bfloat16 layer, both against the dense layer in float32, and are finite at least
where the dense ones are: at silent neurons nothing is computed that could
break.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from experiments.on_gpu import inputs, plan
from experiments.on_gpu.compare import (
  Errors,
  errors_of,
  limits_of,
  outcome,
  run_twice,
)
from experiments.on_gpu.op_checks import HOT_SHARES, make_layer
from experiments.on_gpu.worker import Stage
from twell_jax.formats import Capacities
from twell_jax.ops import sparse_ffn

# The weight of l1 in the loss.
_L1_WEIGHT = 0.75
# What else is chosen of the op. A row of eight entries overflows often, and few
# of those tokens are kept; in all but the last everything is packed that fits.
_CHOICES: dict[str, dict[str, Any]] = {
  "packed": {"dense_above": 1.0},
  "tight": {"dense_above": 1.0, "capacities": Capacities(8, 64)},
  "default": {},
}


class _Case(NamedTuple):
  gated: bool
  hot: str
  choice: str
  activity: str


def stages(sizes: plan.Sizes, seed: int) -> Iterator[Stage]:
  """All checks."""
  # The dense layer that is compared with may take subnormals for 0.
  activities = [name for name in sizes.activities if name != "subnormal"]
  some = activities[:2]
  cases = [
    *(_Case(True, "no", "packed", activity) for activity in activities),
    *(_Case(True, "some", "packed", activity) for activity in activities),
    *(_Case(True, "no", "tight", activity) for activity in activities),
    *(_Case(True, "no", "default", activity) for activity in activities),
    _Case(True, "all", "packed", activities[0]),
    *(_Case(False, "no", "packed", activity) for activity in activities),
    *(_Case(False, "some", "tight", activity) for activity in some),
  ]
  for case in cases:
    yield _stage(case, sizes.op, seed)
  for shape in sizes.op_others:
    for activity in sizes.other_activities:
      yield _stage(_Case(True, "some", "packed", activity), shape, seed)


def _stage(case: _Case, shape: plan.Shape, seed: int) -> Stage:
  tokens, d_model, d_ff = shape
  kind = "gated" if case.gated else "non-gated"
  return Stage(
    f"gradients, {kind}, {case.hot} hot neurons, {case.choice} choices,"
    f" {tokens}x{d_model}x{d_ff}: {case.activity}",
    "check",
    functools.partial(_check, case, shape, seed),
  )


def _check(case: _Case, shape: plan.Shape, seed: int) -> dict[str, Any]:
  dy = inputs.normal_matrix(seed, "dy", shape.tokens, shape.d_model)
  arguments = (
    *make_layer(seed, case.activity, shape, gated=case.gated),
    dy,
  )
  hot_neurons = int(HOT_SHARES[case.hot] * shape.d_ff)
  twice = run_twice(_mosaic(hot_neurons, case.choice), *arguments)
  found = _compare(
    twice.result,
    _reference(*arguments),
    _reference(*jax.tree.map(_to_float32, arguments)),
  )
  shares, wrong = {}, 0
  for name, comparison in found.items():
    errors, dense_errors, broken = comparison
    limits = limits_of(dense_errors)
    shares[name] = max(
      float(errors.rms) / limits.rms, float(errors.largest) / limits.largest
    )
    wrong += int(broken)
  worst = max(shares.values())
  return outcome(
    worst <= 1 and wrong == 0,
    error=worst,
    limit=1,
    twice=twice,
    error_over_limit=shares,
    wrong_numbers=wrong,
  )


def _to_float32(array: Array) -> Float32[Array, "..."]:
  return array.astype(jnp.float32)


class _Gradients(NamedTuple):
  """The results of a forward and a backward pass; dup may be None."""

  y: Float[Array, "tokens d_model"]
  l1: Float32[Array, ""]
  dx: Float[Array, "tokens d_model"]
  dgate: Float[Array, "d_ff d_model"]
  dup: Float[Array, "d_ff d_model"] | None
  ddown: Float[Array, "d_ff d_model"]


@functools.cache
def _mosaic(hot_neurons: int, choice: str) -> Callable[..., Any]:
  return _step(
    implementation="mosaic", hot_neurons=hot_neurons, **_CHOICES[choice]
  )


def _step(**options: Any) -> Callable[..., Any]:
  """A jitted function of x, gate, up, down and dy."""

  def layer(*arguments):
    output = sparse_ffn(*arguments, **options)
    return output.y, output.activity.l1

  @jax.jit
  def step(x, gate, up, down, dy):
    (y, l1), pull_back = jax.vjp(layer, x, gate, up, down)
    return _Gradients(y, l1, *pull_back((dy, jnp.float32(_L1_WEIGHT))))

  return step


def _reference(*arguments: Array | None) -> _Gradients:
  # No shortcut through fewer digits, where the numbers have more.
  with jax.default_matmul_precision("highest"):
    return _dense_step(*arguments)


_dense_step = _step(implementation="reference")


class _Comparison(NamedTuple):
  """Errors where the dense layer's numbers are finite.

  Attributes:
    errors: Ours.
    dense_errors: Those of the dense layer in bfloat16.
    broken: How many of ours are not finite there.
  """

  errors: Errors
  dense_errors: Errors
  broken: Array


@jax.jit
def _compare(
  actual: _Gradients, dense: _Gradients, exact: _Gradients
) -> dict[str, _Comparison]:
  found = {}
  for name, numbers in actual._asdict().items():
    theirs, right = getattr(dense, name), getattr(exact, name)
    if right is None:
      continue
    finite = jnp.isfinite(right) & jnp.isfinite(theirs)
    found[name] = _Comparison(
      errors_of(numbers, right, finite),
      errors_of(theirs, right, finite),
      jnp.sum(finite & ~jnp.isfinite(numbers)),
    )
  return found
