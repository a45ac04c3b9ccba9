"""gate_pack: interpreted against numpy, lowered, and compiled for an H200."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.gate_pack import PackedGate, gate_pack
from pallas_kernels.gate_pack_config import (
  GatePackConfig,
  check_redistribution,
  count_pack_instructions,
  default_config,
)
from pallas_kernels.target import SHARED_MEMORY_BYTES
from tests.helpers import kernels
from tests.helpers.packing import Words, pack_words

NARROW = {"tile_n": 64, "tile_width": 64, "slots": 8}


def interpreted(x, gate, config, sm_count=132):
  """The packed gate as numpy arrays; asserts that there are no races."""
  run = functools.partial(
    gate_pack,
    config=config,
    sm_count=sm_count,
    interpret=kernels.interpret_params(),
  )
  with kernels.no_races():
    packed = run(jnp.asarray(x, jnp.bfloat16), jnp.asarray(gate, jnp.bfloat16))
    return Words(*map(np.asarray, packed))


def expected(z, config):
  return pack_words(
    z.astype(np.float32), tile_width=config.tile_width, slots=config.slots
  )


def assert_same(found, wanted):
  np.testing.assert_array_equal(found.counts, wanted.counts)
  np.testing.assert_array_equal(found.words, wanted.words)


class Case(NamedTuple):
  """Sizes; m, n in tiles or so, k in steps."""

  m: int
  n: int
  k: int
  config: GatePackConfig
  sm_count: int = 132


CASES = {
  "more steps than stages": Case(
    128, 64, 448, GatePackConfig(**NARROW, stages=3)
  ),
  "fewer steps than stages, tiles than CTAs": Case(
    128, 128, 64, GatePackConfig(**NARROW, stages=4)
  ),
  "several tiles for each CTA": Case(
    256, 192, 192, GatePackConfig(**NARROW, stages=4, snake_width=2), 2
  ),
  "one CTA, steps fewer than the skew": Case(
    128, 128, 64, GatePackConfig(**NARROW, stages=4, skew=3), 1
  ),
  "no skew": Case(128, 64, 256, GatePackConfig(**NARROW, stages=2, skew=0)),
  "wide steps": Case(
    128, 64, 384, GatePackConfig(**NARROW, tile_k=128, stages=2, skew=1)
  ),
  "256 / 32": Case(128, 256, 320, GatePackConfig()),
  "128 / 16": Case(
    128, 256, 128, GatePackConfig(tile_width=128, slots=16)
  ),
  "64 / 8": Case(128, 256, 128, GatePackConfig(tile_width=64, slots=8)),
  "64 / 64": Case(
    128, 128, 128, GatePackConfig(tile_n=128, tile_width=64, slots=64)
  ),
  "192 / 24": Case(
    128, 192, 128, GatePackConfig(tile_n=192, tile_width=192, slots=24)
  ),
  "8 tokens": Case(8, 128, 320, GatePackConfig(**NARROW, stages=3), 1),
  "64 tokens": Case(64, 64, 192, GatePackConfig(**NARROW, stages=2, skew=1)),
  "a cluster of two, more steps than stages": Case(
    256, 128, 320, GatePackConfig(**NARROW, stages=3, cluster=2), 4
  ),
  "a cluster of two, several tiles": Case(
    512, 128, 128, GatePackConfig(**NARROW, stages=4, cluster=2), 3
  ),
}  # fmt: skip


def integer_operands(case, seed=0):
  """Small integers, so that sums are exact; from sparse to dense rows."""
  rng = np.random.default_rng(seed)
  x = rng.integers(-2, 3, (case.m, case.k))
  gate = rng.integers(-2, 3, (case.n, case.k))
  # One column moves each token's z: some tokens are silent, some all active.
  x[:, 0] = rng.integers(-4, 8, case.m) * 4
  x[1, 0], x[2, 0] = 1024, -1024
  gate[:, 0] = -4
  return x, gate


@pytest.mark.parametrize("name", CASES)
def test_exact_sums(name):
  case = CASES[name]
  x, gate = integer_operands(case)
  wanted = expected(x @ gate.T, case.config)
  width, slots = case.config.tile_width, case.config.slots
  assert {0, width} <= set(wanted.counts.flat)
  assert slots == width or (wanted.counts > slots).any()
  assert_same(interpreted(x, gate, case.config, case.sm_count), wanted)


def test_counts_around_the_slots():
  """0, 1, S, S + 1 and all neurons of a tile, each in every tile."""
  config = GatePackConfig(tile_n=128, tile_width=64, slots=16)
  rng = np.random.default_rng(1)
  z = -rng.integers(1, 9, (128, 128))
  for token in range(128):
    for tile in range(2):
      count = [0, 1, 16, 17, 64][(token // (1 + 4 * tile)) % 5]
      z[token, rng.permutation(64)[:count] + 64 * tile] *= -1
  wanted = expected(z, config)
  assert {0, 1, 16, 17, 64} == set(wanted.counts[0]) == set(wanted.counts[1])
  # The identity selects z's columns; what follows it multiplies zeros.
  x = np.concatenate([z, rng.integers(-9, 9, (128, 64))], axis=1)
  gate = np.concatenate([np.eye(128), np.zeros((128, 64))], axis=1)
  assert_same(interpreted(x, gate, config), wanted)


# The interpreter multiplies with numpy, which remarks on what is not finite.
@pytest.mark.filterwarnings(
  "ignore:(overflow|invalid value) encountered in matmul:RuntimeWarning"
)
def test_not_finite():
  """A NaN in x makes all of its token's neurons active, infinities do not."""
  config = GatePackConfig(**NARROW)
  x = np.zeros((128, 64), np.float32)
  x[3, 7] = np.nan
  x[5, 0] = np.inf
  x[6, 0] = -np.inf
  x[7, 1] = 3e38  # and 3 times that is infinite
  gate = np.ones((64, 64), np.float32)
  gate[::2, 0] = -1
  gate[:, 1] = 3
  x[8] = -0.0
  with np.errstate(invalid="ignore", over="ignore"):
    z = (x @ gate.T).astype(np.float32)
  wanted = expected(z, config)
  assert wanted.counts[0, [3, 5, 6, 7, 8, 9]].tolist() == [64, 32, 32, 64, 0, 0]
  assert_same(interpreted(x, gate, config), wanted)


