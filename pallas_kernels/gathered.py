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

The gathered sddmm and the spmm of two matrices that a backward pass is made of
are other bodies for `_call`, out of the same pieces.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import one_device, rows, split_rows, target
from pallas_kernels.gather_config import GatherConfig
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
  y0: BFloat16[Array, "m k"] | None = None,
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
  _check_rows(x=x, up=up, down=down, y0=y0)
  _check_same(up=up.shape, down=down.shape)
  _check_same(width_of_x=x.shape[1], width_of_up=up.shape[1])
  m, k = x.shape
  interpret = interpret or target.interpret_params()

  def body(inputs, results, scratch):
    segment = _this_segment(inputs.segments)
    x_ref, up_ref, down_ref = inputs.matrices
    (l1_ref,) = results.more

    def step(index, carry):
      total, l1 = carry
      slots = _slots(segment, index, config)
      neurons = [inputs.columns[slot.place] for slot in slots]
      up_rows = [rows.load(up_ref.at[neuron], k) for neuron in neurons]
      down_rows = [rows.load(down_ref.at[neuron], k) for neuron in neurons]
      values = [inputs.values[slot.place] for slot in slots]
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
      total, l1 = lax.fori_loop(0, _steps(segment, config), step, start)
      l1_ref[segment.entry] = l1
      _write(total, segment, inputs.y0, results, k)

  results = _call(
    body,
    _Inputs((x, up, down), columns, values, work.segments, y0),
    work,
    m=m,
    more=(jax.ShapeDtypeStruct((work.segments.shape[0],), jnp.float32),),
    scratch=(rows.dot_scratch(config.rows_per_step),),
    name="gathered_up_down",
    interpret=interpret,
  )
  return UpDown(results.y, *results.more)


