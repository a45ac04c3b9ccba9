"""Products with gathered rows: the sparse half of the layer, for inference.

    gathered_down      y[m] = Σⱼ vⱼ down[cⱼ]
    gathered_up_down   y[m] = Σⱼ hⱼ down[cⱼ],  hⱼ = (x[m] · up[cⱼ]) vⱼ

over the entries (cⱼ, vⱼ) of row m, column and value: a token's active
neurons. An entry reads one row of 2K bytes from each matrix, at random, mostly
from L2, and there is little to compute with it. What counts is to keep loads in
flight.

One block is one warpgroup (128 threads) and works through one segment of a work
list (work_list.py), R entries a step:

    columns, values of R entries ─► R rows of up   ┐ GMEM ─► registers,
                                    R rows of down │ all in flight together
                                    x[m]           ┘
    x · up: a share in each thread ─► shared memory ─► R dot products (rows.py)
    h = dot · value;  y += h · down, in float32, K/128 numbers a thread

There is no ring of buffers, no bulk copy and no producer: rows go straight to
the registers of the threads that need them, and a block's latencies are hidden
by the other blocks of its SM. Four fit where a thread has at most 128
registers, which gather_config.py chooses R for. The hardware balances: blocks
start in order, longest segments first, the next as soon as one has finished.
x[m] is read in each step again, from L1: kept for the whole segment it would
take the registers of another row.

Slots past a segment's end are never read: the last step repeats the last entry
with weight zero instead, and those loads hit L1. Where a row of down has an
infinity, the result may therefore be NaN instead.

The only segment of a row rounds and writes it. Segments of a split row write
float32 parts, which a second kernel adds in order (split_rows.py). y0, if
given, is added in float32, once, before the one rounding. Nothing depends on
timing: the same inputs give the same bits.

The frame around a step is in segments_kernel.py. The products that a backward
pass is made of, sddmm.py and spmm.py, are other steps in it.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import rows, segments_kernel, spmm, target
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.segments_kernel import Inputs, Outputs
from pallas_kernels.work_list import Work


class UpDown(NamedTuple):
  """What `gathered_up_down` gives.

  Attributes:
    y: The result.
    l1: Sum of |h| over each segment of the work list, 0 for unused ones; in
      total that of all entries.
  """

  y: BFloat16[Array, "m k"]
  l1: Float32[Array, "segments"]


def gathered_up_down(
  x: BFloat16[Array, "m k"],
  up: BFloat16[Array, "n k"],
  down: BFloat16[Array, "n k"],
  *,
  columns: Int32[Array, "slots"],
  values: Float32[Array, "slots"],
  work: Work,
  config: GatherConfig,
  y0: BFloat16[Array, "m k"] | Float32[Array, "m k"] | None = None,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> UpDown:
  """y[m] = y0[m] + Σ h down[c] with h = (x[m] · up[c]) v, over m's entries.

  This is Algorithm 2 of arXiv 2603.23198, with h and the sums in float32.

  Args:
    x: Tokens; k is a multiple of 256 up to 8192.
    up: Rows to take the dot products with.
    down: Rows to add up.
    columns: The c of each slot, in 0..n-1 inside the count of a row. What is
      in other slots does not matter.
    values: The v of each slot, likewise.
    work: Whose the slots are, from `work_list.segments`. Rows that it leaves
      out for want of room are left unwritten.
    config: How many entries a step takes.
    y0: What to add to, before the sum is rounded; zeros by default.
    interpret: How to interpret the kernels on CPU; by default as
      `plgpu.force_gpu_interpret_mode` says.

  Raises:
    ValueError: A shape or dtype does not fit.
  """
  segments_kernel.check_rows(x=x, up=up, down=down)
  segments_kernel.check_same(up=up.shape, down=down.shape)
  segments_kernel.check_same(width_of_x=x.shape[1], width_of_up=up.shape[1])
  segments_kernel.check_slots(columns, values=values)
  segments_kernel.check_added(x.shape, y0=y0)
  m, k = x.shape
  interpret = interpret or target.interpret_params()

  def body(inputs, results, scratch):
    segment = segments_kernel.this_segment(inputs.segments)
    x_ref, up_ref, down_ref = inputs.matrices
    (values_ref,) = inputs.values
    (l1_ref,) = results.more

    def step(index, slots, carry):
      total, l1 = carry
      neurons = [inputs.columns[slot.place] for slot in slots]
      up_rows = [rows.load(up_ref.at[neuron], k) for neuron in neurons]
      down_rows = [rows.load(down_ref.at[neuron], k) for neuron in neurons]
      values = [values_ref[slot.place] for slot in slots]
      token = rows.unpack(rows.load(x_ref.at[segment.row], k))
      dots = rows.sum_over_threads(
        scratch,
        [rows.thread_dots(token, rows.unpack(words)) for words in up_rows],
        index,
        interpreted=interpret is not None,
      )
      for rank, slot in enumerate(slots):
        h = jnp.where(slot.used, dots[rank] * values[rank], 0.0)
        l1 += jnp.abs(h)
        total = rows.add_scaled(total, h, down_rows[rank])
      return total, l1

    @pl.when(segment.row < 0)
    def _():
      l1_ref[segment.entry] = jnp.float32(0)

    @pl.when(segment.row >= 0)
    def _():
      start = rows.zeros(rows.row_shape(k), k), jnp.float32(0)
      total, l1 = segments_kernel.for_each_step(
        step, start, segment=segment, config=config
      )
      l1_ref[segment.entry] = l1
      segments_kernel.write_rows((total,), segment, inputs.y0, results, k)

  results = segments_kernel.call(
    body,
    Inputs((x, up, down), columns, (values,), work.segments, (y0,)),
    work,
    Outputs(
      m,
      more=(jax.ShapeDtypeStruct((work.segments.shape[0],), jnp.float32),),
    ),
    scratch=(rows.dot_scratch(config.rows_per_step),),
    name="gathered_up_down",
    interpret=interpret,
  )
  return UpDown(*results.y, *results.more)


def gathered_down(
  down: BFloat16[Array, "n k"],
  *,
  m: int,
  columns: Int32[Array, "slots"],
  values: Float32[Array, "slots"],
  work: Work,
  config: GatherConfig,
  y0: BFloat16[Array, "m k"] | Float32[Array, "m k"] | None = None,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> Array:
  """y[m] = y0[m] + Σ v down[c], over m's entries: a sparse matrix times down.

  Args:
    down: Rows to add up.
    m: Rows of the result, those of the work list.
    columns: The c of each slot, in 0..n-1 inside the count of a row. What is
      in other slots does not matter.
    values: The v of each slot, likewise.
    work: Whose the slots are, from `work_list.segments`. Rows that it leaves
      out for want of room are left unwritten.
    config: How many entries a step takes.
    y0: What to add to, before the sum is rounded; zeros by default.
    dtype: That of y, bfloat16 (rounded once) or float32.
    interpret: How to interpret the kernels on CPU; by default as
      `plgpu.force_gpu_interpret_mode` says.

  Raises:
    ValueError: A shape or dtype does not fit.
  """
  segments_kernel.check_rows(down=down)
  segments_kernel.check_slots(columns, values=values)
  segments_kernel.check_added((m, down.shape[1]), y0=y0)
  (y,) = spmm.weighted_sums(
    Inputs((down,), columns, (values,), work.segments, (y0,)),
    (spmm.Term(result=0, value=0, matrix=0),),
    work,
    Outputs(m, dtype=dtype),
    config=config,
    name="gathered_down",
    interpret=interpret or target.interpret_params(),
  )
  return y
