"""A matrix row in the registers of a warpgroup.

A row of K bfloat16 is read as K/2 words of 32 bits, word = odd element << 16 |
even element, so that a shift and a mask give two float32, with no conversion.
The 128 threads of a warpgroup hold it as [chunks, 128, v] words: each thread
loads v = 4, 2 or 1 neighbouring words (16, 8 or 4 bytes) at a time, the widest
that K allows, and a chunk is one coalesced load of all threads:

    K = 2048    word    0..3   │ 4..7   │ ... │ 508..511     chunk 0
                        512..  │        │     │    ..1023    chunk 1
                        thread 0 thread 1      thread 127

Sums over K stay in the same places, as two float32 arrays of that shape, those
of the even elements and those of the odd ones. They are interleaved again when
a row of results is rounded.

Where v is 1 the shape is [chunks, 128], and [128] for K = 256, because Pallas'
layout inference does not get past axes of length 1 there.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float32, Int32

# Threads of a warpgroup.
THREADS = 128
# A row must fill whole words of all threads.
WIDTH_MULTIPLE = 2 * THREADS
# Of wider rows the sums and one row of each operand no longer fit the 255
# registers that a thread can have.
MAX_WIDTH = 8192


class Halves(NamedTuple):
  """float32 values of a row, [chunks, 128, v] each: even and odd elements."""

  even: Array
  odd: Array


def check_width(width: int) -> None:
  """Raises ValueError unless rows of this width can be handled."""
  if width % WIDTH_MULTIPLE or not 1 <= width <= MAX_WIDTH:
    raise ValueError(
      f"rows are {width} wide but must be a multiple of {WIDTH_MULTIPLE} up to"
      f" {MAX_WIDTH}: pad them with zeros, or slice them"
    )


def row_shape(width: int) -> tuple[int, ...]:
  """The shape of a row's words: [chunks, 128, v], [chunks, 128] or [128]."""
  if width == WIDTH_MULTIPLE:
    return chunk_shape(width)
  return (chunk_count(width), *chunk_shape(width))


def chunk_shape(width: int) -> tuple[int, ...]:
  """The shape of a chunk's words: [128, v], or [128] where v is 1."""
  vector = _vector(width)
  return (THREADS, vector) if vector > 1 else (THREADS,)


def chunk_count(width: int) -> int:
  """Chunks of a row."""
  return width // (WIDTH_MULTIPLE * _vector(width))


def _vector(width: int) -> int:
  """v, the words that a thread loads at a time."""
  return next(v for v in (4, 2, 1) if width % (WIDTH_MULTIPLE * v) == 0)


def row_layout(width: int) -> Any:
  """Which thread holds what of a row or of one of its chunks."""
  vector = _vector(width)
  warp = THREADS // 4
  if vector > 1:
    tiling, warps = plgpu.Tiling(((THREADS, vector), (warp, vector))), -4
  else:
    tiling, warps = plgpu.Tiling(((THREADS,), (warp,), (1,))), -3
  return plgpu.Layout.TILED(
    tiling, warp_dims=(warps,), lane_dims=(-2,), vector_dim=-1
  )


def to_words(
  matrix: BFloat16[Array, "rows width"],
) -> Int32[Array, "rows *row_shape"]:
  """A matrix as the kernels read it; XLA moves nothing for it."""
  rows, width = matrix.shape
  pairs = matrix.reshape(rows, width // 2, 2)
  words = lax.bitcast_convert_type(pairs, jnp.int32)
  return words.reshape(rows, *row_shape(width))


def from_words(
  words: Int32[Array, "rows *row_shape"],
) -> BFloat16[Array, "rows width"]:
  """The matrix whose words these are."""
  rows = words.shape[0]
  pairs = lax.bitcast_convert_type(words.reshape(rows, -1), jnp.bfloat16)
  return pairs.reshape(rows, -1)


def results_type(
  rows: int, width: int, dtype: DTypeLike
) -> jax.ShapeDtypeStruct:
  """The type of a matrix of results, as a kernel writes it.

  bfloat16 as words, int32 [rows, *row_shape]. float32 in halves, [rows, 2,
  *row_shape], because a thread stores neighbours only.
  """
  if dtype == jnp.bfloat16:
    return jax.ShapeDtypeStruct((rows, *row_shape(width)), jnp.int32)
  if dtype == jnp.float32:
    return jax.ShapeDtypeStruct((rows, 2, *row_shape(width)), jnp.float32)
  raise ValueError(
    f"dtype={jnp.dtype(dtype).name} of the result must be bfloat16 or float32"
  )


def from_results(
  array: Int32[Array, "rows *row_shape"] | Float32[Array, "rows 2 *row_shape"],
) -> Array:
  """The matrix [rows, width] that a kernel has written.

  XLA interleaves the halves of a float32 one inside whatever reads it.
  """
  if array.dtype == jnp.int32:
    return from_words(array)
  rows = array.shape[0]
  halves = array.reshape(rows, 2, -1)
  return jnp.stack([halves[:, 0], halves[:, 1]], axis=-1).reshape(rows, -1)


def to_operand(matrix: Array) -> Array:
  """A matrix of results, bfloat16 or float32, as `results_type` has it."""
  if matrix.dtype == jnp.bfloat16:
    return to_words(matrix)
  rows, width = matrix.shape
  pairs = matrix.reshape(rows, width // 2, 2)
  return jnp.swapaxes(pairs, 1, 2).reshape(rows, 2, *row_shape(width))


# The rest is called inside kernels.


def load(ref: Any, width: int) -> Array:
  """A row, a chunk of it or one of its halves, from GMEM to registers."""
  # A generic load: 16, 8 or 4 bytes a thread all the same.
  return plgpu.load(ref, layout=row_layout(width), optimized=False)


def unpack(words: Int32[Array, "*row_shape"]) -> Halves:
  """The float32 values of words."""
  high_half = jnp.int32(-(1 << 16))
  return Halves(
    lax.bitcast_convert_type(words << 16, jnp.float32),
    lax.bitcast_convert_type(words & high_half, jnp.float32),
  )


def pack(values: Halves) -> Int32[Array, "*row_shape"]:
  """Words of the values, rounded to bfloat16."""

  def rounded(half):
    half = half.astype(jnp.bfloat16).astype(jnp.float32)
    return lax.bitcast_convert_type(half, jnp.int32)

  even = lax.shift_right_logical(rounded(values.even), 16)
  return rounded(values.odd) | even


def read(ref: Any, row: Array, width: int, *chunk: Array) -> Halves:
  """Reads a row, or a chunk of one, of what is of `results_type`."""
  if ref.dtype == jnp.int32:
    return unpack(load(ref.at[(row, *chunk)], width))
  return Halves(*(load(ref.at[(row, half, *chunk)], width) for half in (0, 1)))


def write(ref: Any, row: Array, values: Halves, *chunk: Array) -> None:
  """Writes a row, or a chunk of one, of results that are `results_type`."""
  if ref.dtype == jnp.int32:
    ref[(row, *chunk)] = pack(values)
  else:
    for half, array in enumerate(values):
      ref[(row, half, *chunk)] = array


def zeros(shape: tuple[int, ...], width: int) -> Halves:
  """Sums to start from, for a row (`row_shape`) or a chunk (`chunk_shape`)."""
  half = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), row_layout(width))
  return Halves(half, half)


