"""What the gathered kernels share: a block for each segment of a work list.

The kernels differ in their step alone, which gathered.py, sddmm.py and spmm.py
have. The frame around it is here:

    work list ─► block: segment (row, start, length, part)
    columns   ─► R slots a step, the last one repeated past the end
    values    ─►   (the step)
                 │
                 ├─ part -1: row + y0 ─► y[row]        rounded here, once
                 ├─ part p:  row ─► parts[p] ─► add_parts ─► y[row]
                 └─ number of a slot ─► slots[place]

A result of rows is bfloat16, or float32 if asked for. A result of slots is
float32 and starts from zeros, into which the segments write what they own, so
that no slot is left undefined, whoever owns it: 4 bytes a slot, where an entry
reads 2K at least.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels import one_device, rows, split_rows
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.work_list import Work


class Inputs(NamedTuple):
  """Operands of a kernel, and inside it the references to them.

  Attributes:
    matrices: bfloat16 [rows, k] each, of whichever rows; words inside.
    columns: int32 [slots].
    values: float32 [slots] each.
    segments: Those of the work list.
    y0: What to add to each result of rows: [m, k], bfloat16 or float32; or
      None.
  """

  matrices: tuple[Any, ...]
  columns: Any
  values: tuple[Any, ...]
  segments: Any
  y0: tuple[Any, ...] = ()


class Results(NamedTuple):
  """Results of a kernel, and inside it the references to them.

  Attributes:
    y: [m, k] each.
    slots: float32 [slots] each, 0 where no segment has written.
    more: Of the kernel's own types.
    parts: float32 for each of y, of split rows. Nothing where none splits.
  """

  y: tuple[Any, ...]
  slots: tuple[Any, ...]
  more: tuple[Any, ...]
  parts: tuple[Any, ...]


class Outputs(NamedTuple):
  """Which results a kernel has.

  Attributes:
    m: Rows of a result of rows, those of the work list.
    y: How many of them.
    dtype: Theirs, bfloat16 or float32.
    slots: How many results of slots.
    more: Types of the others.
  """

  m: int
  y: int = 1
  dtype: DTypeLike = jnp.bfloat16
  slots: int = 0
  more: tuple[jax.ShapeDtypeStruct, ...] = ()


def call(
  body: Callable[..., None],
  inputs: Inputs,
  work: Work,
  outputs: Outputs,
  *,
  name: str,
  interpret: plgpu.InterpretGPUParams | None,
  scratch: tuple[Any, ...] = (),
) -> Results:
  """Runs a block for each segment, then adds up the parts of split rows.

  Args:
    body: The kernel, called with `Inputs` and `Results` of references, then
      with those of the scratch.
    inputs: The operands.
    work: Whose the slots are.
    outputs: The results to make room for.
    name: The kernel's, for profilers.
    interpret: How to interpret, if at all.
    scratch: Types of scratch memory.

  Returns:
    The results, without parts.

  Raises:
    ValueError: The dtype is not one that results can have.
  """
  k = inputs.matrices[0].shape[1]
  words = inputs._replace(
    matrices=jax.tree.map(rows.to_words, inputs.matrices),
    y0=jax.tree.map(rows.to_operand, inputs.y0),
  )
  y_type = rows.results_type(outputs.m, k, outputs.dtype)
  parts_type = split_rows.parts_type(work.part_capacity, k)
  splits = outputs.y if work.part_capacity else 0

  def kernel(inputs, slots, results, *scratch):
    body(inputs, results._replace(slots=slots), *scratch)

  def run(words: Inputs, split_list: Array) -> Results:
    # Zeros that depend on the operands: JAX computes what does not ahead of a
    # scan that is differentiated, and references cannot leave a shard_map.
    slots = tuple(
      jax.new_ref((words.columns & 0).astype(jnp.float32))
      for _ in range(outputs.slots)
    )
    (results,) = plgpu.kernel(
      kernel,
      out_type=(
        Results(
          (y_type,) * outputs.y, (), outputs.more, (parts_type,) * splits
        ),
      ),
      grid=work.segments.shape[:1],
      grid_names=("segment",),
      scratch_types=scratch,
      # Where barriers are needed, rows.sum_over_threads has them.
      compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
      kernel_name=name,
      interpret=interpret,
    )(words, slots)
    y = results.y
    if splits:
      y = tuple(
        split_rows.add_parts(
          y[index],
          results.parts[index],
          split_list,
          words.y0[index],
          width=k,
          interpret=interpret,
        )
        for index in range(outputs.y)
      )
    return Results(y, tuple(map(jax.freeze, slots)), results.more, ())

  if interpret is not None:
    run = functools.partial(one_device.interpret_kernel, run)
  results = run(words, work.split_rows)
  return results._replace(y=tuple(map(rows.from_results, results.y)))


# What is inside kernels.


class Segment(NamedTuple):
  """A block's entry of the work list, as scalars."""

  entry: Array
  row: Array
  start: Array
  length: Array
  part: Array