def test_rounded_sums():
  """Any order of summation: active where z is surely so, not where not."""
  config = GatePackConfig(tile_n=128, tile_width=128, slots=128)
  rng = np.random.default_rng(2)
  x, gate = (
    np.asarray(jnp.asarray(rng.normal(size=(128, 256)), jnp.bfloat16), float)
    for _ in range(2)
  )
  z = x @ gate.T
  error = 256 * 2.0**-24 * (np.abs(x) @ np.abs(gate).T)
  found = interpreted(x, gate, config)
  words = found.words.view(np.uint32)
  used = np.arange(128) < found.counts.T
  assert (words[~used] == 0).all()
  assert (used.sum(axis=1) > 0).all()
  tokens = np.nonzero(used)[0]
  columns, values = words[used] & 0xFFFF, words[used] & 0xFFFF0000
  is_active = np.zeros((128, 128), bool)
  is_active[tokens, columns] = True
  assert is_active.sum() == used.sum()
  assert is_active[z > error].all()
  assert not is_active[z < -error].any()
  ascends = np.diff(columns.astype(int)) > 0
  assert ascends[np.diff(tokens) == 0].all()
  exact = z[tokens, columns]
  wrong = np.abs(values.view(np.float32) - exact)
  assert (wrong <= error[tokens, columns] * 1.01 + np.abs(exact) / 256).all()


def test_same_twice():
  case = CASES["8 tokens"]
  x, gate = integer_operands(case, seed=3)
  first, second = (
    interpreted(x, gate, case.config, case.sm_count) for _ in range(2)
  )
  assert_same(first, second)