def add_scaled(
  total: Halves, weight: Float32[Array, ""], words: Int32[Array, "*row_shape"]
) -> Halves:
  """total + weight · row."""
  values = unpack(words)
  return Halves(
    total.even + weight * values.even, total.odd + weight * values.odd
  )


def add(total: Halves, values: Halves) -> Halves:
  """total + values."""
  return Halves(total.even + values.even, total.odd + values.odd)


def thread_dots(a: Halves, b: Halves) -> Float32[Array, "128"]:
  """Each thread's share of the dot product of two rows."""
  products = a.even * b.even + a.odd * b.odd
  # Layout inference reduces one axis at a time.
  if products.ndim > 1:
    products = jnp.sum(products, axis=0)
  return jnp.sum(products, axis=1) if products.ndim > 1 else products


class DotScratch(NamedTuple):
  """Shared memory in which the threads' shares of dot products are summed.

  Two of each, used by turns: see `sum_over_threads`.
  """

  shares: Any
  sums: Any


def dot_scratch(dots: int) -> DotScratch:
  """Scratch for `dots` dot products a step, of which four warps sum a share."""
  rounded = max(dots, 4)
  return DotScratch(
    plgpu.SMEM((2, rounded, THREADS), jnp.float32),
    plgpu.SMEM((2, rounded), jnp.float32),
  )


# Four rows of shares go to four warps; a lane holds four neighbours of a row.
_SHARES_LAYOUT = plgpu.Layout.TILED(
  plgpu.Tiling(((4, THREADS), (4,))),
  warp_dims=(-3,),
  lane_dims=(-2,),
  vector_dim=-1,
)


def sum_over_threads(
  scratch: DotScratch,
  shares: list[Float32[Array, "128"]],
  step: Int32[Array, ""],
  *,
  interpreted: bool,
) -> Any:
  """Dot products from the threads' shares, as a reference to read them from.

  Every row of shares is summed by one warp: five shuffles for four products,
  where a butterfly for each would take twenty.

  Two barriers order it within a step. Across steps none is needed, because
  steps alternate between two halves of the scratch: before a thread writes in
  step j what was read in step j - 2, it has passed a barrier of step j - 1,
  which the readers reached after their reads.

  The alternation also makes the addresses vary. Mosaic declares its shared
  memory as a symbol of one byte, and ptxas remarks an access out of bounds at
  any constant offset from it.
  """
  half = step & 1
  for index, share in enumerate(shares):
    scratch.shares[half, index] = share
  _barrier(interpreted=interpreted)
  by_warp = plgpu.load(
    scratch.shares.at[half], layout=_SHARES_LAYOUT, optimized=False
  )
  scratch.sums[half] = jnp.sum(by_warp, axis=1)
  _barrier(interpreted=interpreted)
  return scratch.sums.at[half]


def _barrier(*, interpreted: bool) -> None:
  """All threads of the warpgroup wait for each other.

  The interpreter runs a warpgroup as one thread, which needs none. The barriers
  that Mosaic can add by itself are around every access, eight times as many.
  """
  if interpreted:
    return

  @plgpu.inline_mgpu()
  def wait(_):
    mgpu.utils.warpgroup_barrier()

  wait()
