"""relu(x · gateᵀ) packed as TwELL: a matmul whose epilogue writes the words.

    x [M, K], gate [N, K]  ─►  words [M, N / tile_width · slots],
                               counts [N / tile_width, M]

The dense product never exists in memory: at 30 of 5632 active, 16384 tokens, it
would be 185 MB; the words are 46 MB and the counts 1.4.

What moves where, in a CTA (one per multiprocessor, three warpgroups):

    GMEM          SMEM                       registers            SMEM   GMEM
    x    ─TMA─► ring of `stages` steps ─┐
                [128, tile_k] of x      ├─wgmma─► accumulators ─► words ─TMA─►
    gate ─TMA─► [tile_n, tile_k]       ─┘         [64, tile_n]    counts
       producer                              2 consumers, 64 rows each

Tiles. The output is cut into tiles of 128 tokens x tile_n neurons, a TwELL tile
being a part of that. Each CTA walks the tiles number cta, cta + CTAs, ... in an
order that snakes through stripes of a few column tiles (planar_snake), so that
the CTAs of a moment share rows of x and of gate in L2.

The producer runs ahead of the consumers by up to `stages` steps of tile_k
columns, and does not stop between tiles: while one is packed, the next one's
operands arrive. `full[s]` is completed by the bytes of both copies, `empty[s]`
by both consumers.

A consumer multiplies 64 rows by all tile_n neurons, accumulating in float32 in
registers. It gives a stage back when the wgmma of the next step has been issued
and its own has finished, so that the tensor cores always have one in waiting.
The second consumer starts `skew` steps late: the two then reach their epilogues
one after the other, and the tensor cores have work from one while the other
packs. After the last step the accumulator is packed (pack_program) and two TMA
stores take words and counts away, awaited before the buffers are filled again.

With cluster = 2, two CTAs with different rows of x work on the same neurons:
each loads half of the tile of gate and sends it to both. A stage is then given
back to both producers, `empty` being a cluster barrier, since each of them
writes into the other's.

Registers. A thread at launch has 168. The producer needs few and gives back all
but 40; a consumer with an accumulator of 128 takes 232. The sum must not exceed
what the block was launched with: see check_redistribution.

A few tokens. Up to 64 tokens are one tile row of that many rows (a multiple of
8), and one consumer: no padding is read, and two warpgroups have registers
enough from the start. What counts then is how fast all of gate is read.

Every arrival is awaited: the producer's last act is to wait for the stages in
flight to be given back, so no CTA leaves while its neighbour may still write
into its memory or arrive at its barriers.

Interpret mode runs all of this but the packing, which is a lane program: there
numpy runs it, through a callback.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Int32

from pallas_kernels import lanes_mlir, one_device, pack_program
from pallas_kernels.gate_pack_config import (
  CONSUMER_ROWS,
  GatePackConfig,
  Schedule,
  make_schedule,
)


class PackedGate(NamedTuple):
  """relu(x · gateᵀ) as TwELL.

  Attributes:
    words: For each token and tile, its active columns, ascending: the bfloat16
      value in the high 16 bits, the column's offset inside the tile in the low
      ones. Unused slots are 0.
    counts: True numbers of active columns, also where they exceed the slots.
  """

  words: Int32[Array, "tokens tiles_times_slots"]
  counts: Int32[Array, "tiles tokens"]


def gate_pack(
  x: BFloat16[Array, "tokens d_model"],
  gate: BFloat16[Array, "d_ff d_model"],
  *,
  config: GatePackConfig,
  sm_count: int = 132,
  interpret: plgpu.InterpretGPUParams | None = None,
) -> PackedGate:
  """Multiplies and packs; for d_ff neurons in tiles of config.tile_width.

  A column is active if its z, rounded to bfloat16, is positive or NaN. A NaN is
  stored as the NaN 0x7FFF. Deterministic.

  Args:
    x: Tokens: as many as config.padded_rows of anything.
    gate: Neurons, a multiple of config.tile_n. d_model is one of config.tile_k.
    config: Tile sizes.
    sm_count: CTAs at most, one per multiprocessor.
    interpret: How to interpret the kernel instead of compiling it.

  Raises:
    ValueError: A shape or dtype that is not as above: pad or cast.
  """
  schedule = make_schedule(x, gate, config, sm_count)
  kernel = _build(schedule, config, interpret)
  if interpret is not None:
    return PackedGate(*one_device.interpret_kernel(kernel, x, gate))
  return PackedGate(*kernel(x, gate))


def _build(
  schedule: Schedule,
  config: GatePackConfig,
  interpret: plgpu.InterpretGPUParams | None,
) -> Callable[[Array, Array], tuple[Array, Array]]:
  """The kernel, a function of x and gate."""
  shape = config.pack_shape
  consumers, stages = schedule.consumers, config.stages
  tokens = schedule.row_tiles * config.cluster * schedule.rows
  tiles = schedule.column_tiles * shape.tiles
  empty: Any = plgpu.Barrier
  cluster: dict[str, Any] = {}
  if config.cluster > 1:
    empty = functools.partial(
      plgpu.ClusterBarrier, collective_axes=("cluster",)
    )
    cluster = {"cluster": (config.cluster,), "cluster_names": ("cluster",)}

  def of_consumers(*shape):
    return plgpu.SMEM((consumers, *shape), jnp.int32)

  return plgpu.kernel(
    functools.partial(
      _kernel, config=config, schedule=schedule, interpret=interpret
    ),
    out_type=(
      jax.ShapeDtypeStruct((tokens, tiles * config.slots), jnp.int32),
      jax.ShapeDtypeStruct((tiles, tokens), jnp.int32),
    ),
    scratch_types={
      "x_smem": plgpu.SMEM(
        (stages, consumers * CONSUMER_ROWS, config.tile_k), jnp.bfloat16
      ),
      "gate_smem": plgpu.SMEM(
        (stages, config.tile_n, config.tile_k), jnp.bfloat16
      ),
      "words_smem": of_consumers(CONSUMER_ROWS, shape.row_slots),
      "counts_smem": of_consumers(shape.tiles, CONSUMER_ROWS),
      "stage_smem": of_consumers(pack_program.STAGE_BYTES // 4),
      "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      "empty": empty(num_arrivals=consumers, num_barriers=stages),
      "skewed": plgpu.Barrier(),
    },
    grid=(schedule.clusters,),
    grid_names=("cta",),
    num_threads=consumers + 1,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    interpret=interpret,
    kernel_name="gate_pack",
    **cluster,
  )


def _kernel(
  x_gmem: Any,
  gate_gmem: Any,
  words_gmem: Any,
  counts_gmem: Any,
  *,
  x_smem: Any,
  gate_smem: Any,
  words_smem: Any,
  counts_smem: Any,
  stage_smem: Any,
  full: Any,
  empty: Any,
  skewed: Any,
  config: GatePackConfig,
  schedule: Schedule,
  interpret: plgpu.InterpretGPUParams | None,
) -> None:
  warpgroup = lax.axis_index("warpgroup")
  cta = lax.axis_index("cta")
  in_cluster = lax.axis_index("cluster") if config.cluster > 1 else 0
  steps, stages = schedule.steps, config.stages
  all_tiles = schedule.row_tiles * schedule.column_tiles
  # At least 1: there are no more clusters than tiles.
  tiles = (all_tiles - cta + schedule.clusters - 1) // schedule.clusters

  def tile_index(tile):
    """The row of CTA tiles and the column of the CTA's tile of that number."""
    row, column = plgpu.planar_snake(
      cta + tile * schedule.clusters,
      (schedule.row_tiles, schedule.column_tiles),
      1,
      config.snake_width,
    )
    return row * config.cluster + in_cluster, column

  def produce():
    if schedule.consumers > 1:
      plgpu.set_max_registers(config.producer_registers, action="decrease")

    @functools.partial(_for, tiles)
    def _tile(tile):
      row, column = tile_index(tile)
      rows = pl.ds(row * schedule.rows, schedule.rows)
      neurons = pl.ds(column * config.tile_n, config.tile_n)

      @functools.partial(_for, steps)
      def _step(step):
        number = tile * steps + step
        slot = lax.rem(number, stages)

        @pl.when(number >= stages)
        def _wait():
          plgpu.barrier_wait(empty.at[slot])

        depth = pl.ds(step * config.tile_k, config.tile_k)
        plgpu.copy_gmem_to_smem(
          x_gmem.at[rows, depth],
          x_smem.at[slot, pl.ds(0, schedule.rows)],
          full.at[slot],
        )
        plgpu.copy_gmem_to_smem(
          gate_gmem.at[neurons, depth],
          gate_smem.at[slot],
          full.at[slot],
          collective_axes="cluster" if config.cluster > 1 else None,
        )

    # The stages that nobody waited for yet.
    in_flight = jnp.minimum(tiles * steps, stages)

    @functools.partial(_for, in_flight)
    def _drain(i):
      number = tiles * steps - in_flight + i
      plgpu.barrier_wait(empty.at[lax.rem(number, stages)])

  def consume():
    if schedule.consumers > 1:
      plgpu.set_max_registers(config.consumer_registers, action="increase")
    first_row = warpgroup * CONSUMER_ROWS
    consumer_rows = min(schedule.rows, CONSUMER_ROWS)
    words, counts = words_smem.at[warpgroup], counts_smem.at[warpgroup]

    @functools.partial(_for, tiles)
    def _tile(tile):
      if schedule.skew:

        @pl.when((tile == 0) & (warpgroup == 1))
        def _start_late():
          plgpu.barrier_wait(skewed)

      @functools.partial(
        pl.run_scoped,
        accumulator=plgpu.ACC((CONSUMER_ROWS, config.tile_n), jnp.float32),
      )
      def z(accumulator):
        @functools.partial(_for, steps)
        def _step(step):
          number = tile * steps + step
          slot = lax.rem(number, stages)
          if schedule.skew:

            @pl.when((number == schedule.skew) & (warpgroup == 0))
            def _start_the_other():
              plgpu.barrier_arrive(skewed)

          plgpu.barrier_wait(full.at[slot])
          plgpu.wgmma(
            accumulator,
            x_smem.at[slot, pl.ds(first_row, CONSUMER_ROWS)],
            gate_smem.at[slot].transpose((1, 0)),
          )
          plgpu.wgmma_wait(1)

          @pl.when(step > 0)
          def _give_back():
            plgpu.barrier_arrive(empty.at[lax.rem(number - 1, stages)])

        return accumulator[...]

      last = lax.rem((tile + 1) * steps - 1, stages)
      plgpu.barrier_arrive(empty.at[last])
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      _pack(z, words, counts, stage_smem.at[warpgroup], config, interpret)
      plgpu.commit_smem()
      row, column = tile_index(tile)
      rows = pl.ds(row * schedule.rows + first_row, consumer_rows)
      shape = config.pack_shape
      plgpu.copy_smem_to_gmem(
        words.at[pl.ds(0, consumer_rows)],
        words_gmem.at[rows, pl.ds(column * shape.row_slots, shape.row_slots)],
      )
      # One copy for each tile: of fewer rows than 64, those of several tiles do
      # not follow one another in shared memory.
      for part in range(shape.tiles):
        plgpu.copy_smem_to_gmem(
          counts.at[part, pl.ds(0, consumer_rows)],
          counts_gmem.at[column * shape.tiles + part, rows],
        )

    plgpu.wait_smem_to_gmem(0)

  is_producer = warpgroup == schedule.consumers
  pl.when(is_producer)(produce)
  pl.when(~is_producer)(consume)


