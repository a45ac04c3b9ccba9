import json
import re
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

from experiments import collectives, memory_report
from pallas_kernels import aot
from tests.helpers.kernels import h200_mesh_with_cudnn
from twell_jax.nn import TransformerConfig

GIBIBYTE = 2**30
DENSE = memory_report.Memory(
  peak=8 * GIBIBYTE,
  parameters=2 * GIBIBYTE,
  optimizer=GIBIBYTE,
  temporaries=5 * GIBIBYTE,
  residuals=3 * GIBIBYTE,
  gradients=GIBIBYTE,
  ffn_residuals=2 * GIBIBYTE,
)
SPARSE = DENSE._replace(peak=3 * GIBIBYTE, ffn_residuals=0)
COLLECTIVES = [
  collectives.Collective(
    "all-gather", ("bf16[512,1024,1024]",), ("fsdp",), 4, 2, GIBIBYTE
  )
]


@pytest.fixture
def configs(monkeypatch):
  """The configs that are measured; nothing is compiled."""
  measured = []

  def measure(config, **options):
    measured.append((config, options))
    memory = DENSE if len(measured) == 1 else SPARSE
    return memory_report.Step(memory, COLLECTIVES)

  monkeypatch.setattr(memory_report, "measure", measure)
  monkeypatch.setattr(memory_report.aot, "find_compiler", lambda: None)
  # The compiler's version is looked up where none may be installed.
  monkeypatch.setattr(memory_report.metadata, "version", lambda name: "1.2.3")
  return measured


def test_report(configs, capsys):
  status = memory_report.main(
    [
      *("--size=1p5b", "--remat=attention", "--cross_entropy_chunk=512"),
      *("--layers=3", "--mesh=1x4x1", "--tokens_per_device=4096"),
    ]
  )
  assert status == 0
  *lines, last = capsys.readouterr().out.splitlines()
  assert re.fullmatch(r"peak +8\.00 +3\.00", lines[1])
  assert re.fullmatch(r"  residuals +3\.00 +3\.00", lines[5])
  assert re.fullmatch(r"FFN residuals +2\.00 +0\.00", lines[7])
  traffic = [
    "  all-gather over fsdp: 2 runs, 1.500 GiB sent",
    "  fits: H100, 80 GB; H200, 141 GB",
  ]
  assert lines[8:] == ["dense (silu)", *traffic, "sparse (mosaic)", *traffic]
  figures = json.loads(last)
  assert figures["dense_peak_bytes"] == 8 * GIBIBYTE
  assert figures["sparse_peak_bytes"] == 3 * GIBIBYTE
  assert figures["ratio"] == 0.375
  assert figures["dense"]["residuals"] == 3 * GIBIBYTE
  assert figures["options"]["remat"] == "attention"
  assert {"date", "versions", "revision", "device"} <= set(figures)
  (dense, options), (sparse, same_options) = configs
  assert options == same_options
  assert options == {
    "mesh_shape": (1, 4, 1),
    "tokens_per_device": 4096,
    "seq_len": 2048,
  }
  for config in (dense, sparse):
    assert (config.d_model, config.num_layers) == (2048, 3)
    assert (config.dtype, config.param_dtype) == ("bfloat16", "float32")
    assert config.remat == "attention"
    assert config.attention == "cudnn"
    assert config.ffn_residuals == "kept"
    assert config.cross_entropy == "chunked"
    assert config.cross_entropy_chunk == 512
  assert (dense.activation, dense.implementation) == ("silu", None)
  assert (sparse.activation, sparse.implementation) == ("relu", "mosaic")


def test_the_dense_layer_that_is_asked_for(configs):
  arguments = ["--size=0p5b", "--dense=reference", "--implementation=xla"]
  choices = ["--cross_entropy=full", "--attention=full"]
  assert memory_report.main(arguments + choices) == 0
  (dense, _), (sparse, _) = configs
  assert (dense.activation, dense.implementation) == ("relu", "reference")
  assert sparse.implementation == "xla"
  assert dense.num_layers == 8
  assert dense.remat == "none"
  assert dense.cross_entropy == sparse.cross_entropy == "full"
  assert dense.attention == sparse.attention == "full"


def test_the_dense_layer_that_recomputes(configs):
  arguments = ["--size=0p5b", "--dense=silu_recompute"]
  assert memory_report.main(arguments) == 0
  (dense, _), (sparse, _) = configs
  assert (dense.activation, dense.ffn_residuals) == ("silu", "recomputed")
  assert (sparse.activation, sparse.ffn_residuals) == ("relu", "kept")


REPORT = """\
Memory Space: default (color=0)
Total bytes: 1572888 (1.50MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   128.0MiB(100%);  128.0MiB;            0;       1; f32[3,2048,2048]

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    30.0MiB( 30%);   30.0MiB;            0;       3; 2×bf16[3,4,8,64], f32[7]
    60.0MiB( 60%);   20.0MiB;     31457280;       2; f32[3,256,64], bf16[5,3]
    80.0MiB( 80%);   10.0MiB;     52428800;       2; f32[3,256,64], u16[3,32,9]
    95.0MiB( 95%);    9.5MiB;     62428800;       1; bf16[4,8,64]
   100.0MiB(100%);  512.0KiB;     72428800;       2; f32[], bf16[3,256,64]
"""


