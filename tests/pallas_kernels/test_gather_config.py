"""What the gathered kernels are configured with, by shape."""

import pytest

from pallas_kernels import gather_config, rows, work_list
from pallas_kernels.gather_config import GatherConfig

WIDTH = 128


def default(m, k=2048, matrices=2, **options):
  return gather_config.default_config(m, k, WIDTH, matrices=matrices, **options)


@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("k", [256, 2048, 4096, rows.MAX_WIDTH])
@pytest.mark.parametrize("m", [16384, 131072])
def test_prefill_splits_nothing(m, k, matrices):
  config = default(m, k, matrices)
  assert config.segment_length == WIDTH
  assert not work_list.max_parts(m, width=WIDTH, length=config.segment_length)


@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("m", [1, 8, 64])
def test_decode_has_segments_of_a_step(m, matrices):
  config = default(m, matrices=matrices)
  assert config.segment_length == config.rows_per_step


def test_segments_are_a_blocks_share():
  # 512 rows of 32 entries over 132 SMs of 4 blocks: 31.03, in steps of 4.
  assert default(512).segment_length == 32
  assert default(512, active=64).segment_length == 64
  assert default(512, sm_count=66).segment_length == 64
  # Never more than a row may have.
  assert default(512, active=1000).segment_length == WIDTH


@pytest.mark.parametrize("m", [1, 64])
def test_parts_are_less_than_the_rows(m):
  # One row a step here, and parts of float32.
  config = default(m, 4096)
  assert config == GatherConfig(rows_per_step=1, segment_length=4)


def test_fewer_rows_a_step_the_wider_they_are():
  widths = range(256, rows.MAX_WIDTH + 1, 256)
  for matrices in (1, 2):
    chosen = [default(1, k, matrices).rows_per_step for k in widths]
    assert chosen[0] == 8
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 1


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"m": 0}, "m=0 must be at least 1"),
    ({"m": 1, "sm_count": 0}, "sm_count=0 must be at least 1"),
    ({"m": 1, "matrices": 3}, r"matrices=3 must be 1 \(down\) or 2"),
    ({"m": 1, "k": 2000}, "rows are 2000 wide but must be a multiple of 256"),
    ({"m": 1, "k": 8448}, "up to 8192"),
  ],
)
def test_default_refuses(arguments, message):
  with pytest.raises(ValueError, match=message):
    default(**arguments)


@pytest.mark.parametrize(
  ("rows_per_step", "segment_length", "message"),
  [
    (3, 4, "rows_per_step=3 must be one of"),
    (16, 4, "rows_per_step=16 must be one of"),
    (4, 0, "segment_length=0 must be at least 1"),
  ],
)
def test_config_refuses(rows_per_step, segment_length, message):
  with pytest.raises(ValueError, match=message):
    GatherConfig(rows_per_step=rows_per_step, segment_length=segment_length)