def _for(trips: int | Array, body: Callable[[Array], None]) -> None:
  """Runs body(i) for i in range(trips)."""

  def step(i, _):
    body(i)
    return ()

  lax.fori_loop(0, trips, step, ())


def _pack(
  z: Array,
  words: Any,
  counts: Any,
  stage: Any,
  config: GatePackConfig,
  interpret: plgpu.InterpretGPUParams | None,
) -> None:
  """Runs the lane program: on the device's lanes, or in numpy."""
  shape = config.pack_shape
  if interpret is not None:
    words[...], counts[...] = jax.pure_callback(
      lambda z: tuple(pack_program.pack_in_numpy(z, shape)),
      tuple(
        jax.ShapeDtypeStruct(buffer.shape, jnp.int32)
        for buffer in (words, counts)
      ),
      z,
    )
    return

  reference = plgpu.RefType()

  @plgpu.inline_mgpu(
    arg_types=(plgpu.Layout.WGMMA, reference, reference, reference)
  )
  def emit(ctx, z, words, counts, stage):
    del ctx
    buffers = {"words": words, "counts": counts, "stage": stage}
    lanes = lanes_mlir.MlirLanes(
      lanes_mlir.accumulator_registers(z),
      {name: lanes_mlir.address(memory) for name, memory in buffers.items()},
    )
    pack_program.pack(lanes, shape)

  emit(z, words, counts, stage)
