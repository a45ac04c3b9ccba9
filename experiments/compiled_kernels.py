"""The kernels of a layer as compiled for an H200, with what it can be told by.

A row is a kernel at a shape: what the compiler said of it, and the figures that
its kind of kernel has besides.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments import gradient_kernels, ptx
from experiments.kernel_shapes import (
  ACTIVE_SHARE,
  MIN_TRAINING_TOKENS,
  Shape,
)
from pallas_kernels import (
  aot,
  gate_pack,
  gate_pack_config,
  gather_config,
  gathered,
  rows,
  tuning,
  work_list,
)
from pallas_kernels.gradient_config import Product
from pallas_kernels.target import H200
from twell_jax.ops.mosaic_sizes import default_ell_width

# Multiply-adds of dense bfloat16 that the tensor cores of a multiprocessor do
# in a clock: 4096 FLOP.
MULTIPLY_ADDS_PER_CLOCK = 2048
# What a multiprocessor has, and what a block takes besides what it asks for.
_REGISTERS = 65536
_THREADS = 2048
_SHARED_MEMORY_BYTES = 228 * 1024
_SHARED_MEMORY_OF_ANY_BLOCK = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A kernel at a shape.

  Attributes:
    shape: Of the layer, before padding.
    kernel: Its name, and "+ y0" where it adds to a result that it is given.
    config: Its config; None for the second pass over split rows.
    stats: What the compiler said.
    of_training: Whether only a training step runs it.
  """

  shape: Shape
  kernel: str
  config: tuning.Config | None
  stats: aot.KernelStats
  of_training: bool = False

  def as_json(self) -> dict[str, object]:
    """Everything but the PTX, flat."""
    fields = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
    }
    shape, stats = fields.pop("shape"), fields.pop("stats")._asdict()
    del stats["name"], stats["ptx"]
    config = dataclasses.asdict(self.config) if self.config else None
    return {**shape._asdict(), **fields, "config": config, **stats}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatePackRow(Row):
  """gate_pack at a shape.

  Attributes:
    padded_k: What K is padded to.
    wgmma: Instructions that multiply matrices.
    tma: Instructions that copy tiles of matrices.
    warpgroups: Of a block: a producer, and one or two consumers.
    redistribution: Registers per thread that they ask for; None if they keep
      those of the launch.
    epilogue_instructions: That a thread of a consumer issues for a CTA tile.
  """

  config: gate_pack_config.GatePackConfig
  padded_k: int
  wgmma: int
  tma: int
  warpgroups: int
  redistribution: ptx.Redistribution | None
  epilogue_instructions: float

  @property
  def consumers(self) -> int:
    """Warpgroups that multiply and pack."""
    return self.warpgroups - 1

  @property
  def rows_of_tile(self) -> int:
    """Tokens of a CTA tile."""
    return self.consumers * gate_pack_config.CONSUMER_ROWS

  @property
  def registers_of_warpgroups(self) -> tuple[int, ...]:
    """Registers per thread of each warpgroup, after redistribution."""
    if self.redistribution is None:
      return (self.stats.registers,) * self.warpgroups
    producer, consumer = self.redistribution
    return (producer, *[consumer] * self.consumers)

  @property
  def registers_launched(self) -> int:
    """Registers per thread, summed over warpgroups, at launch."""
    return self.stats.registers * self.warpgroups

  @property
  def main_loop_clocks(self) -> float:
    """Clocks of the tensor cores for the products of a CTA tile."""
    products = self.rows_of_tile * self.config.tile_n * self.padded_k
    return products / MULTIPLY_ADDS_PER_CLOCK

  @property
  def epilogue_share(self) -> float:
    """Issue slots that the epilogue takes of each clock of the main loop.

    Each consumer has one warp on each of a multiprocessor's four schedulers.
    """
    slots = self.consumers * self.epilogue_instructions
    return slots / self.main_loop_clocks

  def as_json(self) -> dict[str, object]:
    """See Row."""
    fields = super().as_json()
    del fields["redistribution"]
    return {
      **fields,
      "registers_of_warpgroups": self.registers_of_warpgroups,
      "registers_launched": self.registers_launched,
      "main_loop_clocks": self.main_loop_clocks,
      "epilogue_share": self.epilogue_share,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredRow(Row):
  """A gathered kernel at a shape.

  Attributes:
    padded_k: What K is padded to.
    load_bytes: What a thread loads of a row with one instruction.
    instructions_per_row: That a thread issues in a step, over the rows that are
      gathered in it.
    blocks_per_sm: How many registers and shared memory let run at a time.
    bytes_in_flight: Of the rows that all of them load in a step.
  """

  config: gather_config.GatherConfig
  padded_k: int
  load_bytes: int
  instructions_per_row: float
  blocks_per_sm: int
  bytes_in_flight: int


def compile_kernels(shape: Shape) -> Iterator[Row]:
  """Compiles every kernel of a layer at a shape, one after the other.

  Those of training only at as many tokens as a step has.
  """
  yield _gate_pack(shape)
  for matrices in (1, 2):
    for has_y0 in (False, True):
      yield from _gathered(shape, matrices=matrices, has_y0=has_y0)
  if shape.m < MIN_TRAINING_TOKENS:
    return
  for product, kind in gradient_kernels.KINDS.items():
    for has_y0 in (False, True) if kind.sums else (False,):
      yield from _gradient(shape, product, has_y0=has_y0)


def _gate_pack(shape: Shape) -> GatePackRow:
  config = tuning.for_gate_pack(H200, shape.m, shape.n, shape.k)
  k = _padded(shape.k, config.tile_k)
  compiled = aot.compile_for_h200(
    lambda x, gate: gate_pack.gate_pack(
      x, gate, config=config, sm_count=H200.sm_count
    ),
    _matrix(config.padded_rows(shape.m), k),
    _matrix(_padded(shape.n, config.tile_n), k),
  )
  (stats,) = compiled.kernels
  return GatePackRow(
    shape=shape,
    kernel=stats.name,
    config=config,
    stats=stats,
    padded_k=k,
    wgmma=ptx.count(stats.ptx, "wgmma.mma_async"),
    tma=ptx.count(stats.ptx, "cp.async.bulk.tensor"),
    warpgroups=ptx.warpgroups(stats.ptx),
    redistribution=ptx.redistribution(stats.ptx),
    epilogue_instructions=gate_pack_config.epilogue_instructions(
      config, ACTIVE_SHARE
    ),
  )


def _gathered(shape: Shape, *, matrices: int, has_y0: bool) -> Iterator[Row]:
  """A gathered kernel, and the second pass where rows are split."""
  m, n = shape.m, shape.n
  k = _padded(shape.k, rows.WIDTH_MULTIPLE)
  width = default_ell_width(n)
  config = tuning.for_gathered(H200, m, n, k, width, matrices=matrices)
  work = jax.eval_shape(
    functools.partial(
      work_list.of_ell, width=width, length=config.segment_length
    ),
    _integers(m),
  )
  slots = (
    _integers(m * width),
    jax.ShapeDtypeStruct((m * width,), jnp.float32),
  )
  y0 = jax.ShapeDtypeStruct((m, k), jnp.float32) if has_y0 else None

  def down_only(down, columns, values, work, y0):
    return gathered.gathered_down(
      down,
      m=m,
      columns=columns,
      values=values,
      work=work,
      config=config,
      y0=y0,
    )

  def up_down(x, up, down, columns, values, work, y0):
    return gathered.gathered_up_down(
      x,
      up,
      down,
      columns=columns,
      values=values,
      work=work,
      config=config,
      y0=y0,
    )

  if matrices == 1:
    compiled = aot.compile_for_h200(down_only, _matrix(n, k), *slots, work, y0)
  else:
    compiled = aot.compile_for_h200(
      up_down, _matrix(m, k), _matrix(n, k), _matrix(n, k), *slots, work, y0
    )
  yield from _gathered_rows(
    shape,
    compiled,
    config,
    matrices=matrices,
    has_y0=has_y0,
    of_training=False,
  )


def _gradient(shape: Shape, product: Product, *, has_y0: bool) -> Iterator[Row]:
  """A gathered kernel of training, and the second pass over split rows."""
  m, n = shape.m, shape.n
  k = _padded(shape.k, rows.WIDTH_MULTIPLE)
  width = default_ell_width(n)
  kind = gradient_kernels.KINDS[product]
  config = tuning.for_gradient(H200, product, m, n, k, width)
  lists = gradient_kernels.lists_of(product, tokens=m, neurons=n, width=width)
  slots = jax.ShapeDtypeStruct((lists.slots,), jnp.float32)
  y0 = jax.ShapeDtypeStruct((lists.rows, k), jnp.float32)
  types: dict[str, Any] = {
    "matrices": tuple(_matrix(m, k) for m in lists.matrix_rows(product)),
    "columns": _integers(lists.slots),
    "values": (slots,) * kind.values,
    "work": jax.eval_shape(
      functools.partial(
        gradient_kernels.work_of, lists, length=config.segment_length
      ),
      _integers(lists.rows),
      _integers(lists.rows),
    ),
    "added": (y0,) * (kind.sums if has_y0 else 0),
  }
  compiled = aot.compile_for_h200(
    functools.partial(
      gradient_kernels.call,
      product,
      rows=lists.rows,
      config=config,
      dtype=jnp.float32,
    ),
    gradient_kernels.Operands(**types),
  )
  yield from _gathered_rows(
    shape,
    compiled,
    config,
    matrices=kind.gathered,
    has_y0=has_y0,
    of_training=True,
  )


def _gathered_rows(
  shape: Shape,
  compiled: aot.Compiled,
  config: gather_config.GatherConfig,
  *,
  matrices: int,
  has_y0: bool,
  of_training: bool,
) -> Iterator[Row]:
  """A kernel that gathers rows of so many matrices, and its second pass."""
  suffix = " + y0" if has_y0 else ""
  first, *others = compiled.kernels
  main_loop = max(ptx.loops(first.ptx), key=len)
  rows_per_step = config.rows_per_step * matrices
  k = _padded(shape.k, rows.WIDTH_MULTIPLE)
  blocks = _blocks_per_sm(first, threads=128 * ptx.warpgroups(first.ptx))
  yield GatheredRow(
    shape=shape,
    kernel=first.name + suffix,
    config=config,
    stats=first,
    of_training=of_training,
    padded_k=k,
    load_bytes=_widest_load(main_loop),
    instructions_per_row=len(main_loop) / rows_per_step,
    blocks_per_sm=blocks,
    bytes_in_flight=blocks * rows_per_step * 2 * k,
  )
  # Where two sums are split, the pass over each is the same kernel.
  for stats in {each.name: each for each in others}.values():
    yield Row(
      shape=shape,
      kernel=f"{stats.name} of {first.name}{suffix}",
      config=None,
      stats=stats,
      of_training=of_training,
    )


def _widest_load(opcodes: tuple[str, ...]) -> int:
  """Bytes of the widest load from global memory."""
  # A load that LLVM knows nothing of the address has no ".global".
  found = (
    re.match(r"ld(?:\.global)?(?:\.v(\d))?\.b32", code) for code in opcodes
  )
  return max((4 * int(match[1] or 1) for match in found if match), default=0)


def _blocks_per_sm(stats: aot.KernelStats, *, threads: int) -> int:
  registers = threads * _padded(stats.registers, 8)
  shared = stats.shared_memory_bytes + _SHARED_MEMORY_OF_ANY_BLOCK
  return min(
    _REGISTERS // registers,
    _SHARED_MEMORY_BYTES // shared,
    _THREADS // threads,
  )


def _padded(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


def _matrix(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.int32)