def test_slots_are_told_by_their_shapes(tmp_path):
  path = tmp_path / "module_01.jit_train_step.sm_9.0a_x-memory-usage-report.txt"
  path.write_text(REPORT, encoding="utf-8")
  slots = memory_report._read_slots(tmp_path)
  # Of the largest allocation.
  assert [slot.size for slot in slots] == [128 * 2**20]
  path.write_text(REPORT.replace("128.0MiB", "128.0KiB"), encoding="utf-8")
  slots = memory_report._read_slots(tmp_path)
  assert [slot.size / 2**20 for slot in slots] == [30, 20, 10, 9.5, 0.5]
  assert slots[0].shapes == (("bf16", (3, 4, 8, 64)), ("f32", (7,)))
  assert slots[4].shapes == (("f32", ()), ("bf16", (3, 256, 64)))
  # 3 layers, 4 sequences of 8 tokens.
  assert memory_report._stacked(slots, 3, (4, 32)) == {
    "residuals": 40 * 2**20,
    "gradients": 20 * 2**20,
  }


def test_a_report_that_is_missing(tmp_path):
  with pytest.raises(ValueError, match="the compiler wrote 0 memory reports"):
    memory_report._read_slots(tmp_path)


def tiny(**changes):
  fields: dict[str, Any] = {
    "vocab_size": 512,
    "d_model": 256,
    "d_ff": 512,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 4,
    "dtype": "bfloat16",
    "remat": "attention",
    "attention": "cudnn",
    "cross_entropy": "chunked",
    "cross_entropy_chunk": 128,
  }
  return TransformerConfig(**(fields | changes))


@pytest.mark.parametrize(
  ("changes", "arrays_per_token"),
  [
    # z and u.
    ({"implementation": "reference"}, 2),
    ({"activation": "silu"}, 2),
    ({"activation": "silu", "remat": "matmuls"}, 2),
    # What autodiff of silu(z) u asks for besides: of silu its factors and its
    # derivative, and the two products that are multiplied.
    ({"activation": "silu", "remat": "none"}, 6),
    ({"activation": "silu", "gated": False, "remat": "attention"}, 1),
    ({"activation": "silu", "remat": "layer"}, 0),
    ({"activation": "silu", "ffn_residuals": "recomputed"}, 0),
    (
      {"activation": "silu", "ffn_residuals": "recomputed", "remat": "none"},
      0,
    ),
  ],
)
def test_what_a_dense_ffn_keeps(changes, arrays_per_token):
  mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,))
  kept = memory_report._ffn_residuals(tiny(**changes), 1024, mesh)
  assert kept == arrays_per_token * 1024 * 512 * 2


@pytest.mark.slow
def test_a_step_compiled_for_two_devices():
  h200_mesh_with_cudnn(data=1)
  dense, sparse = (
    memory_report.measure(
      tiny(implementation=name),
      mesh_shape=(1, 2, 1),
      tokens_per_device=4096,
      seq_len=64,
    ).memory
    for name in ("reference", "mosaic")
  )
  # In float32, half of each matrix on either device; norms are on both.
  matrices = 512 * 256 + 3 * (4 * 256 * 256 + 3 * 512 * 256)
  parameters = 4 * (matrices // 2 + (2 * 3 + 1) * 256)
  assert dense.parameters == sparse.parameters == parameters
  # Two moments, and two counters.
  assert dense.optimizer == sparse.optimizer == 2 * parameters + 8
  # z and u in bfloat16.
  assert dense.ffn_residuals == 3 * 2 * 4096 * 512 * 2
  # 128 values of each of p and r, in bfloat16, and their columns in 16 bits.
  packed = 3 * 4096 * 128 * (2 + 2 + 2)
  assert sparse.ffn_residuals == pytest.approx(packed, rel=0.05)
  assert dense.residuals - sparse.residuals == pytest.approx(
    dense.ffn_residuals - sparse.ffn_residuals, rel=0.1
  )
  # The blocks' inputs, and attention's results with a float32 for each head.
  others = 3 * 4096 * (256 * 2 + 256 * 2 + 4 * 4)
  assert dense.residuals == pytest.approx(dense.ffn_residuals + others, rel=0.1)
  for memory in (dense, sparse):
    assert memory.temporaries > memory.residuals + memory.gradients
    assert memory.peak > memory.temporaries + memory.parameters * 3
  assert sparse.peak < dense.peak


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--size=7b"], "invalid choice: '7b'"),
    ([], "required: --size"),
    (["--size=1b", "--remat=some"], "invalid choice: 'some'"),
    (
      ["--size=1b", "--tokens_per_device=3000"],
      "error: tokens_per_device = 3000 is no multiple of seq_len = 2048",
    ),
    (["--size=1b", "--layers=0"], "error: num_layers = 0 must be positive"),
    (["--size=1b", "--cross_entropy_chunk=0"], "cross_entropy_chunk = 0"),
    (["--size=1b", "--mesh=1x0x1"], "error: fsdp = 0 must be at least 1"),
    (["--size=1b", "--mesh=8"], "error: mesh '8' must be three numbers"),
    (["--size=1b", "--seq_len=0"], "error: seq_len = 0 must be at least 1"),
  ],
)
def test_mistakes(arguments, message, monkeypatch, capsys):
  monkeypatch.setattr(memory_report.aot, "find_compiler", lambda: None)
  with pytest.raises(SystemExit) as caught:
    memory_report.main(arguments)
  assert caught.value.code == 2
  assert message in capsys.readouterr().err


def test_without_the_compiler(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(aot, "_has_plugin", lambda: False)
  monkeypatch.setattr(aot, "_APART", tmp_path)
  with pytest.raises(SystemExit) as caught:
    memory_report.main(["--size=1b"])
  assert caught.value.code == 2
  assert "make setup-aot" in capsys.readouterr().err


def test_what_fits():
  assert memory_report.fits(72_000_000_000) == {
    "H100, 80 GB": True,
    "H200, 141 GB": True,
  }
  assert list(memory_report.fits(72_000_000_001).values()) == [False, True]
  assert list(memory_report.fits(126_900_000_001).values()) == [False, False]
