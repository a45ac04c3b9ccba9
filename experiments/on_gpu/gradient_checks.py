"""Checks of the gathered kernels of training, against dense products.

Like gather_checks.py: results must be as near as rounding and float32 sums
explain, and finite where they should be. Slots past a row's count are poisoned;
dot products of such slots must be 0.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Bool, Float32

from experiments import gradient_kernels
from experiments.gradient_kernels import Lists, Operands, Results
from experiments.on_gpu import inputs, plan
from experiments.on_gpu.compare import (
  in_float32,
  outcome,
  rounding_limit,
  run_twice,
)
from experiments.on_gpu.gather_checks import scattered
from experiments.on_gpu.worker import Stage
from pallas_kernels import gradient_config
from pallas_kernels.gradient_config import Product


def stages(sizes: plan.Sizes, seed: int) -> Iterator[Stage]:
  """All checks of all kernels."""
  for product in Product:
    for segments in ("whole", "split"):
      for counts in sizes.counts:
        case = _Case(product, segments, counts, sizes.gather)
        yield _stage(case, sizes, seed)
    for shape in sizes.gather_others:
      case = _Case(product, "default", sizes.counts[0], shape)
      yield _stage(case, sizes, seed)


class _Case(NamedTuple):
  """What is checked.

  Attributes:
    product: The kernel.
    segments: "whole" rows, with float32 sums of nothing else; "split" ones, or
      as by "default", with bfloat16 sums that add to others.
    counts: Of the rows, as in `inputs.entries`.
    shape: Rows, their width, and rows to gather from.
  """

  product: Product
  segments: str
  counts: str
  shape: plan.Shape

  @property
  def dtype(self) -> DTypeLike:
    """Of the sums."""
    return jnp.float32 if self.segments == "whole" else jnp.bfloat16


class _Numbers(NamedTuple):
  """Operands without a work list; poisoned where there is no entry."""

  matrices: tuple[BFloat16[Array, "_ k"], ...]
  values: tuple[Float32[Array, "rows width"], ...]
  added: tuple[Float32[Array, "rows k"], ...]


def _stage(case: _Case, sizes: plan.Sizes, seed: int) -> Stage:
  rows, k, columns = case.shape
  return Stage(
    f"{case.product.value}, {case.segments} segments, {rows}x{k}x{columns}:"
    f" {case.counts}",
    "check",
    functools.partial(_check, case, min(sizes.gather_width, columns), seed),
  )


def _check(case: _Case, width: int, seed: int) -> dict[str, Any]:
  rows, k, columns = case.shape
  kind = gradient_kernels.KINDS[case.product]
  rng = inputs.generator(seed, "entries", case)
  entries = inputs.entries(rng, case.counts, case.shape, width)
  lists = Lists(rows, columns, width, rows * width)
  normal = functools.partial(inputs.normal_matrix, seed)
  # NaN past the count, as the first values are.
  second = entries.values * jnp.asarray(
    rng.normal(size=(rows, width)), jnp.float32
  )
  added = kind.sums if case.dtype == jnp.bfloat16 else 0
  numbers = _Numbers(
    matrices=tuple(
      normal(f"matrix {index}", size, k)
      for index, size in enumerate(lists.matrix_rows(case.product))
    ),
    values=(entries.values, second)[: kind.values],
    added=tuple(
      normal(f"y0 {index}", rows, k).astype(jnp.float32)
      for index in range(added)
    ),
  )
  twice = run_twice(_kernel(case.product, case.segments), numbers, entries)
  errors = _errors(case.product, twice.result, numbers, entries)
  return outcome(
    float(errors.largest) <= 1 and bool(errors.same_finite),
    error=float(errors.largest),
    limit=1,
    twice=twice,
    same_finite=bool(errors.same_finite),
  )


@functools.cache
def _kernel(product: Product, segments: str) -> Callable[..., Any]:
  """A jitted function of numbers and entries, with its work list."""

  @jax.jit
  def function(numbers: _Numbers, entries: inputs.Entries) -> Results:
    rows, width = entries.columns.shape
    gathered_from, k = numbers.matrices[-1].shape
    lists = Lists(rows, gathered_from, width, rows * width)
    config = gradient_config.default_config(
      product, m=rows, k=k, width=width, active=width / 4
    )
    length = {
      "whole": width,
      # Less than a step, so that there are many parts.
      "split": max(1, config.rows_per_step - 1),
      "default": config.segment_length,
    }[segments]
    work = gradient_kernels.work_of(
      lists,
      jnp.arange(rows, dtype=jnp.int32) * width,
      entries.counts,
      length=length,
    )
    return gradient_kernels.call(
      product,
      Operands(
        numbers.matrices,
        entries.columns.reshape(-1),
        tuple(values.reshape(-1) for values in numbers.values),
        work,
        numbers.added,
      ),
      rows=rows,
      config=dataclasses.replace(config, segment_length=length),
      dtype=_Case(product, segments, "", plan.Shape(0, 0, 0)).dtype,
    )

  return function


class _Errors(NamedTuple):
  """Errors of all results of a kernel.

  Attributes:
    largest: The largest error over its limit, among the numbers that are
      finite.
    same_finite: Whether results are finite where they should be, only there.
  """

  largest: Float32[Array, ""]
  same_finite: Bool[Array, ""]


@functools.partial(jax.jit, static_argnums=0)
def _errors(
  product: Product,
  actual: Results,
  numbers: _Numbers,
  entries: inputs.Entries,
) -> _Errors:
  """Compares with dense products of the entries, scattered."""
  kind = gradient_kernels.KINDS[product]
  gathered = numbers.matrices[kind.own_rows :]
  found = []
  if actual.dots is not None:
    a, b = numbers.matrices
    width = entries.columns.shape[1]
    used = jnp.arange(width)[None] < entries.counts[:, None]
    columns = jnp.where(used, entries.columns, 0)

    def at_entries(product):
      taken = jnp.take_along_axis(product, columns, axis=1)
      return jnp.where(used, taken, 0)

    dots = at_entries(in_float32(a, b.T))
    size = at_entries(in_float32(jnp.abs(a), jnp.abs(b).T))
    found.append(
      _compare(actual.dots.reshape(dots.shape), dots, size, jnp.bool(False))
    )
  terms = [
    _weighted(entries, values, matrix)
    for values, matrix in zip(numbers.values, itertools.cycle(gathered))
  ]
  if kind.gathered == 2:
    terms = [jax.tree.map(jnp.add, *terms)]
  for y, term, y0 in itertools.zip_longest(actual.sums, terms, numbers.added):
    start = jnp.zeros((1, 1)) if y0 is None else y0
    found.append(
      _compare(
        y, term.value + start, term.size + jnp.abs(start), term.broken > 0
      )
    )
  return _Errors(
    jnp.max(jnp.stack([each.largest for each in found])),
    jnp.all(jnp.stack([each.same_finite for each in found])),
  )


class _Sum(NamedTuple):
  """A sum over the entries, that of absolute values, and where it is NaN."""

  value: Float32[Array, "rows k"]
  size: Float32[Array, "rows k"]
  broken: Float32[Array, "rows 1"]


def _weighted(
  entries: inputs.Entries,
  values: Float32[Array, "rows width"],
  matrix: BFloat16[Array, "columns k"],
) -> _Sum:
  weights = scattered(entries, values, matrix.shape[0])
  broken = ~jnp.all(jnp.isfinite(weights), axis=1, keepdims=True)
  weights = jnp.where(broken, 0, weights)
  return _Sum(
    in_float32(weights, matrix),
    in_float32(jnp.abs(weights), jnp.abs(matrix)),
    broken.astype(jnp.float32),
  )


def _compare(
  actual: Array,
  exact: Float32[Array, "*shape"],
  size: Float32[Array, "*shape"],
  broken: Bool[Array, "*#shape"],
) -> _Errors:
  finite = jnp.isfinite(actual)
  error = jnp.abs(jnp.where(finite, actual.astype(jnp.float32), exact) - exact)
  limit = rounding_limit(exact, size, actual.dtype)
  return _Errors(
    jnp.max(jnp.where(broken, 0, error / limit)), jnp.all(finite == ~broken)
  )
