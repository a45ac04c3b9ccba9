"""Which config a call gets, and which tables are refused."""

import dataclasses
import itertools
import json

import pytest

from pallas_kernels import (
  gate_pack_config,
  gather_config,
  gradient_config,
  tuning,
)
from pallas_kernels.gate_pack_config import GatePackConfig
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.gradient_config import Product
from pallas_kernels.target import H200, Device

MEASURED = tuning.Measured("2027-01-31", "0.11.2", "abc1234", 0.005, 0.5, 0.75)
# No default is like one of these.
PACK = GatePackConfig(tile_width=256, slots=32, stages=3, skew=1, snake_width=5)
GATHER = GatherConfig(rows_per_step=2, segment_length=6)


@pytest.fixture(autouse=True)
def tables(monkeypatch, tmp_path):
  """An empty folder of tables, and nothing remembered of others."""
  tuning.load.cache_clear()
  monkeypatch.setattr(tuning, "TABLES", tmp_path / "tuned")
  yield tmp_path / "tuned"
  tuning.load.cache_clear()


def pack_entry(m=16384, n=5632, k=2048, **changes):
  config = dataclasses.replace(PACK, **changes)
  return tuning.Entry("gate_pack", {"m": m, "n": n, "k": k}, config, MEASURED)


def gather_entry(m=16384, kernel="gathered_up_down", **changes):
  shape = {"m": m, "n": 5632, "k": 2048, "width": 256}
  config = dataclasses.replace(GATHER, **changes)
  return tuning.Entry(kernel, shape, config, MEASURED)


def tuned(*entries):
  tuning.merge(tuning.table_path(H200.kind), H200.kind, entries)


def for_gate_pack(*shape, **asked):
  return tuning.for_gate_pack(H200, *shape, tile_width=256, **asked)


def test_without_a_table_the_default():
  assert for_gate_pack(512, 1536, 576) == gate_pack_config.default_config(
    512, 1536, 576, tile_width=256
  )
  assert tuning.for_gathered(
    H200, 512, 1536, 768, 128, matrices=1
  ) == gather_config.default_config(512, 768, 128, matrices=1)


def test_the_default_knows_the_device():
  small = Device("NVIDIA H100 PCIe", 8)
  assert tuning.for_gathered(
    small, 64, 5632, 2048, 256, matrices=2
  ) == gather_config.default_config(64, 2048, 256, matrices=2, sm_count=8)
  assert tuning.for_gate_pack(
    small, 16384, 5632, 2048
  ) == gate_pack_config.default_config(16384, 5632, 2048, sm_count=8)


@pytest.mark.parametrize(
  ("m", "stages"),
  [
    (1, None),
    (255, None),
    (256, 2),
    (1024, 2),  # exactly
    (1025, 3),
    (4096, 3),  # exactly
    (4097, None),  # more than all
  ],
)
def test_the_nearest_entry_with_more_tokens(m, stages):
  tuned(pack_entry(m=4096, stages=3), pack_entry(m=1024, stages=2))
  config = for_gate_pack(m, 5632, 2048)
  if stages is None:
    assert config == gate_pack_config.default_config(
      m, 5632, 2048, tile_width=256
    )
  else:
    assert config == dataclasses.replace(PACK, stages=stages)


@pytest.mark.parametrize("shape", [(16384, 5632, 2112), (16384, 5888, 2048)])
def test_other_neurons_or_columns_are_another_shape(shape):
  tuned(pack_entry())
  assert for_gate_pack(16384, 5632, 2048) == PACK
  assert for_gate_pack(*shape) != PACK


def test_a_gathered_kernel_by_its_name_and_width():
  tuned(
    gather_entry(segment_length=4),
    gather_entry(kernel="gathered_down", segment_length=8),
  )

  def segment_length(*, matrices, width=256, device=H200):
    return tuning.for_gathered(
      device, 16384, 5632, 2048, width, matrices=matrices
    ).segment_length

  assert segment_length(matrices=2) == 4
  assert segment_length(matrices=1) == 8
  # The defaults of a prefill of so many tokens are long.
  assert segment_length(matrices=1, width=128) > 8
  assert segment_length(matrices=1, device=Device("NVIDIA H100", 132)) > 8


EACH_PRODUCT = pytest.mark.parametrize("product", list(Product))


def for_gradient(product, *, tokens=16384, width=256, device=H200, **options):
  return tuning.for_gradient(
    device, product, tokens, 5632, 2048, width, **options
  )


@EACH_PRODUCT
def test_a_kernel_of_training_goes_by_tokens_or_by_neurons(product):
  small = Device("NVIDIA H100 PCIe", 8)
  by_neuron = product in (Product.SDDMM_SPMM, Product.SPMM_TWO_VALUES)
  unknown = 16 if by_neuron else 64
  for active, options in ((unknown, {}), (30, {"active": 30})):
    rows = (
      {"m": 5632, "width": 16384, "active": active * 16384 / 5632}
      if by_neuron
      else {"m": 16384, "width": 256, "active": active}
    )
    assert for_gradient(
      product, device=small, **options
    ) == gradient_config.default_config(product, k=2048, sm_count=8, **rows)


@EACH_PRODUCT
def test_a_kernel_of_training_by_its_name_tokens_and_width(product):
  tuned(
    gather_entry(kernel=product.value, segment_length=4),
    *(
      gather_entry(kernel=other.value, segment_length=8)
      for other in Product
      if other != product
    ),
  )
  assert for_gradient(product).segment_length == 4
  assert for_gradient(product, tokens=4096).segment_length == 4
  for options in (
    {"tokens": 4095},
    {"tokens": 16385},
    {"width": 128},
    {"device": Device("NVIDIA H100", 132)},
  ):
    assert for_gradient(product, **options).segment_length > 8