class Slot(NamedTuple):
  """Where an entry is, and whether it counts or repeats the segment's last."""

  place: Array
  used: Array


def this_segment(segments_ref: Any) -> Segment:
  """The segment of the block that calls it."""
  entry = lax.axis_index("segment")
  return Segment(entry, *(segments_ref[entry, field] for field in range(4)))


def for_each_step(
  step: Callable[[Array, list[Slot], Any], Any],
  start: Any,
  *,
  segment: Segment,
  config: GatherConfig,
) -> Any:
  """Takes the steps of a segment, the last one included that is not full.

  Args:
    step: Called with its index, its slots and what the step before returned.
    start: What the first step is called with.
    segment: Whose slots they are. Past its end the last one repeats.
    config: How many slots a step takes.
  """
  rows_per_step = config.rows_per_step

  def indexed_step(index, carry):
    slots = []
    for offset in range(rows_per_step):
      rank = index * rows_per_step + offset
      place = segment.start + jnp.minimum(rank, segment.length - 1)
      slots.append(Slot(place, rank < segment.length))
    return step(index, slots, carry)

  steps = (segment.length + rows_per_step - 1) // rows_per_step
  return lax.fori_loop(0, steps, indexed_step, start)


def write_rows(
  totals: tuple[rows.Halves, ...],
  segment: Segment,
  y0_refs: tuple[Any, ...],
  results: Results,
  width: int,
) -> None:
  """Writes the rows that a segment makes up, one a result, or its parts."""

  def write():
    for index, total in enumerate(totals):
      if y0_refs[index] is not None:
        added = rows.read(y0_refs[index], segment.row, width)
        total = rows.add(total, added)
      rows.write(results.y[index], segment.row, total)

  if not results.parts:
    write()
    return
  pl.when(segment.part < 0)(write)

  @pl.when(segment.part >= 0)
  def _():
    for parts_ref, total in zip(results.parts, totals):
      rows.write(parts_ref, segment.part, total)


# Checks.


def check_rows(**matrices: Array | None) -> None:
  """bfloat16 matrices of rows that fit the registers; None is no matrix."""
  for name, matrix in matrices.items():
    if matrix is None:
      continue
    if matrix.ndim != 2 or matrix.dtype != jnp.bfloat16 or not matrix.shape[0]:
      raise ValueError(
        f"{name} is {matrix.dtype}{list(matrix.shape)} but must be a bfloat16"
        " matrix of at least one row: cast or reshape it"
      )
    rows.check_width(matrix.shape[1])


def check_same(**sizes: Any) -> None:
  """Two sizes, by name, that must be the same."""
  (name, size), (other_name, other_size) = sizes.items()
  if size != other_size:
    raise ValueError(
      f"{name}={size} and {other_name}={other_size} must be the same"
    )


def check_added(shape: tuple[int, ...], **added: Array | None) -> None:
  """What results of a shape start from, by name; None is zeros."""
  for name, array in added.items():
    if array is None:
      continue
    if array.dtype not in (jnp.bfloat16, jnp.float32):
      raise ValueError(
        f"{name} is {array.dtype} but must be bfloat16 or float32: cast it"
      )
    check_same(**{name: array.shape, "y": shape})


def check_slots(columns: Array, **values: Array) -> None:
  """Flat arrays of the same length: int32 columns, float32 values by name."""
  for name, array in {"columns": columns, **values}.items():
    dtype = jnp.dtype(jnp.int32 if array is columns else jnp.float32)
    if array.ndim != 1 or array.dtype != dtype or not array.size:
      raise ValueError(
        f"{name} is {array.dtype}{list(array.shape)} but must be a flat"
        f" {dtype.name} array of at least one slot: cast or flatten it"
      )
    if array is not columns:
      check_same(**{"columns": columns.shape, name: array.shape})