@pytest.mark.parametrize("cluster", [1, 2])
def test_on_a_mesh_of_four_devices(cluster):
  config = GatePackConfig(**NARROW, stages=2, skew=1, cluster=cluster)
  case = Case(512, 128, 128, config)
  x, gate = integer_operands(case, seed=4)
  mesh = jax.make_mesh(
    (2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
  )
  run = jax.shard_map(
    functools.partial(
      gate_pack,
      config=config,
      sm_count=2,
      interpret=kernels.interpret_params(),
    ),
    mesh=mesh,
    in_specs=(PartitionSpec("data"), PartitionSpec("tensor")),
    out_specs=PackedGate._make(
      (PartitionSpec("data", "tensor"), PartitionSpec("tensor", "data"))
    ),
  )
  with kernels.no_races():
    packed = jax.jit(run)(
      jnp.asarray(x, jnp.bfloat16), jnp.asarray(gate, jnp.bfloat16)
    )
    found = Words(*map(np.asarray, packed))
  assert_same(found, expected(x @ gate.T, config))


@pytest.mark.parametrize(
  ("x", "gate", "message"),
  [
    ((128, 64), (64, 128), "x has 64 columns but gate 128"),
    ((65, 64), (64, 64), "x has 65 rows: pad to config.padded_rows, here 128"),
    ((12, 64), (64, 64), "x has 12 rows: pad to config.padded_rows, here 16"),
    ((128, 64), (96, 64), "gate has 96 rows: pad to a multiple of tile_n=64"),
    ((128, 96), (64, 96), "x has 96 columns: pad to a multiple of tile_k=64"),
    (
      (0, 64),
      (64, 64),
      r"x is bfloat16\[0, 64\] but must be bfloat16 with two",
    ),
    ((128, 64), (64,), r"gate is bfloat16\[64\] but must be"),
  ],
)
def test_shapes_that_are_not_whole_tiles(x, gate, message):
  x, gate = (jnp.zeros(shape, jnp.bfloat16) for shape in (x, gate))
  with pytest.raises(ValueError, match=message):
    gate_pack(x, gate, config=GatePackConfig(**NARROW))


def test_other_arguments_that_are_refused():
  x, gate = jnp.zeros((256, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.float32)
  with pytest.raises(ValueError, match="gate is float32"):
    gate_pack(x, gate, config=GatePackConfig(**NARROW))
  with pytest.raises(ValueError, match="sm_count=1 is below cluster=2"):
    gate_pack(
      x,
      jnp.zeros((64, 64), jnp.bfloat16),
      config=GatePackConfig(**NARROW, cluster=2),
      sm_count=1,
    )


def operands(m, n, k, config):
  return (
    jax.ShapeDtypeStruct((config.padded_rows(m), k), jnp.bfloat16),
    jax.ShapeDtypeStruct((n, k), jnp.bfloat16),
  )


@pytest.mark.parametrize("name", CASES)
def test_lowers(name):
  case = CASES[name]
  text = kernels.lower_for_cuda(
    functools.partial(gate_pack, config=case.config),
    *operands(case.m, case.n, case.k, case.config),
  )
  assert "mosaic_gpu" in text


# (m, k, n)
SHAPES = [
  (16384, 2048, 5632),
  (131072, 2048, 5632),
  (16384, 4096, 14336),
  (512, 576, 1536),
  (1, 2048, 5632),
  (64, 2048, 5632),
  (128, 2048, 5632),
]
VARIANTS = [
  *((shape, default_config(*shape[::2], shape[1])) for shape in SHAPES),
  ((16384, 2048, 5632), GatePackConfig()),
  ((16384, 2048, 5632), GatePackConfig(tile_width=128, slots=16)),
  ((16384, 2048, 5632), GatePackConfig(tile_width=64, slots=8)),
  ((16384, 2048, 5632), GatePackConfig(tile_k=128, stages=2, skew=1)),
  # A few tokens in tiles of several TwELL tiles.
  ((1, 2048, 5632), GatePackConfig(tile_n=128, tile_width=64, slots=8)),
  ((24, 2048, 5760), GatePackConfig(tile_n=192, tile_width=64, slots=8)),
  ((1, 4096, 14336), default_config(1, 14336, 4096, tile_width=64, slots=8)),
]


@pytest.mark.parametrize(
  ("shape", "config"),
  VARIANTS,
  ids=lambda value: (
    "x".join(map(str, value))
    if isinstance(value, tuple)
    else f"{value.tile_n}-{value.tile_width}-{value.slots}-{value.tile_k}"
  ),
)
def test_compiles(shape, config):
  m, k, n = shape
  compiled = kernels.compile_for_h200(
    functools.partial(gate_pack, config=config), *operands(m, n, k, config)
  )
  (kernel,) = compiled.kernels
  assert kernel.name.startswith("gate_pack")
  assert kernel.spill_bytes == kernel.stack_bytes == 0
  # C7519 is an arrive that ptxas adds; that wgmmas are serialised would be
  # another remark.
  assert all("C7519" in note for note in kernel.notes)
  assert "cp.async.bulk.tensor" in kernel.ptx
  assert ("multicast" in kernel.ptx) == (config.cluster == 2)
  blocks = config.tile_n // 64
  for instruction, times in (
    ("wgmma.mma_async", config.tile_k // 16),
    ("cvt.rn.bf16x2.f32", 32 // 2 * blocks),
    ("min.relu.s16x2", 32 // 2 * blocks),
    ("stmatrix", 4 * blocks),
  ):
    assert kernel.ptx.count(instruction) == times, instruction

  if config.padded_rows(m) <= 64:
    assert kernel.shared_memory_bytes < config.shared_memory_bytes
    assert "setmaxnreg" not in kernel.ptx
    assert 256 * kernel.registers <= 65536
  else:
    # Mosaic adds a byte.
    assert kernel.shared_memory_bytes - config.shared_memory_bytes in range(9)
    assert kernel.shared_memory_bytes <= SHARED_MEMORY_BYTES
    after = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)", kernel.ptx)
    producer, consumer = map(int, after)
    check_redistribution(
      (producer, consumer, consumer), launch_registers=kernel.registers
    )
    assert producer <= kernel.registers <= consumer


def test_as_many_instructions_as_are_counted():
  """The count of the lane program against the machine's assembly."""
  config = GatePackConfig()
  compiled = kernels.compile_for_h200(
    functools.partial(gate_pack, config=config),
    *operands(256, 256, 256, config),
  )
  (kernel,) = compiled.kernels
  lines = [line.strip() for line in kernel.ptx.splitlines()]
  # From the wait for the last words to be read to the next stores' fence.
  start = next(i for i, line in enumerate(lines) if "wait_group.read" in line)
  end = next(
    i for i, line in enumerate(lines) if i > start and "fence.proxy" in line
  )
  is_instruction = re.compile(r"(@!?%p\d+ )?[a-z][\w.:]* .*;$")
  assembly = sum(
    bool(is_instruction.match(line)) and not line.startswith("mov.")
    for line in lines[start:end]
  )
  count = count_pack_instructions(config)
  counted = count.straight + sum(loop.check + loop.trip for loop in count.loops)
  assert abs(assembly - counted) <= 0.15 * counted
