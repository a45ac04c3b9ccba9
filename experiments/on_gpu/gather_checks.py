"""Checks of the gathered kernels, against dense products in float32.

Their results must be as near as the rounding to bfloat16 and float32 sums
explain, and finite where they should be. Slots past a row's count are poisoned.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float32

from experiments.on_gpu import inputs, plan
from experiments.on_gpu.compare import (
  in_float32,
  outcome,
  rounding_limit,
  run_twice,
)
from experiments.on_gpu.worker import Stage
from pallas_kernels import gather_config, gathered, target, work_list

_LARGEST_L1_ERROR = 1e-4


def stages(sizes: plan.Sizes, seed: int) -> Iterator[Stage]:
  """All checks of both kernels."""
  for kernel in ("gathered_up_down", "gathered_down"):
    for segments in ("whole", "split"):
      for has_y0 in (True, False):
        for counts in sizes.counts:
          case = _Case(kernel, segments, has_y0, counts, sizes.gather)
          yield _stage(case, sizes, seed)
    for shape in sizes.gather_others:
      case = _Case(kernel, "default", True, sizes.counts[0], shape)
      yield _stage(case, sizes, seed)


class _Case(NamedTuple):
  """What is checked.

  Attributes:
    kernel: "gathered_up_down" or "gathered_down".
    segments: "whole" rows, "split" ones, or as by "default".
    has_y0: Whether it adds to an existing y.
    counts: Of the rows, as in `inputs.entries`.
    shape: Of the operands.
  """

  kernel: str
  segments: str
  has_y0: bool
  counts: str
  shape: plan.Shape


class _Operands(NamedTuple):
  """Matrices; x and up are None for gathered_down."""

  x: BFloat16[Array, "tokens d_model"] | None
  up: BFloat16[Array, "d_ff d_model"] | None
  down: BFloat16[Array, "d_ff d_model"]
  y0: Float32[Array, "tokens d_model"] | None


def _stage(case: _Case, sizes: plan.Sizes, seed: int) -> Stage:
  tokens, d_model, d_ff = case.shape
  y0 = "with y0" if case.has_y0 else "without y0"
  return Stage(
    f"{case.kernel}, {case.segments} segments, {y0},"
    f" {tokens}x{d_model}x{d_ff}: {case.counts}",
    "check",
    functools.partial(_check, case, min(sizes.gather_width, d_ff), seed),
  )


def _check(case: _Case, width: int, seed: int) -> dict[str, Any]:
  tokens, d_model, d_ff = case.shape
  entries = inputs.entries(
    inputs.generator(seed, "entries", case), case.counts, case.shape, width
  )
  normal = functools.partial(inputs.normal_matrix, seed)
  is_gated = case.kernel == "gathered_up_down"
  operands = _Operands(
    x=normal("x", tokens, d_model) if is_gated else None,
    up=normal("up", d_ff, d_model) if is_gated else None,
    down=normal("down", d_ff, d_model),
    y0=normal("y0", tokens, d_model).astype(jnp.float32)
    if case.has_y0
    else None,
  )
  twice = run_twice(_kernel(case.segments), operands, entries)
  errors = _errors(twice.result, operands, entries)
  passed = (
    float(errors.y) <= 1
    and bool(errors.same_finite)
    and float(errors.l1) <= _LARGEST_L1_ERROR
  )
  return outcome(
    passed,
    error=float(errors.y),
    limit=1,
    twice=twice,
    same_finite=bool(errors.same_finite),
    l1_relative_error=float(errors.l1),
  )


@functools.cache
def _kernel(segments: str) -> Callable[..., Any]:
  """A jitted function of operands and entries, with its work list."""

  @jax.jit
  def function(operands: _Operands, entries: inputs.Entries) -> gathered.UpDown:
    x, up, down, y0 = operands
    tokens, width = entries.columns.shape
    config = gather_config.default_config(
      tokens, down.shape[1], width, matrices=1 if up is None else 2
    )
    length = {
      "whole": width,
      # Less than a step, so that there are many parts.
      "split": max(1, config.rows_per_step - 1),
      "default": config.segment_length,
    }[segments]
    config = dataclasses.replace(config, segment_length=length)
    work = work_list.of_ell(entries.counts, width=width, length=length)
    options: dict[str, Any] = {
      "columns": entries.columns.reshape(-1),
      "values": entries.values.reshape(-1),
      "work": work,
      "config": config,
      "y0": y0,
      "interpret": target.interpret_params(),
    }
    if x is None or up is None:
      y = gathered.gathered_down(down, m=tokens, **options)
      return gathered.UpDown(y, jnp.zeros((1,), jnp.float32))
    return gathered.gathered_up_down(x, up, down, **options)

  return function


def scattered(
  entries: inputs.Entries,
  values: Float32[Array, "rows width"],
  columns: int,
) -> Float32[Array, "rows columns"]:
  """Values of the entries as a dense matrix."""
  rows, width = values.shape
  used = jnp.arange(width)[None] < entries.counts[:, None]
  # Out of range where there is no entry.
  place = jnp.where(used, entries.columns, columns)
  dense = jnp.zeros((rows, columns), jnp.float32)
  return dense.at[jnp.arange(rows)[:, None], place].set(values, mode="drop")


class _Errors(NamedTuple):
  """Errors of a result.

  Attributes:
    y: The largest of y over its limit, among the rows that are finite.
    same_finite: Whether y is finite where it should be, and only there.
    l1: Relative, of the sum of |h|; 0 where it is not finite or not given.
  """

  y: Float32[Array, ""]
  same_finite: Bool[Array, ""]
  l1: Float32[Array, ""]


@jax.jit
def _errors(
  actual: gathered.UpDown, operands: _Operands, entries: inputs.Entries
) -> _Errors:
  """Compares with dense products of the entries, scattered."""
  x, up, down, y0 = operands
  h = scattered(entries, entries.values, down.shape[0])
  size = jnp.abs(h)
  if x is not None and up is not None:
    h = jnp.where(h == 0, 0, h * in_float32(x, up.T))
    size = size * in_float32(jnp.abs(x), jnp.abs(up).T)
  broken = ~jnp.all(jnp.isfinite(h), axis=1, keepdims=True)
  h, size = (jnp.where(broken, 0, array) for array in (h, size))
  start = jnp.zeros((1, 1)) if y0 is None else y0.astype(jnp.float32)
  y = in_float32(h, down) + start
  size = in_float32(size, jnp.abs(down)) + jnp.abs(start)
  limit = rounding_limit(y, size)
  finite = jnp.isfinite(actual.y)
  error = jnp.abs(jnp.where(finite, actual.y.astype(jnp.float32), y) - y)
  l1 = jnp.sum(jnp.abs(h))
  has_l1 = (l1 > 0) & ~jnp.any(broken) & (up is not None)
  l1_error = jnp.abs(jnp.sum(actual.l1) - l1) / (l1 + 1e-30)
  return _Errors(
    jnp.max(jnp.where(broken, 0, error / limit)),
    jnp.all(finite == ~broken),
    jnp.where(has_l1, l1_error, 0),
  )
