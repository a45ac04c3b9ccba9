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


@ALL
def test_a_layer_calls_it_by_token_or_by_neuron(product):
  layer = {"tokens": 16384, "neurons": 5632, "width": 256, "active": 30}
  by_token = {"m": 16384, "width": 256, "active": 30}
  by_neuron = {"m": 5632, "width": 16384, "active": 30 * 16384 / 5632}
  config = gradient_config.layer_config(product, k=2048, sm_count=8, **layer)
  assert config == default(
    product,
    sm_count=8,
    **(by_neuron if product.is_by_neuron else by_token),
  )
  # A token has at most 256 entries, a neuron any number of them.
  assert (config.segment_length > 256) == product.is_by_neuron


def test_segments_of_a_neuron_are_no_longer_than_a_blocks_share():
  # 16,384 · 30 entries over 132 SMs of 4 blocks, if 30 are active.
  for product in (Product.SDDMM_SPMM, Product.SPMM_TWO_VALUES):
    config = gradient_config.layer_config(
      product, tokens=16384, neurons=5632, k=2048, width=256
    )
    assert 256 <= config.segment_length <= 930


def test_what_goes_by_neuron():
  by_neuron = {product for product in Product if product.is_by_neuron}
  assert by_neuron == {Product.SDDMM_SPMM, Product.SPMM_TWO_VALUES}


def test_a_layer_has_neurons():
  with pytest.raises(ValueError, match="neurons=0 must be at least 1"):
    gradient_config.layer_config(
      Product.SDDMM_SPMM, tokens=1, neurons=0, k=256, width=1
    )
