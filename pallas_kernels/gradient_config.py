"""How the gathered kernels of training are configured, by shape.

gather_config.py says what is chosen and why. Here the rows of a step come from
a table instead of a count of registers: how many of them the compiler needs is
not a sum over what a kernel holds, because it may unpack a row early or late.
"""

import enum

from pallas_kernels import gather_config, rows, target
from pallas_kernels.gather_config import GatherConfig


class Product(enum.Enum):
  """The kernels of sddmm.py and spmm.py, by name."""

  SDDMM = "sddmm"
  SDDMM_SPMM = "sddmm_spmm"
  SPMM_TWO_MATRICES = "spmm_two_matrices"
  SPMM_TWO_VALUES = "spmm_two_values"

  @property
  def is_by_neuron(self) -> bool:
    """Whether rows are neurons, and tokens columns, where a layer calls it."""
    return self in (Product.SDDMM_SPMM, Product.SPMM_TWO_VALUES)


# The widest rows of which so many a step leave a thread at most 128 registers,
# as compiled for sm_90a. Of rows wider than all, a step takes one.
_WIDEST = {
  Product.SDDMM: {8: 2560, 4: 5120, 2: 8192},
  Product.SDDMM_SPMM: {8: 1024, 4: 2048, 2: 3584},
  Product.SPMM_TWO_MATRICES: {8: 1792, 4: 2304, 2: 4096},
  Product.SPMM_TWO_VALUES: {8: 2048, 4: 3072, 2: 4096},
}


def default_config(
  product: Product,
  *,
  m: int,
  k: int,
  width: int,
  active: float,
  sm_count: int = target.H200.sm_count,
) -> GatherConfig:
  """A config for m rows of up to `width` entries.

  Args:
    product: The kernel.
    m: Rows of the result: tokens, or neurons in the lists of neurons.
    k: Width of a matrix row, d_model.
    width: Entries that one row has at most: the ELL width, or all tokens.
    active: Entries that a row has on average. By neuron it decides how long
      the lists of the most active ones get before they are split: on 16,384
      tokens with 30 of 5,632 neurons active, some 900 slots.
    sm_count: Streaming multiprocessors of the device.

  Raises:
    ValueError: k is not a width that the kernels take, or another argument is
      out of its bounds.
  """
  rows.check_width(k)
  for name, value in (("m", m), ("width", width), ("sm_count", sm_count)):
    if value < 1:
      raise ValueError(f"{name}={value} must be at least 1")
  if not active >= 0:
    raise ValueError(f"{active=} must be at least 0")
  widest = _WIDEST[product]
  rows_per_step = max((r for r in widest if k <= widest[r]), default=1)
  length = gather_config.segment_length(
    m, width, rows_per_step=rows_per_step, active=active, sm_count=sm_count
  )
  return GatherConfig(rows_per_step=rows_per_step, segment_length=length)


def layer_config(
  product: Product,
  *,
  tokens: int,
  neurons: int,
  k: int,
  width: int,
  active: float | None = None,
  sm_count: int = target.H200.sm_count,
) -> GatherConfig:
  """`default_config` where a layer calls the kernel, by token or by neuron.

  Args:
    product: The kernel.
    tokens: Of the call.
    neurons: Of the layer.
    k: Width of a matrix row, d_model.
    width: Entries that one token has at most: the ELL width.
    active: Entries that a token has on average; by default a quarter of width,
      and a sixteenth where rows are neurons. Their lists have no bound but the
      tokens, and are split rather too short than too long: a segment above a
      block's share is waited for, while parts of some hundred rows are little
      traffic.
    sm_count: Streaming multiprocessors of the device.

  Raises:
    ValueError: As `default_config`; or no neurons.
  """
  if neurons < 1:
    raise ValueError(f"{neurons=} must be at least 1")
  if active is None:
    active = width / (16 if product.is_by_neuron else 4)
  if product.is_by_neuron:
    m, width, active = neurons, tokens, active * tokens / neurons
  else:
    m = tokens
  return default_config(
    product, m=m, k=k, width=width, active=active, sm_count=sm_count
  )
