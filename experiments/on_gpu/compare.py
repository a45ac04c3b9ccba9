"""What the checks share: running twice, and a check's result."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

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
