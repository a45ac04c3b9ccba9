"""The second pass over rows that were split: their parts are added up.

Parts are float32, [parts, 2, *row_shape] with the even elements first. A block
takes one chunk of one split row and adds its parts in ascending order, eight at
a time in registers, whatever the width of the row is. Blocks write straight
into the results of the first pass, which has left the split rows to them.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_kernels import rows

# Parts loaded before the first is added.
_PARTS_PER_STEP = 8


def parts_type(parts: int, width: int) -> jax.ShapeDtypeStruct:
  """The type of the partial results of `parts` segments."""
  return rows.results_type(parts, width, jnp.float32)


def add_parts(
  y: Int32[Array, "rows *row_shape"] | Float32[Array, "rows 2 *row_shape"],
  parts: Float32[Array, "parts 2 *row_shape"],
  split_rows: Int32[Array, "split_rows 4"],
  y0: Array | None,
  *,
  width: int,
  interpret: plgpu.InterpretGPUParams | None,
) -> Array:
  """y with the split rows written: the sums of their parts, and of y0.

  Args:
    y: Results of the first pass, as it writes them; their memory is reused.
    parts: What the first pass wrote.
    split_rows: (row, first part, parts, 0), as in `work_list.Work`.
    y0: What to add to, as `rows.to_operand` makes it.
    width: Elements of a row.
    interpret: How to interpret, if at all.
  """
  step_size = _PARTS_PER_STEP
  chunk_shape = rows.chunk_shape(width)

  def in_chunks(array):
    lead = array.shape[: array.ndim - len(rows.row_shape(width))]
    return array.reshape(*lead, rows.chunk_count(width), *chunk_shape)

  def body(parts_ref, split_ref, *refs):
    *y0_refs, y_ref = refs
    entry = lax.axis_index("split_row")
    chunk = lax.axis_index("chunk")
    row, first, count = (split_ref[entry, field] for field in range(3))

    def step(index, total):
      ranks = [index * step_size + offset for offset in range(step_size)]
      loaded = []
      for rank in ranks:
        part = first + jnp.minimum(rank, count - 1)
        loaded.append(
          [rows.load(parts_ref.at[part, half, chunk], width) for half in (0, 1)]
        )
      for rank, halves in zip(ranks, loaded):
        used = jnp.broadcast_to(rank < count, halves[0].shape)
        total = rows.add(
          total, rows.Halves(*(jnp.where(used, half, 0.0) for half in halves))
        )
      return total

    @pl.when(row >= 0)
    def _():
      steps = (count + step_size - 1) // step_size
      total = rows.zeros(chunk_shape, width)
      total = lax.fori_loop(0, steps, step, total)
      for y0_ref in y0_refs:
        total = rows.add(total, rows.read(y0_ref, row, width, chunk))
      rows.write(y_ref, row, total, chunk)

  y_ref = jax.new_ref(in_chunks(y))
  operands = [in_chunks(parts), split_rows]
  if y0 is not None:
    operands.append(in_chunks(y0))
  plgpu.kernel(
    body,
    out_type=(),
    grid=(split_rows.shape[0], rows.chunk_count(width)),
    grid_names=("split_row", "chunk"),
    kernel_name="add_parts",
    interpret=interpret,
  )(*operands, y_ref)
  return jax.freeze(y_ref).reshape(y.shape)
