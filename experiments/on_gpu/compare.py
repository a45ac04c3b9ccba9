"""What the checks share: running twice, errors, and a check's result."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Shaped

from twell_jax.formats.bits import to_bits


class Twice(NamedTuple):
  """What a function gave, and whether it gave the same bits again."""

  result: Any
  is_same: bool


def run_twice(function: Callable[..., Any], *arguments: Any) -> Twice:
  """Runs it twice, each time over poisoned memory."""
  results = []
  for _ in range(2):
    _poison(jax.eval_shape(function, *arguments))
    results.append(jax.block_until_ready(function(*arguments)))
  same = jax.tree.map(_same_bits, *results)
  return Twice(results[0], all(bool(leaf) for leaf in jax.tree.leaves(same)))


def _poison(shapes: Any) -> None:
  """Fills memory that the allocator will most likely hand out next.

  Nothing more can be done from here: XLA allocates results by itself.
  """

  def fill(shape: jax.ShapeDtypeStruct) -> Array:
    is_float = jnp.issubdtype(shape.dtype, jnp.floating)
    return jnp.full(shape.shape, jnp.nan if is_float else 77, shape.dtype)

  jax.block_until_ready(jax.tree.map(fill, shapes))


@jax.jit
def _same_bits(
  a: Shaped[Array, "*shape"], b: Shaped[Array, "*shape"]
) -> Bool[Array, ""]:
  if jnp.issubdtype(a.dtype, jnp.floating):
    a, b = to_bits(a), to_bits(b)
  return jnp.all(a == b)


def outcome(
  passed: bool, *, error: float, limit: float, twice: Twice, **more: Any
) -> dict[str, Any]:
  """A check's result: an error with its limit, and the same bits twice."""
  return {
    "status": "PASS" if passed and twice.is_same else "FAIL",
    "error": error,
    "limit": limit,
    "same_bits_twice": twice.is_same,
    **more,
  }


def in_float32(
  a: Float[Array, "rows inner"], b: Float[Array, "inner columns"]
) -> Float[Array, "rows columns"]:
  """A product in float32, with no shortcut through fewer digits."""
  return jnp.matmul(
    a.astype(jnp.float32),
    b.astype(jnp.float32),
    precision=lax.Precision.HIGHEST,
  )


def rounding_limit(
  value: Float[Array, "*shape"],
  size: Float[Array, "*shape"],
  dtype: DTypeLike = jnp.bfloat16,
) -> Float[Array, "*shape"]:
  """How far off a float32 sum may be that was rounded to dtype.

  Args:
    value: What it should be.
    size: The sum of the absolute values of its terms.
    dtype: Of the result.
  """
  # Half a unit in the last place of the result, and a few units of float32.
  rounding = 2**-8 if dtype == jnp.bfloat16 else 0
  return rounding * jnp.abs(value) + 2**-18 * size + 1e-30


# A result of a layer may have this many times the dense layer's error, and a
# unit in the last place in any case. The largest of many errors is about 4
# times the rms.
_FACTOR = 1.5
UNIT = float(jnp.finfo(jnp.bfloat16).eps)
_LARGEST_OVER_RMS = 4


class Errors(NamedTuple):
  """Errors of many numbers, relative to the exact ones.

  Attributes:
    rms: Root mean square of the errors over that of the numbers.
    largest: The largest error over the largest number.
  """

  rms: Float32[Array, ""]
  largest: Float32[Array, ""]


def errors_of(
  actual: Float[Array, "*shape"],
  exact: Float32[Array, "*shape"],
  where: Bool[Array, "*#shape"],
) -> Errors:
  """Errors of the numbers that are asked for."""
  exact = jnp.where(where, exact, 0)
  error = jnp.where(where, actual.astype(jnp.float32) - exact, 0)
  rms = jnp.sqrt(jnp.mean(error**2)) / (jnp.sqrt(jnp.mean(exact**2)) + 1e-30)
  largest = jnp.max(jnp.abs(error)) / (jnp.max(jnp.abs(exact)) + 1e-30)
  return Errors(rms, largest)


class Limits(NamedTuple):
  """What errors may be."""

  rms: float
  largest: float


def limits_of(dense: Errors) -> Limits:
  """What is allowed, given the errors of the dense layer in bfloat16."""
  return Limits(
    max(_FACTOR * float(dense.rms), UNIT),
    max(_FACTOR * float(dense.largest), _LARGEST_OVER_RMS * UNIT),
  )
