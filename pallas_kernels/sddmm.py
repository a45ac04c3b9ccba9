"""Dot products at the entries of a sparse pattern (sddmm), for training.

    sddmm        dot[j] = a[m] · b[cⱼ]
    sddmm_spmm   dot[j] = a[m] · b[cⱼ]  and  y[m] = Σⱼ vⱼ b[cⱼ]

over the entries j of row m, cⱼ their columns, vⱼ their values. In terms of the
layer, with P the activations and dY the gradient of its result:

    by token    sddmm        rows tokens, columns neurons
                             R  = x · Wu      dT = dY · Wd
    by neuron   sddmm_spmm   rows neurons, columns tokens
                             dT = Wd · dY  and  dWd = Σ T dY, of one gather

So dY is gathered once for both products of the backward pass that it is in:

    columns of R entries ─► R rows of b ┐ GMEM ─► registers, in flight together
                            a[m]        ┘
    a · b: a share in each thread ─► shared memory ─► R numbers ─► dot[slots]
    y += v b, in float32, from the same registers         (sddmm_spmm only)

Dot products are summed in float32 and stay so. Slots that no segment owns are
0. Past a segment's end the last entry repeats, and writes the same number to
the same slot again, which needs no branch.

gathered.py tells why rows go straight to registers, and segments_kernel.py
what is around a step.
"""

from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import rows, segments_kernel, target
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.segments_kernel import Inputs, Outputs, Results
from pallas_kernels.work_list import Work


def sddmm(
  a: BFloat16[Array, "m k"],
  b: BFloat16[Array, "n k"],
  *,
  columns: Int32[Array, "slots"],
  work: Work,
  config: GatherConfig,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> Float32[Array, "slots"]:
  """dot[j] = a[m] · b[c] for the entries j of each row m; 0 in other slots.

  Args:
    a: One row for all entries of a row; k is a multiple of 256 up to 8192.
    b: Rows to take the dot products with.
    columns: The c of each slot, in 0..n-1 inside the count of a row. What is
      in other slots does not matter.
    work: Whose the slots are, from `work_list.segments`. Entries of rows that
      it leaves out for want of room are 0.
    config: How many entries a step takes.
    interpret: How to interpret the kernels on CPU; by default as
      `plgpu.force_gpu_interpret_mode` says.

  Raises:
    ValueError: A shape or dtype does not fit.
  """
  segments_kernel.check_rows(a=a, b=b)
  segments_kernel.check_same(width_of_a=a.shape[1], width_of_b=b.shape[1])
  segments_kernel.check_slots(columns)
  (dots,) = _dots_and_sums(
    Inputs((a, b), columns, (), work.segments),
    work,
    Outputs(a.shape[0], y=0, slots=1),
    config=config,
    name="sddmm",
    interpret=interpret or target.interpret_params(),
  ).slots
  return dots


class DotsAndSum(NamedTuple):
  """What `sddmm_spmm` gives.

  Attributes:
    dots: The dot product of each slot, 0 in those that are not used.
    y: The weighted sum of each row.
  """

  dots: Float32[Array, "slots"]
  y: Array


def sddmm_spmm(
  a: BFloat16[Array, "m k"],
  b: BFloat16[Array, "n k"],
  *,
  columns: Int32[Array, "slots"],
  values: Float32[Array, "slots"],
  work: Work,
  config: GatherConfig,
  y0: BFloat16[Array, "m k"] | Float32[Array, "m k"] | None = None,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> DotsAndSum:
  """dot[j] = a[m] · b[c] and y[m] = y0[m] + Σ v b[c], of one gather.

  Args:
    a: One row for all entries of a row; k is a multiple of 256 up to 8192.
    b: Rows to take the dot products with and to add up.
    columns: The c of each slot, in 0..n-1 inside the count of a row. What is
      in other slots does not matter.
    values: The v of each slot, likewise.
    work: Whose the slots are, from `work_list.segments`. Of rows that it
      leaves out for want of room, the dot products are 0 and y is unwritten.
    config: How many entries a step takes.
    y0: What to add to, before the sum is rounded; zeros by default.
    dtype: That of y, bfloat16 (rounded once) or float32.
    interpret: How to interpret the kernels on CPU; by default as
      `plgpu.force_gpu_interpret_mode` says.

  Raises:
    ValueError: A shape or dtype does not fit.
  """
  segments_kernel.check_rows(a=a, b=b)
  segments_kernel.check_same(width_of_a=a.shape[1], width_of_b=b.shape[1])
  segments_kernel.check_slots(columns, values=values)
  segments_kernel.check_added(a.shape, y0=y0)
  results = _dots_and_sums(
    Inputs((a, b), columns, (values,), work.segments, (y0,)),
    work,
    Outputs(a.shape[0], dtype=dtype, slots=1),
    config=config,
    name="sddmm_spmm",
    interpret=interpret or target.interpret_params(),
  )
  return DotsAndSum(*results.slots, *results.y)


def _dots_and_sums(
  inputs: Inputs,
  work: Work,
  outputs: Outputs,
  *,
  config: GatherConfig,
  name: str,
  interpret: plgpu.InterpretGPUParams | None,
) -> Results:
  """Dot products, and the sum with each of the values: none or one."""
  k = inputs.matrices[0].shape[1]

  def body(inputs, results, scratch):
    segment = segments_kernel.this_segment(inputs.segments)
    a_ref, b_ref = inputs.matrices
    (dots_ref,) = results.slots

    def step(index, slots, totals):
      chosen = [inputs.columns[slot.place] for slot in slots]
      b_rows = [rows.load(b_ref.at[column], k) for column in chosen]
      a_row = rows.unpack(rows.load(a_ref.at[segment.row], k))
      # The sum comes after the dot products, not between them: otherwise more
      # of the rows stay unpacked, and four of 2048 take over 128 registers.
      dots = rows.sum_over_threads(
        scratch,
        [rows.thread_dots(a_row, rows.unpack(words)) for words in b_rows],
        index,
        interpreted=interpret is not None,
      )
      for slot, words in zip(slots, b_rows):
        totals = tuple(
          rows.add_scaled(
            total, jnp.where(slot.used, values_ref[slot.place], 0.0), words
          )
          for total, values_ref in zip(totals, inputs.values)
        )
      for rank, slot in enumerate(slots):
        dots_ref[slot.place] = dots[rank]
      return totals

    @pl.when(segment.row >= 0)
    def _():
      zero = rows.zeros(rows.row_shape(k), k)
      totals = segments_kernel.for_each_step(
        step, (zero,) * outputs.y, segment=segment, config=config
      )
      if outputs.y:
        segments_kernel.write_rows(totals, segment, inputs.y0, results, k)

  return segments_kernel.call(
    body,
    inputs,
    work,
    outputs,
    scratch=(rows.dot_scratch(config.rows_per_step),),
    name=name,
    interpret=interpret,
  )