def gathered_down(
  down: BFloat16[Array, "n k"],
  *,
  m: int,
  columns: Int32[Array, "slots"],
  values: Float32[Array, "slots"],
  work: Work,
  config: GatherConfig,
  y0: BFloat16[Array, "m k"] | None = None,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> BFloat16[Array, "m k"]:
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
    interpret: How to interpret the kernels on CPU; by default as
      `plgpu.force_gpu_interpret_mode` says.

  Raises:
    ValueError: A shape or dtype does not fit.
  """
  _check_rows(down=down, y0=y0)
  k = down.shape[1]
  interpret = interpret or target.interpret_params()

  def body(inputs, results):
    segment = _this_segment(inputs.segments)
    (down_ref,) = inputs.matrices

    def step(index, total):
      slots = _slots(segment, index, config)
      neurons = [inputs.columns[slot.place] for slot in slots]
      down_rows = [rows.load(down_ref.at[neuron], k) for neuron in neurons]
      for slot, words in zip(slots, down_rows):
        weight = jnp.where(slot.used, inputs.values[slot.place], 0.0)
        total = rows.add_scaled(total, weight, words)
      return total

    @pl.when(segment.row >= 0)
    def _():
      start = rows.zeros(rows.row_shape(k), k)
      total = lax.fori_loop(0, _steps(segment, config), step, start)
      _write(total, segment, inputs.y0, results, k)

  return _call(
    body,
    _Inputs((down,), columns, values, work.segments, y0),
    work,
    m=m,
    name="gathered_down",
    interpret=interpret,
  ).y


class _Inputs(NamedTuple):
  """Operands of a kernel, and inside it the references to them."""

  matrices: tuple[Any, ...]
  columns: Any
  values: Any
  segments: Any
  y0: Any


class _Results(NamedTuple):
  """Results of a kernel, and inside it the references to them."""

  y: Any
  more: tuple[Any, ...]
  parts: Any


class _Segment(NamedTuple):
  """A block's entry of the work list, as scalars."""

  entry: Array
  row: Array
  start: Array
  length: Array
  part: Array


class _Slot(NamedTuple):
  """Where an entry is, and whether it counts or repeats the segment's last."""

  place: Array
  used: Array


def _call(
  body: Callable[..., None],
  inputs: _Inputs,
  work: Work,
  *,
  m: int,
  name: str,
  interpret: plgpu.InterpretGPUParams | None,
  more: tuple[jax.ShapeDtypeStruct, ...] = (),
  scratch: tuple[Any, ...] = (),
) -> _Results:
  """Runs a block for each segment, then adds up the parts of split rows."""
  _check_slots(inputs.columns, inputs.values)
  k = inputs.matrices[0].shape[1]
  if inputs.y0 is not None:
    _check_same(y0=inputs.y0.shape, y=(m, k))
  words = inputs._replace(
    matrices=tuple(map(rows.to_words, inputs.matrices)),
    y0=None if inputs.y0 is None else rows.to_words(inputs.y0),
  )
  part_capacity = work.part_capacity
  parts_type = split_rows.parts_type(part_capacity, k)

  def run(words: _Inputs, splits: Array) -> tuple[Array, tuple[Array, ...]]:
    (results,) = plgpu.kernel(
      body,
      out_type=(
        _Results(
          rows.words_type(m, k), more, parts_type if part_capacity else None
        ),
      ),
      grid=work.segments.shape[:1],
      grid_names=("segment",),
      scratch_types=scratch,
      # Where barriers are needed, rows.sum_over_threads has them.
      compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
      kernel_name=name,
      interpret=interpret,
    )(words)
    y_words = results.y
    if part_capacity:
      y_words = split_rows.add_parts(
        y_words,
        results.parts,
        splits,
        words.y0,
        width=k,
        interpret=interpret,
      )
    return y_words, results.more

  if interpret is not None:
    run = functools.partial(one_device.interpret_kernel, run)
  y_words, more_results = run(words, work.split_rows)
  return _Results(rows.from_words(y_words), more_results, None)


def _this_segment(segments_ref: Any) -> _Segment:
  entry = lax.axis_index("segment")
  return _Segment(entry, *(segments_ref[entry, field] for field in range(4)))


def _steps(segment: _Segment, config: GatherConfig) -> Array:
  """Steps that a segment takes, the last one included that is not full."""
  rows_per_step = config.rows_per_step
  return (segment.length + rows_per_step - 1) // rows_per_step


def _slots(segment: _Segment, step: Array, config: GatherConfig) -> list[_Slot]:
  """The entries of a step; past the segment's end the last one repeats."""
  slots = []
  for offset in range(config.rows_per_step):
    rank = step * config.rows_per_step + offset
    place = segment.start + jnp.minimum(rank, segment.length - 1)
    slots.append(_Slot(place, rank < segment.length))
  return slots


def _write(
  total: rows.Halves,
  segment: _Segment,
  y0_ref: Any,
  results: _Results,
  width: int,
) -> None:
  """Writes the row that a segment makes up, or its part of one."""

  def write_row():
    whole = total
    if y0_ref is not None:
      words = rows.load(y0_ref.at[segment.row], width)
      whole = rows.add(total, rows.unpack(words))
    results.y[segment.row] = rows.pack(whole)

  if results.parts is None:
    write_row()
    return
  pl.when(segment.part < 0)(write_row)

  @pl.when(segment.part >= 0)
  def _():
    for half, values in enumerate(total):
      results.parts[segment.part, half] = values


def _check_rows(**matrices: Array | None) -> None:
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


def _check_slots(columns: Array, values: Array) -> None:
  for name, array, dtype in (
    ("columns", columns, jnp.int32),
    ("values", values, jnp.float32),
  ):
    if array.ndim != 1 or array.dtype != dtype or not array.size:
      raise ValueError(
        f"{name} is {array.dtype}{list(array.shape)} but must be a flat"
        f" {jnp.dtype(dtype).name} array of at least one slot: cast or flatten"
        " it"
      )
  _check_same(columns=columns.shape, values=values.shape)


def _check_same(**sizes: Any) -> None:
  """Two sizes, by name, that must be the same."""
  (name, size), (other_name, other_size) = sizes.items()
  if size != other_size:
    raise ValueError(
      f"{name}={size} and {other_name}={other_size} must be the same"
    )
