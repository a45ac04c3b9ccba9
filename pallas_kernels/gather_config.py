"""How the gathered kernels and their work lists are cut, and a choice by shape.

Registers decide how many rows a step can load at once: with at most 128 of them
a thread, four blocks share an SM and hide each other's latencies. Parallelism
decides how long a segment may be: all SMs should have work.
"""

import dataclasses
import math

from pallas_kernels import rows, target

# The rows that a step can take: four warps sum the shares of four products.
_ROWS_PER_STEP = (1, 2, 4, 8)
# That many blocks fit an SM where a thread has at most 128 registers.
_BLOCKS_PER_SM = 4
# Of those, registers for sums and rows. Addresses, weights and counters take up
# to 30 more.
_ROW_REGISTERS = 100
# In shorter segments of a split row, the float32 parts that are written and
# read again would be as much traffic as the rows.
_LEAST_SLOTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherConfig:
  """How a gathered kernel and its work list are cut.

  Attributes:
    rows_per_step: Entries whose rows are loaded before the first is used: 1, 2,
      4 or 8.
    segment_length: Slots of a segment at most, for `work_list.segments`.

  Raises:
    ValueError: A field is out of its bounds.
  """

  rows_per_step: int
  segment_length: int

  def __post_init__(self):
    if self.rows_per_step not in _ROWS_PER_STEP:
      raise ValueError(
        f"rows_per_step={self.rows_per_step} must be one of {_ROWS_PER_STEP}"
      )
    if self.segment_length < 1:
      raise ValueError(
        f"segment_length={self.segment_length} must be at least 1 slot"
      )


def default_config(
  m: int,
  k: int,
  width: int,
  *,
  matrices: int,
  active: float | None = None,
  sm_count: int = target.H200.sm_count,
) -> GatherConfig:
  """A config for m rows of up to `width` entries, by shape.

  As many rows a step as 128 registers allow, and segments of
  `segment_length`: the rows of a prefill stay whole, while those of a few
  tokens are cut into segments of a step or a few, which more SMs share.

  Args:
    m: Rows of the result, tokens.
    k: Width of a matrix row, d_model.
    width: Entries that one row has at most, such as the ELL width.
    matrices: Gathered by an entry: 2 for up and down, 1 for down alone.
    active: Entries that a row has on average; a quarter of width by default.
    sm_count: Streaming multiprocessors of the device.

  Raises:
    ValueError: k is not a width that the kernels take, or another argument is
      out of its bounds.
  """
  rows.check_width(k)
  if matrices not in (1, 2):
    raise ValueError(f"{matrices=} must be 1 (down) or 2 (up and down)")
  for name, value in (("m", m), ("width", width), ("sm_count", sm_count)):
    if value < 1:
      raise ValueError(f"{name}={value} must be at least 1")
  fitting = [
    count
    for count in _ROWS_PER_STEP
    if row_registers(k, count, matrices=matrices) <= _ROW_REGISTERS
  ]
  # The widest rows exceed 128 registers even one at a time; fewer blocks then
  # share an SM.
  rows_per_step = max(fitting, default=1)
  length = segment_length(
    m,
    width,
    rows_per_step=rows_per_step,
    active=width / 4 if active is None else active,
    sm_count=sm_count,
  )
  return GatherConfig(rows_per_step=rows_per_step, segment_length=length)


def segment_length(
  m: int, width: int, *, rows_per_step: int, active: float, sm_count: int
) -> int:
  """Slots of a segment at most: a block's share, in steps, up to `width`.

  The share is that of one block, were the work spread evenly over all blocks
  that run at a time.

  Args:
    m: Rows of the result.
    width: Entries that one row has at most.
    rows_per_step: Entries of a step.
    active: Entries that a row has on average.
    sm_count: Streaming multiprocessors of the device.
  """
  share = m * active / (_BLOCKS_PER_SM * sm_count)
  granule = max(rows_per_step, _LEAST_SLOTS)
  return min(width, granule * max(1, math.ceil(share / granule)))


def row_registers(k: int, rows_per_step: int, *, matrices: int) -> int:
  """Registers of a thread that hold the sums and the rows of a step.

  With two matrices a row of x is held besides.
  """
  words = k // rows.WIDTH_MULTIPLE
  loaded = matrices * rows_per_step + (matrices == 2)
  return (2 + loaded) * words
