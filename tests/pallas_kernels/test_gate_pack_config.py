"""What gate_pack's config refuses, and what it chooses."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels import gate_pack_config
from pallas_kernels.gate_pack_config import (
  GatePackConfig,
  check_redistribution,
  default_config,
  epilogue_instructions,
)
from pallas_kernels.target import SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
  ("tile_width", "slots"),
  [(256, 32), (128, 16), (64, 8), (64, 16), (64, 64), (192, 24)],
)
@pytest.mark.parametrize("tiles", [1, 2])
def test_twell_tiles_are_free_of_the_cta_tile(tile_width, slots, tiles):
  if tiles * tile_width <= 256:
    config = GatePackConfig(
      tile_n=tiles * tile_width, tile_width=tile_width, slots=slots
    )
    assert config.pack_shape.tiles == tiles
    assert config.tile_m == 128


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"tile_width": 32}, "tile_width=32 must be 64, 128, 192 or 256"),
    ({"tile_width": 512}, "tile_width=512 must be 64, 128, 192 or 256"),
    ({"tile_n": 128}, "tile_n=128 must be a multiple of tile_width=256"),
    ({"tile_n": 512}, "tile_n=512 must be .* at most 256"),
    ({"slots": 0}, "slots=0 must be a multiple of 8 and at most"),
    ({"slots": 12}, "slots=12 must be a multiple of 8"),
    ({"slots": 264}, "slots=264 must be .* at most tile_width=256"),
    ({"tile_k": 32}, "tile_k=32 must be 64 or 128"),
    ({"stages": 1}, r"stages=1 must be in 2\.\.16"),
    ({"cluster": 3}, r"cluster=3 must be in 1\.\.2"),
    ({"skew": 4}, r"skew=4 must be in 0\.\.3, below stages"),
    ({"skew": -1}, r"skew=-1 must be in 0\.\.3"),
    ({"snake_width": 0}, r"snake_width=0 must be in 1\.\."),
    ({"stages": 5}, "bytes of shared memory exceed the 232448 of a block"),
    ({"slots": 128}, "bytes of shared memory exceed the 232448 of a block"),
    ({"consumer_registers": 240}, r"40 \+ 240 \+ 240 = 520 .* would hang"),
    ({"consumer_registers": 236}, "236 registers per thread must be a multip"),
    ({"producer_registers": 16}, r"16 registers .* in 24\.\.256"),
  ],
)
def test_illegal_config(values, message):
  with pytest.raises(ValueError, match=message):
    GatePackConfig(**values)


def test_config_is_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    GatePackConfig().stages = 2  # type: ignore[misc]  # what is tested


def test_registers_that_fit_exactly():
  check_redistribution((40, 232, 232), launch_registers=168)
  with pytest.raises(ValueError, match="3 x 160 = 480 were launched with"):
    check_redistribution((40, 232, 232), launch_registers=160)


@pytest.mark.parametrize(
  ("cluster", "rows", "padded"),
  [
    (1, 1, 8), (1, 8, 8), (1, 9, 16), (1, 64, 64), (1, 65, 128),
    (1, 128, 128), (1, 129, 256), (2, 1, 256), (2, 256, 256), (2, 257, 512),
  ],
)  # fmt: skip
def test_padded_rows(cluster, rows, padded):
  assert GatePackConfig(cluster=cluster).padded_rows(rows) == padded


# (m, k, n), then tile_n, tile_width, slots, cluster.
CHOSEN = [
  ((16384, 2048, 5632), (256, 256, 32, 2)),
  ((131072, 2048, 5632), (256, 256, 32, 2)),
  ((16384, 4096, 14336), (256, 256, 32, 2)),
  ((512, 576, 1536), (64, 64, 16, 2)),
  ((128, 2048, 5632), (64, 64, 16, 1)),
  ((64, 2048, 5632), (64, 64, 16, 1)),
  ((1, 2048, 5632), (64, 64, 16, 1)),
]


@pytest.mark.parametrize(("shape", "chosen"), CHOSEN)
def test_default_config(shape, chosen):
  m, k, n = shape
  config = default_config(m, n, k)
  found = (config.tile_n, config.tile_width, config.slots, config.cluster)
  assert found == chosen
  assert config.shared_memory_bytes <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize("n", [64, 512, 5632])
@pytest.mark.parametrize("m", [1, 16, 128])
def test_default_config_of_few_rows_is_no_cluster(m, n):
  """Whose second CTA would have rows of padding only."""
  config = default_config(m, n, 256)
  assert config.cluster == 1
  assert config.padded_rows(m) - m < max(8, 128 * (m > 64))


@pytest.mark.parametrize("m", [1, 100, 1000, 10000])
@pytest.mark.parametrize("sm_count", [1, 78, 132])
@pytest.mark.parametrize(
  ("tile_width", "slots"), [(64, 8), (64, 64), (128, 16), (192, 32), (256, 64)]
)
def test_default_config_with_given_tiles(m, sm_count, tile_width, slots):
  config = default_config(
    m, 3000, 1000, sm_count=sm_count, tile_width=tile_width, slots=slots
  )
  assert (config.tile_width, config.slots) == (tile_width, slots)
  assert config.tile_n % tile_width == 0
  assert config.cluster <= sm_count


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"m": 0}, "m=0 must be at least 1"),
    ({"n": 0}, "n=0 must be at least 1"),
    ({"sm_count": 0}, "sm_count=0 must be at least 1"),
    ({"tile_width": 0}, "tile_width=0 must be at least 1"),
    ({"slots": -8}, "slots=-8 must be at least 1"),
    ({"tile_width": 320}, "tile_width=320 must be at most 256"),
    ({"tile_width": 100}, "tile_width=100 must be 64, 128, 192 or 256"),
    ({"slots": 20}, "slots=20 must be a multiple of 8"),
    ({"tile_width": 256, "slots": 256}, "fewer than stages=2"),
  ],
)
def test_default_config_of_nothing_legal(arguments, message):
  with pytest.raises(ValueError, match=message):
    default_config(**({"m": 16384, "n": 5632, "k": 2048} | arguments))


@pytest.mark.parametrize(
  "config",
  [
    GatePackConfig(),
    GatePackConfig(tile_width=128, slots=16),
    GatePackConfig(tile_width=64, slots=8),
    GatePackConfig(tile_n=64, tile_width=64, slots=16),
  ],
)
def test_packing_is_cheap(config):
  """At most 6 % of the tensor cores' clocks, at 30 of 5632 active."""
  clocks = config.tile_m * config.tile_n * 2048 / 2048
  issue_slots = 2 * epilogue_instructions(config, 30 / 5632)
  assert issue_slots <= 0.06 * clocks


def test_packing_costs_more_where_more_is_active():
  config = GatePackConfig()
  costs = [
    epilogue_instructions(config, active / 5632)
    for active in (0, 30, 300, 5632)
  ]
  assert costs == sorted(costs)
  # Four loops; each trip of each loop, and its check, more.
  program = gate_pack_config.count_pack_instructions(config)
  (loop,) = set(program.loops)
  assert costs[0] == program.straight + 4 * loop.check
  assert costs[-1] == costs[0] + 4 * 32 * (loop.check + loop.trip)


@pytest.mark.parametrize("probability", [0.005, 0.05, 0.5])
def test_trips_of_the_busiest_lane(probability):
  rng = np.random.default_rng(0)
  counts = rng.binomial(32, probability, (20000, 32))
  mean = gate_pack_config.mean_of_maximum(probability, bits=32, lanes=32)
  np.testing.assert_allclose(mean, counts.max(axis=1).mean(), rtol=0.02)
