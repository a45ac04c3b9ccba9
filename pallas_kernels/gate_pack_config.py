"""How gate_pack is cut into tiles: its config, what is legal, what is likely.

See gate_pack for what the tiles are. Nothing here touches a device.
"""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import lanes_mlir, pack_program
from pallas_kernels.lanes import WARP
from pallas_kernels.pack_program import PackShape
from pallas_kernels.target import SHARED_MEMORY_BYTES

CONSUMERS = 2
# Rows of a wgmma, so of a consumer warpgroup's accumulator.
CONSUMER_ROWS = pack_program.ROWS
# What the swizzle of a row of tile_k = 64 bfloat16 takes.
_ROWS_OF_SWIZZLE = 8
# Mosaic aligns each array in shared memory to this many bytes.
_ALIGNMENT = 1024
# A warpgroup's registers per thread at launch, if a block of three of them
# fills the 65,536 registers of a multiprocessor; granted in units of 8.
_LAUNCH_REGISTERS = 168


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatePackConfig:
  """Tile sizes of gate_pack.

  Attributes:
    tile_n: Neurons of a CTA tile, a multiple of tile_width, at most 256.
    tile_width: Neurons of a TwELL tile: 64, 128, 192 or 256.
    slots: Words of a row in a TwELL tile: a multiple of 8, so that the words of
      a warp's rows are cleared by whole stores (and those of a row are a
      multiple of the 16 bytes that TMA asks for), at most tile_width.
    tile_k: Columns of x and gate in a step, 64 or 128.
    stages: Steps that the producer may be ahead.
    cluster: CTAs that share a tile of gate, each with its own rows of x: 1, 2.
    skew: Steps that the second consumer starts after the first, so that one
      multiplies while the other packs; less than stages.
    snake_width: Column tiles in a stripe of the order in which tiles are
      computed: a CTA wave covers a rectangle, whose operands fit L2.
    producer_registers: Per thread of the producer.
    consumer_registers: Per thread of the consumers.

  Raises:
    ValueError: A value out of its bounds, or more shared memory or registers
      than there are.
  """

  tile_m: ClassVar[int] = CONSUMERS * CONSUMER_ROWS

  tile_n: int = 256
  tile_width: int = 256
  slots: int = 32
  tile_k: int = 64
  stages: int = 4
  cluster: int = 1
  skew: int = 2
  snake_width: int = 8
  producer_registers: int = 40
  consumer_registers: int = 232

  def __post_init__(self):
    block = pack_program.BLOCK
    if self.tile_width not in range(block, 257, block):
      raise ValueError(
        f"tile_width={self.tile_width} must be 64, 128, 192 or 256: rows are"
        f" packed {block} columns at a time"
      )
    if self.tile_n not in range(self.tile_width, 257, self.tile_width):
      raise ValueError(
        f"tile_n={self.tile_n} must be a multiple of"
        f" tile_width={self.tile_width} and at most 256, the widest wgmma"
      )
    if self.slots not in range(8, self.tile_width + 1, 8):
      raise ValueError(
        f"slots={self.slots} must be a multiple of 8 and at most"
        f" tile_width={self.tile_width}"
      )
    if self.tile_k not in (64, 128):
      raise ValueError(
        f"tile_k={self.tile_k} must be 64 or 128: rows of one or two swizzles"
      )
    for name, values in (
      ("stages", range(2, 17)),
      ("cluster", range(1, 3)),
      ("skew", range(self.stages)),
      ("snake_width", range(1, 1025)),
    ):
      if getattr(self, name) not in values:
        raise ValueError(
          f"{name}={getattr(self, name)} must be in"
          f" {values.start}..{values.stop - 1}"
          + (", below stages" if name == "skew" else "")
        )
    if self.shared_memory_bytes > SHARED_MEMORY_BYTES:
      raise ValueError(
        f"{self.shared_memory_bytes} bytes of shared memory exceed the"
        f" {SHARED_MEMORY_BYTES} of a block: fewer than stages={self.stages},"
        f" or less than tile_n={self.tile_n} or slots={self.slots}"
      )
    check_redistribution(
      (self.producer_registers, *[self.consumer_registers] * CONSUMERS),
      launch_registers=_LAUNCH_REGISTERS,
    )

  @property
  def pack_shape(self) -> PackShape:
    """What a consumer warpgroup packs."""
    return PackShape(self.tile_n, self.tile_width, self.slots)

  @property
  def shared_memory_bytes(self) -> int:
    """Shared memory of a CTA with two consumers, barriers included."""
    operands = (
      self.stages * rows * self.tile_k * 2
      for rows in (self.tile_m, self.tile_n)
    )
    packed = (
      CONSUMERS * size for size in self.pack_shape.buffer_bytes.values()
    )
    barriers = 8 * (2 * self.stages + 1)
    arrays = [*operands, *packed]
    return (
      sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in arrays) + barriers
    )

  def padded_rows(self, rows: int) -> int:
    """The fewest rows of x, at least as many, that the kernel takes.

    Up to 64 it is a multiple of 8 and one consumer does, so that a few tokens
    cost no more than reading gate. Above, every CTA has tile_m rows.
    """
    if rows <= CONSUMER_ROWS and self.cluster == 1:
      return max(1, -(-rows // _ROWS_OF_SWIZZLE)) * _ROWS_OF_SWIZZLE
    rows_of_cluster = self.tile_m * self.cluster
    return -(-rows // rows_of_cluster) * rows_of_cluster


def check_redistribution(
  registers: tuple[int, ...], *, launch_registers: int
) -> None:
  """Checks that warpgroups can get the registers that they ask for.

  A block owns what it was launched with. A warpgroup that asks for more than
  the others have given back waits for ever, on the device only: neither the
  interpreter nor ptxas says so.

  Args:
    registers: Per thread, of every warpgroup after redistribution.
    launch_registers: Per thread at launch, the same for all.

  Raises:
    ValueError: They exceed what there is, or one is not a legal size.
  """
  for count in registers:
    if count not in range(24, 257, 8):
      raise ValueError(
        f"{count} registers per thread must be a multiple of 8 in 24..256"
      )
  available = launch_registers * len(registers)
  if sum(registers) > available:
    raise ValueError(
      f"warpgroups ask for {' + '.join(map(str, registers))} ="
      f" {sum(registers)} registers per thread but"
      f" {len(registers)} x {launch_registers} = {available} were launched"
      " with: the kernel would hang; ask for fewer"
    )


class Schedule(NamedTuple):
  """Sizes that follow from the shapes.

  Attributes:
    consumers: Consumer warpgroups: one if there are at most 64 tokens.
    rows: Rows of x in a CTA tile: 64 · consumers, or fewer, of one consumer.
    row_tiles: Of a cluster's height.
    column_tiles: Of tile_n neurons.
    steps: Of tile_k columns.
    clusters: Launched, each of config.cluster CTAs.
    skew: In steps; config.skew, if a tile has as many.
  """

  consumers: int
  rows: int
  row_tiles: int
  column_tiles: int
  steps: int
  clusters: int
  skew: int


def make_schedule(
  x: Array, gate: Array, config: GatePackConfig, sm_count: int
) -> Schedule:
  """Checks what gate_pack is given, and cuts it.

  Raises:
    ValueError: See gate_pack.
  """
  for name, array in (("x", x), ("gate", gate)):
    if array.ndim != 2 or array.dtype != jnp.bfloat16 or 0 in array.shape:
      raise ValueError(
        f"{name} is {array.dtype}{list(array.shape)} but must be bfloat16 with"
        " two axes, neither empty: reshape or cast it"
      )
  tokens, d_model = x.shape
  neurons = gate.shape[0]
  if gate.shape[1] != d_model:
    raise ValueError(
      f"x has {d_model} columns but gate {gate.shape[1]}: neurons are rows"
    )
  if tokens != config.padded_rows(tokens):
    raise ValueError(
      f"x has {tokens} rows: pad to config.padded_rows, here"
      f" {config.padded_rows(tokens)}"
    )
  if neurons % config.tile_n:
    raise ValueError(
      f"gate has {neurons} rows: pad to a multiple of tile_n={config.tile_n}"
    )
  if d_model % config.tile_k:
    raise ValueError(
      f"x has {d_model} columns: pad to a multiple of tile_k={config.tile_k}"
    )
  if sm_count < config.cluster:
    raise ValueError(f"{sm_count=} is below cluster={config.cluster}")
  consumers = 1 if tokens <= CONSUMER_ROWS else CONSUMERS
  rows = min(tokens, CONSUMER_ROWS * consumers)
  row_tiles = tokens // (rows * config.cluster)
  column_tiles = neurons // config.tile_n
  steps = d_model // config.tile_k
  return Schedule(
    consumers=consumers,
    rows=rows,
    row_tiles=row_tiles,
    column_tiles=column_tiles,
    steps=steps,
    clusters=min(sm_count // config.cluster, row_tiles * column_tiles),
    skew=min(config.skew, steps - 1) if consumers > 1 else 0,
  )


# The model behind default_config, of a multiprocessor: multiply-adds of dense
# bfloat16 in a clock; bytes from L2 in a clock, when all of them load; clocks
# to fill the pipeline and pack the last tile.
_MULTIPLY_ADDS_PER_CLOCK = 4096 // 2
_L2_BYTES_PER_CLOCK = 32
_CLOCKS_PER_WAVE = 3000


def default_config(
  m: int,
  n: int,
  k: int,
  *,
  sm_count: int = 132,
  tile_width: int | None = None,
  slots: int | None = None,
) -> GatePackConfig:
  """The config for a shape, chosen by a model of the time; tune for the best.

  The time is the number of waves of tiles times the longer of multiplying and
  loading a tile. Thousands of tokens get the tile with the highest reuse, 128 x
  256 in clusters of two. A few get narrow tiles, so that as many CTAs as
  possible share the reading of gate; those have 16 slots for 64 neurons, not 8,
  because a narrow tile overflows sooner and the words of a few tokens are
  small (at 300 of 5632 active, a tile of 64 exceeds 8 in 1 of 100 cases and 16
  in less than 1 of a million).

  Args:
    m: Tokens, before padding.
    n: Neurons, before padding.
    k: Columns of x and gate.
    sm_count: Multiprocessors of the device.
    tile_width: Of a TwELL tile, if it is given; the CTA tile's otherwise.
    slots: Of a TwELL tile, if given.

  Raises:
    ValueError: A size below 1, or no legal config has the tile and slots.
  """
  sizes = {"m": m, "n": n, "k": k, "sm_count": sm_count}
  for name, size in (
    sizes | {"tile_width": tile_width, "slots": slots}
  ).items():
    if size is not None and size < 1:
      raise ValueError(f"{name}={size} must be at least 1")
  legal = []
  refused = ValueError(f"{tile_width=} must be at most 256")
  for tile_n in range(tile_width or 64, 257, tile_width or 64):
    # Each CTA of a cluster has rows of its own.
    for cluster in (1, 2) if m > GatePackConfig.tile_m else (1,):
      if cluster > sm_count or (tile_width is None and tile_n == 192):
        continue
      width = tile_width or tile_n
      try:
        config = _with_most_stages(
          tile_n=tile_n,
          tile_width=width,
          slots=slots or min(width, max(16, width // 8)),
          cluster=cluster,
        )
      except ValueError as error:
        refused = error
      else:
        legal.append(config)
  if not legal:
    raise refused

  def clocks(config: GatePackConfig) -> float:
    rows = min(-(-m // 8) * 8, config.tile_m)
    row_tiles = -(-m // (config.tile_m * config.cluster))
    tiles = row_tiles * -(-n // config.tile_n)
    waves = -(-tiles // (sm_count // config.cluster))
    multiply = config.tile_m * config.tile_n / _MULTIPLY_ADDS_PER_CLOCK
    load = 2 * (rows + config.tile_n / config.cluster) / _L2_BYTES_PER_CLOCK
    return waves * (k * max(multiply, load) + _CLOCKS_PER_WAVE)

  # Of equals the first: narrower, without a cluster.
  return min(legal, key=clocks)


def _with_most_stages(**sizes: int) -> GatePackConfig:
  # A step of a narrow tile is small and soon computed: more of them.
  for stages in (8, 6, 5, 4, 3):
    try:
      return GatePackConfig(stages=stages, **sizes)
    except ValueError:
      continue
  return GatePackConfig(stages=2, skew=1, **sizes)


def epilogue_instructions(config: GatePackConfig, active_share: float) -> float:
  """Instructions that a thread issues to pack a CTA tile, on average.

  Counted are the instructions of the lane program as emitted for the device:
  those outside of loops, and for each loop its trips. A warp makes as many
  trips as its busiest lane has active columns, of 32; the mean of that maximum
  is taken for independent neurons which are all active with the same
  probability, and no slots overflowing. Not counted are the instructions of the
  kernel around it: barriers, and a thread that issues two TMA stores.

  A warpgroup has one warp on each of a multiprocessor's four schedulers, so two
  consumers take 2 · epilogue_instructions issue slots, against the tensor
  cores' tile_m · tile_n · k / 2048 clocks for the tile.

  Args:
    config: The kernel's.
    active_share: Of the neurons, on average over tokens, 0..1.
  """
  count = count_pack_instructions(config)
  trips = mean_of_maximum(active_share, bits=32, lanes=WARP)
  return count.straight + sum(
    loop.check * (trips + 1) + loop.trip * trips for loop in count.loops
  )


def count_pack_instructions(
  config: GatePackConfig,
) -> lanes_mlir.InstructionCount:
  """Instructions of the lane program, as emitted for the device."""
  shape = config.pack_shape
  return lanes_mlir.count_instructions(
    lambda lanes: pack_program.pack(lanes, shape),
    columns=shape.columns,
    buffers=tuple(shape.buffer_bytes),
  )


def mean_of_maximum(probability: float, *, bits: int, lanes: int) -> float:
  """The mean of the largest of several binomial counts of a few bits."""
  below, at_most, mean = 0.0, 0.0, 0.0
  for count in range(bits + 1):
    at_most += (
      math.comb(bits, count)
      * probability**count
      * (1 - probability) ** (bits - count)
    )
    mean += count * (at_most**lanes - below**lanes)
    below = at_most
  return mean
