"""What the kernels of training are configured with, by shape."""

import pytest

from pallas_kernels import gradient_config, rows
from pallas_kernels.gradient_config import Product

ALL = pytest.mark.parametrize("product", list(Product))


def default(product, **options):
  sizes = {"m": 16384, "k": 2048, "width": 128, "active": 30}
  return gradient_config.default_config(product, **sizes | options)


@ALL
def test_fewer_rows_a_step_the_wider_they_are(product):
  widths = range(256, rows.MAX_WIDTH + 1, 256)
  chosen = [default(product, k=k).rows_per_step for k in widths]
  assert chosen[0] == 8
  assert chosen == sorted(chosen, reverse=True)


@ALL
def test_tokens_of_a_batch_are_not_split(product):
  assert default(product).segment_length == 128


@ALL
@pytest.mark.parametrize(("active", "length"), [(30, 936), (3, 96), (0, 8)])
def test_hot_neurons_are_split_at_a_blocks_share(product, active, length):
  # 16,384 · 30 entries over 132 SMs of 4 blocks: 930.9, in steps.
  config = default(
    product, m=5632, width=16384, active=16384 * active / 5632, k=1024
  )
  assert config.rows_per_step == 8
  assert config.segment_length == length


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"m": 0}, "m=0 must be at least 1"),
    ({"width": 0}, "width=0 must be at least 1"),
    ({"sm_count": 0}, "sm_count=0 must be at least 1"),
    ({"active": -1.0}, r"active=-1.0 must be at least 0"),
    ({"k": 2000}, "rows are 2000 wide but must be a multiple of 256"),
  ],
)
def test_default_refuses(arguments, message):
  with pytest.raises(ValueError, match=message):
    default(Product.SDDMM, **arguments)
