import concurrent.futures
import json

import pytest

from experiments import compile_cases, memory_report, scale_report
from experiments.collectives import Collective
from experiments.scale_report import Case

GIBIBYTE = 2**30
GATHER = Collective(
  "all-gather", ("bf16[512,1024,1024]",), ("fsdp",), 4, 2, GIBIBYTE
)
SMALL = Collective("all-reduce", ("f32[]",), ("data",), 2, 1, 4)


@pytest.fixture
def measured(monkeypatch):
  """What is compiled; nothing is. The dense layer takes 75 GB."""
  calls = []

  def measure(config, **options):
    calls.append((config, options))
    size = 75 if config.activation == "silu" else 40
    memory = memory_report.Memory(size * 10**9, GIBIBYTE, GIBIBYTE, 0, 0, 0, 0)
    one_device = options["mesh_shape"] == (1, 1, 1)
    return memory_report.Step(memory, [] if one_device else [GATHER, SMALL])

  monkeypatch.setattr(memory_report, "measure", measure)
  monkeypatch.setattr(scale_report.aot, "find_compiler", lambda: None)
  monkeypatch.setattr(
    scale_report.frontier,
    "where_compiled",
    lambda: {
      "device": "a laptop",
      "versions": {"jax": "1.2.3"},
      "date": "2026-01-02",
      "revision": "abc",
    },
  )
  monkeypatch.setattr(
    compile_cases, "_processes", concurrent.futures.ThreadPoolExecutor
  )
  return calls


def test_every_size_and_mesh():
  cases = scale_report.all_cases()
  assert len(set(cases)) == len(cases) == 6 * 5 * 2
  assert {(c.size, c.gated) for c in cases} == {
    *((size, True) for size in ("0p5b", "1b", "1p5b", "2b")),
    ("0p5b", False),
    ("2b", False),
  }
  for case in cases:
    data, fsdp, tensor = memory_report.parse_mesh(case.mesh)
    assert data * fsdp * tensor in (1, 8)
    assert case.config().gated == case.gated


def test_writes_tables(measured, give_flags, tmp_path):
  output = tmp_path / "results" / "report"
  give_flags(output=str(output), workers=1)
  assert scale_report.main() == 0
  assert len(measured) == 60
  for config, options in measured:
    assert (config.remat, config.attention) == ("attention", "cudnn")
    assert options["tokens_per_device"] == 16384
  lines = output.with_suffix(".md").read_text().splitlines()
  figures = "2.00 | 69.85 | 37.25 | **no**, yes | yes, yes |"
  assert f"| 2b | yes | 1x8x1 | {figures} 1.50 | 1.50 |" in lines
  assert f"| 0p5b | no | 1x1x1 | {figures} 0.00 | 0.00 |" in lines
  assert lines.count("### 1x8x1") == lines.count("### 2x2x2") == 1
  # One device exchanges nothing; scalars are left out.
  assert "### 1x1x1" not in lines
  assert (
    lines.count("| all-gather | fsdp | 2 | bf16[512,1024,1024] | 768.0 |") == 4
  )
  assert "f32[]" not in "\n".join(lines)
  assert lines.count("2026-01-02, a laptop; jax 1.2.3; revision abc.") == 1
  rows = json.loads(output.with_suffix(".json").read_text())
  assert rows[0]["sent_bytes"] == {}
  assert rows[-1]["sent_bytes"] == {
    "all-gather over fsdp": 2 * GIBIBYTE * 3 // 4,
    "all-reduce over data": 4,
  }
  assert compile_cases.case_of(Case, rows[-1]) == scale_report.all_cases()[-1]
