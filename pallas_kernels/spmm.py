"""Sparse times dense (spmm) with two terms or two results, for training.

    spmm_two_matrices   y[m] = Σⱼ vⱼ a[cⱼ] + wⱼ b[cⱼ]
    spmm_two_values     y[m] = Σⱼ vⱼ b[cⱼ]  and  z[m] = Σⱼ wⱼ b[cⱼ]

over the entries j of row m, cⱼ their columns, vⱼ and wⱼ their two values. They
are what is left of a backward pass after sddmm.py:

    by token    spmm_two_matrices   rows tokens, columns neurons
                                    dX = Σ dR Wu + dU Wg
    by neuron   spmm_two_values     rows neurons, columns tokens
                                    dWu = Σ dR x  and  dWg = Σ dU x

With one matrix and one value it is `gathered.gathered_down`. Two matrices at
once save a result's way to memory and back; two values at once save a gather:

    columns ─► R rows of a ┐ GMEM ─► registers    columns ─► R rows of b
               R rows of b ┘                                  │
    y += v a + w b, in float32                    y += v b    z += w b

A step has only loads and multiply-adds: no shared memory, no barrier.

gathered.py tells why rows go straight to registers, and segments_kernel.py
what is around a step. A neuron that fires on very many tokens is a row of many
segments, whose float32 parts split_rows.py adds in order.
"""

from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import rows, segments_kernel, target
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.segments_kernel import Inputs, Outputs
from pallas_kernels.work_list import Work


def spmm_two_matrices(
  a: BFloat16[Array, "n k"],
  b: BFloat16[Array, "n k"],
  *,
  m: int,
  columns: Int32[Array, "slots"],
  a_values: Float32[Array, "slots"],
  b_values: Float32[Array, "slots"],
  work: Work,
  config: GatherConfig,
  y0: BFloat16[Array, "m k"] | Float32[Array, "m k"] | None = None,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> Array:
  """y[m] = y0[m] + Σ v a[c] + w b[c], over m's entries, of shape [m, k].

  Args:
    a: Rows to add up; k is a multiple of 256 up to 8192.
    b: Rows to add up.
    m: Rows of the result, those of the work list.
    columns: The c of each slot, in 0..n-1 inside the count of a row. What is
      in other slots does not matter.
    a_values: The v of each slot, likewise.
    b_values: The w of each slot, likewise.
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
  segments_kernel.check_rows(a=a, b=b)
  segments_kernel.check_same(a=a.shape, b=b.shape)
  segments_kernel.check_slots(columns, a_values=a_values, b_values=b_values)
  segments_kernel.check_added((m, a.shape[1]), y0=y0)
  interpret = interpret or target.interpret_params()

  (y,) = weighted_sums(
    Inputs((a, b), columns, (a_values, b_values), work.segments, (y0,)),
    (Term(result=0, value=0, matrix=0), Term(result=0, value=1, matrix=1)),
    work,
    Outputs(m, dtype=dtype),
    config=config,
    name="spmm_two_matrices",
    interpret=interpret,
  )
  return y


class TwoSums(NamedTuple):
  """What `spmm_two_values` gives, of shape [m, k] each.

  Attributes:
    y: The sums with the first values.
    z: Those with the second ones.
  """

  y: Array
  z: Array


def spmm_two_values(
  b: BFloat16[Array, "n k"],
  *,
  m: int,
  columns: Int32[Array, "slots"],
  y_values: Float32[Array, "slots"],
  z_values: Float32[Array, "slots"],
  work: Work,
  config: GatherConfig,
  y0: BFloat16[Array, "m k"] | Float32[Array, "m k"] | None = None,
  z0: BFloat16[Array, "m k"] | Float32[Array, "m k"] | None = None,
  dtype: DTypeLike = jnp.bfloat16,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> TwoSums:
  """y[m] = y0[m] + Σ v b[c] and z[m] = z0[m] + Σ w b[c], of one gather.

  Args:
    b: Rows to add up; k is a multiple of 256 up to 8192.
    m: Rows of the results, those of the work list.
    columns: The c of each slot, in 0..n-1 inside the count of a row. What is
      in other slots does not matter.
    y_values: The v of each slot, likewise.
    z_values: The w of each slot, likewise.
    work: Whose the slots are, from `work_list.segments`. Rows that it leaves
      out for want of room are left unwritten.
    config: How many entries a step takes.
    y0: What to add to, before the sum is rounded; zeros by default.
    z0: Likewise, for z.
    dtype: That of y and z, bfloat16 (rounded once) or float32.
    interpret: How to interpret the kernels on CPU; by default as
      `plgpu.force_gpu_interpret_mode` says.

  Raises:
    ValueError: A shape or dtype does not fit.
  """
  segments_kernel.check_rows(b=b)
  segments_kernel.check_slots(columns, y_values=y_values, z_values=z_values)
  segments_kernel.check_added((m, b.shape[1]), y0=y0, z0=z0)
  interpret = interpret or target.interpret_params()

  return TwoSums(
    *weighted_sums(
      Inputs((b,), columns, (y_values, z_values), work.segments, (y0, z0)),
      (Term(result=0, value=0, matrix=0), Term(result=1, value=1, matrix=0)),
      work,
      Outputs(m, y=2, dtype=dtype),
      config=config,
      name="spmm_two_values",
      interpret=interpret,
    )
  )


class Term(NamedTuple):
  """value · row of matrix, to be added to a result; by their positions."""

  result: int
  value: int
  matrix: int


def weighted_sums(
  inputs: Inputs,
  terms: tuple[Term, ...],
  work: Work,
  outputs: Outputs,
  *,
  config: GatherConfig,
  name: str,
  interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Array, ...]:
  """The sums of terms over the entries of each row: every spmm there is.

  Args:
    inputs: Matrices, columns, values, segments and what to add to.
    terms: What is added for each entry, in this order.
    work: The work list that the segments are of.
    outputs: The results to make room for.
    config: How many entries a step takes.
    name: The kernel's.
    interpret: How to interpret, if at all.

  Returns:
    The results, one for each `y` of outputs.
  """
  k = inputs.matrices[0].shape[1]

  def body(inputs, results):
    segment = segments_kernel.this_segment(inputs.segments)

    def step(_, slots, totals):
      chosen = [inputs.columns[slot.place] for slot in slots]
      loaded = [
        [rows.load(matrix_ref.at[column], k) for column in chosen]
        for matrix_ref in inputs.matrices
      ]
      totals = list(totals)
      for rank, slot in enumerate(slots):
        weights = [
          jnp.where(slot.used, values_ref[slot.place], 0.0)
          for values_ref in inputs.values
        ]
        for result, value, matrix in terms:
          totals[result] = rows.add_scaled(
            totals[result], weights[value], loaded[matrix][rank]
          )
      return tuple(totals)

    @pl.when(segment.row >= 0)
    def _():
      zero = rows.zeros(rows.row_shape(k), k)
      totals = segments_kernel.for_each_step(
        step, (zero,) * outputs.y, segment=segment, config=config
      )
      segments_kernel.write_rows(totals, segment, inputs.y0, results, k)

  return segments_kernel.call(
    body, inputs, work, outputs, name=name, interpret=interpret
  ).y
