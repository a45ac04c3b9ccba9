import concurrent.futures
import json

import pytest

from experiments import compile_cases, memory_frontier, memory_plots
from experiments.memory_frontier import Case
from twell_jax.nn import TransformerConfig

GIBIBYTE = 2**30
# Of the published models, times 3 for the two gradients.
PROJECTIONS = 4 * 2048 * 2048
SCORES = 2048 * 2048
NEURONS = 2048 * 5632
STEP = 3 * (28 * (PROJECTIONS + SCORES + 3 * NEURONS) + 2048 * 49152)


def row(case):
  """A made-up row of the results: no two peaks are alike."""
  peak = GIBIBYTE * (1 + memory_frontier.all_cases().index(case))
  parts = dict.fromkeys(memory_frontier._PARTS, GIBIBYTE)
  if case.remat == "layer":
    parts["ffn_residuals"] = 0
  return {
    **case._asdict(),
    **parts,
    "peak": peak,
    "extra_flops": memory_frontier.extra_flops(case.config(), seq_len=2048),
    "device": "a laptop",
    "versions": {"jax": "1.2.3"},
    "date": "2026-01-02",
    "revision": "abc",
  }


@pytest.fixture
def compiled(monkeypatch):
  """The cases that are compiled; nothing is."""
  cases = []

  def measure(case):
    cases.append(case)
    return row(case)

  monkeypatch.setattr(memory_frontier, "measure", measure)
  monkeypatch.setattr(
    compile_cases, "_processes", concurrent.futures.ThreadPoolExecutor
  )
  return cases


def test_every_rival_and_every_size():
  cases = memory_frontier.all_cases()
  assert len(set(cases)) == len(cases) == 4 * 4 - 1 + 5 * 4 * 2
  assert cases[0] == Case("1p5b", 8, "chunked", "none", "silu")
  for case in cases:
    config = case.config()
    assert config.attention == "cudnn"
    assert config.remat == case.remat
    assert config.cross_entropy == case.cross_entropy
  sparse = Case("2b", 1, "chunked", "layer", "mosaic").config()
  assert (sparse.num_layers, sparse.implementation) == (38, "mosaic")
  dense = Case("2b", 1, "chunked", "none", "silu_recompute").config()
  assert (dense.activation, dense.ffn_residuals) == ("silu", "recomputed")


@pytest.mark.parametrize(
  ("remat", "side", "products"),
  [
    ("none", "silu", 0),
    ("matmuls", "reference", 0),
    ("matmuls", "mosaic", 0),
    ("none", "silu_recompute", 2 * NEURONS),
    ("attention", "silu", PROJECTIONS),
    ("attention", "mosaic", PROJECTIONS),
    ("attention", "silu_recompute", PROJECTIONS + 2 * NEURONS),
    ("layer", "silu", PROJECTIONS + SCORES + 2 * NEURONS),
    ("layer", "mosaic", PROJECTIONS + SCORES + NEURONS),
  ],
)
def test_flops_of_what_is_computed_again(remat, side, products):
  config = Case("1p5b", 8, "chunked", remat, side).config()
  share = memory_frontier.extra_flops(config, seq_len=2048)
  assert share == pytest.approx(28 * products / STEP)


def test_flops_of_shared_heads_without_gate():
  config = TransformerConfig(
    vocab_size=10,
    d_model=8,
    d_ff=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    gated=False,
    activation="silu",
    remat="layer",
  )
  again = 8 * 2 * (2 * 4 + 2 * 2) + 4 * 2 * 16 + 8 * 20
  step = 3 * (2 * (again + 8 * 20) + 8 * 10)
  share = memory_frontier.extra_flops(config, seq_len=16)
  assert share == pytest.approx(2 * again / step)


def test_goes_on_where_it_was(compiled, tmp_path):
  path = tmp_path / "rows.json"
  cases = memory_frontier.all_cases()[:5]
  compile_cases.run(cases[1:3], memory_frontier.measure, path=path, workers=2)
  assert sorted(compiled) == sorted(cases[1:3])
  compiled.clear()
  rows = compile_cases.run(cases, memory_frontier.measure, path=path, workers=1)
  assert compiled == [cases[0], *cases[3:]]
  assert rows == json.loads(path.read_text()) == [row(case) for case in cases]


def test_the_others_are_compiled_when_a_step_fails(compiled, tmp_path):
  path = tmp_path / "rows.json"
  first, second, third = memory_frontier.all_cases()[:3]

  def fails_at_the_second(case):
    if case == second:
      raise MemoryError(case)
    return row(case)

  with pytest.raises(RuntimeError, match="1 of 3 steps did not") as error:
    compile_cases.run(
      [first, second, third], fails_at_the_second, path=path, workers=2
    )
  assert str(second) in str(error.value)
  assert json.loads(path.read_text()) == [row(first), row(third)]


def test_writes_tables_and_plots(compiled, give_flags, tmp_path):
  output = tmp_path / "results" / "report"
  give_flags(output=str(output), workers=2)
  assert memory_frontier.main() == 0
  assert len(compiled) == len(memory_frontier.all_cases())
  lines = output.with_suffix(".md").read_text().splitlines()
  # silu, silu_recompute, reference, mosaic: the first four peaks.
  assert (
    "| 1p5b | 8 | chunked | none | 1.00 | 2.00 | 3.00 | 4.00 | 4.000 | 1.333 |"
    " 1.000 |" in lines
  )
  # Nothing recomputes twice, and no FFN keeps anything.
  (layer,) = (
    line for line in lines if line.startswith("| 1p5b | 8 | chunked | layer |")
  )
  assert layer.endswith("| 13.00 |  | 14.00 | 15.00 | 1.154 | 1.071 |  |")
  # Two layers only.
  (full,) = (
    line for line in lines if line.startswith("| 1p5b | 8 | full | none |")
  )
  assert full.endswith("| 48.00 |  |  | 49.00 | 1.021 |  | 1.000 |")
  assert "| chunked | none | silu | 0.0% | 1.00 |" in "\n".join(lines)
  assert lines.count("2026-01-02, a laptop; jax 1.2.3; revision abc.") == 1
  for name in ("report_frontier.png", "report_sizes.png"):
    assert f"({name})" in "\n".join(lines)
    assert output.with_name(name).read_bytes().startswith(b"\x89PNG")


def test_every_layer_and_policy_has_a_style():
  cases = memory_frontier.all_cases()
  assert set(memory_plots._STYLES) == {case.side for case in cases}
  assert set(memory_plots._MARKERS) == {case.remat for case in cases}
  assert set(memory_plots._SIZE_NAMES) == {case.size for case in cases}
