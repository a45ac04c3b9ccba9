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


# Bytes in bfloat16 of what `tiny` computes with: the matrices of all layers,
# the vocabulary, and the residual stream of a device in the test below.
LAYERS = 2 * 3 * (4 * 256 * 256 + 3 * 512 * 256)
VOCABULARY = 2 * 512 * 256
STREAM = 2 * 4096 * 256


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh_shape", "expected"),
  [
    # Each gradient once; the vocabulary's of the embedding, and of the output
    # in float32.
    ((8, 1, 1), {("all-reduce", "data"): 7 / 4 * (LAYERS + 3 * VOCABULARY)}),
    # Weights for the forward and the backward pass; gradients as above.
    (
      (1, 8, 1),
      {
        ("all-gather", "fsdp"): 7 / 8 * 2 * (LAYERS + VOCABULARY),
        ("reduce-scatter", "fsdp"): 7 / 8 * (LAYERS + 3 * VOCABULARY),
      },
    ),
    # Of half of the weights. The stream is summed after the embedding, twice in
    # a layer's forward pass and three times in its backward pass, which makes
    # attention's sum again; and in float32 by the cross-entropy.
    (
      (2, 2, 2),
      {
        ("all-gather", "fsdp"): 1 / 2 * (LAYERS + VOCABULARY),
        ("all-reduce", "data+fsdp"): 3 / 4 * (LAYERS + VOCABULARY),
        ("reduce-scatter", "fsdp"): 1 / 2 * VOCABULARY,
        ("all-reduce", "data"): 1 / 2 * VOCABULARY,
        ("all-reduce", "tensor"): (1 + 3 * 5 + 2) * STREAM,
      },
    ),
  ],
)
def test_what_a_step_sends(mesh_shape, expected):
  h200_mesh_with_cudnn(data=1)
  step = memory_report.measure(
    tiny(implementation="reference"),
    mesh_shape=mesh_shape,
    tokens_per_device=4096,
    seq_len=64,
  )
  sent = collectives.total_bytes(step.collectives)
  # Besides: norms, scalars, and how often each neuron was active.
  assert {key: sent.get(key) for key in expected} == pytest.approx(
    expected, rel=0.01
  )
  assert sum(sent.values()) < 1.01 * sum(expected.values())


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