def test_the_format_is_never_changed():
  tuned(pack_entry(slots=16), pack_entry(slots=64))
  default = for_gate_pack(16384, 5632, 2048)
  assert default.slots == 32
  assert default.snake_width != 5
  for slots in (16, 64):
    assert for_gate_pack(16384, 5632, 2048, slots=slots) == dataclasses.replace(
      PACK, slots=slots
    )
  # Of a few tokens the default tile is narrower than the tuned one.
  tuned(pack_entry(m=64))
  assert tuning.for_gate_pack(H200, 64, 5632, 2048).tile_width == 64


def test_a_table_does_not_depend_on_the_order_of_its_entries(tables):
  entries = [
    pack_entry(),
    pack_entry(slots=16),
    pack_entry(m=64),
    gather_entry(),
    gather_entry(kernel="gathered_down"),
  ]
  written = set()
  path = tuning.table_path(H200.kind)
  for order in itertools.permutations(entries):
    path.unlink(missing_ok=True)
    tuned(*order[:2])
    tuned(*order[2:])
    written.add(path.read_bytes())
  assert len(written) == 1
  (text,) = written
  assert text.endswith(b"}\n")
  assert [file.name for file in tables.iterdir()] == ["nvidia_h200.json"]
  read = tuning.load(path, H200.kind)
  assert len(read) == len(entries)
  assert all(entry in read for entry in entries)


def test_a_new_entry_replaces_that_of_its_shape():
  tuned(pack_entry(), pack_entry(slots=16), gather_entry())
  again = pack_entry(stages=2)._replace(
    measured=MEASURED._replace(date="2027-02-01")
  )
  tuned(again)
  read = tuning.load(tuning.table_path(H200.kind), H200.kind)
  assert len(read) == 3
  assert again in read
  assert pack_entry() not in read
  assert for_gate_pack(16384, 5632, 2048).stages == 2


def test_a_table_is_read_once(monkeypatch):
  tuned(pack_entry())
  assert for_gate_pack(16384, 5632, 2048) == PACK
  monkeypatch.setattr(tuning.json, "loads", lambda text: 1 / 0)
  assert for_gate_pack(16384, 5632, 2048) == PACK


def test_names_of_tables():
  assert tuning.table_path("NVIDIA H200").name == "nvidia_h200.json"
  assert (
    tuning.table_path("NVIDIA H100 80GB HBM3").name
    == "nvidia_h100_80gb_hbm3.json"
  )


def row(**changes):
  config = dataclasses.asdict(PACK) | changes.pop("config", {})
  shape = {"m": 16384, "n": 5632, "k": 2048} | changes.pop("shape", {})
  measured = MEASURED._asdict() | changes.pop("measured", {})
  return {"config": config, "shape": shape, "measured": measured} | changes


def without(part, key):
  changed = row()
  del changed[part][key]
  return changed


@pytest.mark.parametrize(
  ("table", "message"),
  [
    ("{", "it is not JSON"),
    ([], "the table is not an object"),
    ({"kernels": {}}, "the table lacks device"),
    ({"device": "NVIDIA H200"}, "the table lacks kernels"),
    ({"device": "NVIDIA B200", "kernels": {}}, "for 'NVIDIA B200', not for"),
    ({"device": "NVIDIA H200", "kernels": []}, "'kernels' is not an object"),
    (
      {"device": "NVIDIA H200", "kernels": {"spmm": []}},
      "'kernels' has spmm, which is unknown",
    ),
    ({"device": "NVIDIA H200", "kernels": {"gate_pack": {}}}, "is not a list"),
    ([row(), row(config={"stages": 2})], r"gate_pack\[1\] repeats a shape"),
    ([row(), 3], r"gate_pack\[1\] is not an object"),
    ([row(note="fast")], r"gate_pack\[0\] has note"),
    ([row(config={"warps": 3})], r"config of gate_pack\[0\] has warps"),
    ([without("config", "stages")], r"config of gate_pack\[0\] lacks stages"),
    ([row(shape={"width": 3})], r"shape of gate_pack\[0\] has width"),
    ([without("shape", "m")], r"shape of gate_pack\[0\] lacks m"),
    ([row(shape={"m": 0})], r"m=0 of gate_pack\[0\] is not at least 1"),
    ([row(config={"stages": "4"})], "stages='4' .* is not an integer"),
    ([row(config={"cluster": True})], "cluster=True .* is not an integer"),
    ([row(config={"stages": 99})], r"config of gate_pack\[0\]: stages=99"),
    ([row(config={"slots": 12})], r"gate_pack\[0\]: slots=12 .* multiple of 8"),
    ([row(measured={"median_ms": "fast"})], "median_ms='fast'"),
    ([row(measured={"median_ms": float("nan")})], "median_ms=nan"),
    ([without("measured", "jax")], "lacks jax"),
  ],
)
def test_malformed_tables(table, message, tables):
  if isinstance(table, list) and table:
    table = {"device": "NVIDIA H200", "kernels": {"gate_pack": table}}
  path = tuning.table_path(H200.kind)
  path.parent.mkdir()
  path.write_text(table if isinstance(table, str) else json.dumps(table))
  before = path.read_bytes()
  with pytest.raises(ValueError, match=message) as caught:
    for_gate_pack(16384, 5632, 2048)
  assert str(path) in str(caught.value)
  assert "experiments.autotune" in str(caught.value)
  # Nor is it overwritten.
  with pytest.raises(ValueError, match=message):
    tuned(pack_entry())
  assert path.read_bytes() == before
