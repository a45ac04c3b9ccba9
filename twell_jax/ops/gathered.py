"""Products with gathered rows of a matrix, in a form whose gathers XLA fuses.

Both read `matrix[rows[t, s]]` for the slots s of the vectors t of a tile,
without storing those rows anywhere, and accumulate in at least float32.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

# Callers' indices are in range by construction.
_TRUSTED = "promise_in_bounds"


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """float32 for 16-bit and float32 numbers, float64 for float64."""
  return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def add_rows(
  total: Float[Array, "tile width"],
  weights: Float[Array, "tile slots"],
  matrix: Float[Array, "rows width"],
  rows: Int32[Array, "tile slots"],
) -> Float[Array, "tile width"]:
  """total[t] + sum over s of weights[t, s] · matrix[rows[t, s]].

  Unrolled over slots it is one fusion of gathers and multiply-adds. The slots
  are added up first and enter the total together: a total of n terms then has
  the rounding error of about n / slots additions, as a blocked product has.
  """
  added = jnp.zeros_like(total)
  for slot in range(rows.shape[1]):
    row = matrix.at[rows[:, slot]].get(mode=_TRUSTED).astype(total.dtype)
    added += weights[:, slot : slot + 1] * row
  return total + added


def row_dots(
  vectors: Float[Array, "tile width"],
  matrix: Float[Array, "rows width"],
  rows: Int32[Array, "tile slots"],
) -> Float[Array, "tile slots"]:
  """vectors[t] · matrix[rows[t, s]].

  Slices of the row are multiplied and added up in one fusion with the gathers;
  a product with ones finishes the sum, which XLA:CPU does not vectorise inside
  a fusion.
  """
  dtype = accumulation_dtype(vectors.dtype)
  tile, slots = rows.shape
  width = vectors.shape[1]
  lanes = _slice_width(width)
  partial = jnp.zeros((tile, slots, lanes), dtype)
  for start in range(0, width, lanes):
    size = min(lanes, width - start)
    vector = vectors[:, None, start : start + size].astype(dtype)
    products = vector * _row_slices(matrix, rows, start, size).astype(dtype)
    partial += jnp.pad(products, ((0, 0), (0, 0), (0, lanes - size)))
  sums = partial.reshape(tile * slots, lanes) @ jnp.ones((lanes,), dtype)
  return sums.reshape(tile, slots)


def _slice_width(width: int) -> int:
  """At most 16 slices of at least 32 numbers, equal ones where possible."""
  least = max(32, -(-width // 16))
  for lanes in range(least, 2 * least):
    if width % lanes == 0:
      return lanes
  return min(width, least)


def _row_slices(
  matrix: Float[Array, "rows width"],
  rows: Int32[Array, "tile slots"],
  start: int,
  size: int,
) -> Float[Array, "tile slots size"]:
  """matrix[rows, start : start + size] as one gather."""
  starts = jnp.stack([rows, jnp.full(rows.shape, start, rows.dtype)], axis=-1)
  numbers = lax.GatherDimensionNumbers(
    offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
  )
  return lax.gather(matrix, starts, numbers, (1, size), mode=_TRUSTED)
