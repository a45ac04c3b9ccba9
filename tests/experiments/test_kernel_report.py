import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from experiments import compiled_kernels, gradient_kernels, kernel_report
from experiments.kernel_shapes import SHAPES, Shape
from experiments.ptx import Redistribution
from pallas_kernels import aot
from pallas_kernels.gate_pack_config import GatePackConfig
from pallas_kernels.gather_config import GatherConfig
from tests.helpers.kernels import compile_for_h200

STATS = aot.KernelStats(
  name="kernel",
  registers=168,
  spill_bytes=0,
  stack_bytes=0,
  barriers=1,
  shared_memory_bytes=1024,
  notes=("ptxas info    : (C7519) warpgroup.arrive is injected in line 3",),
  ptx="",
)
PACK = compiled_kernels.GatePackRow(
  shape=Shape(512, 2048, 5632),
  kernel="gate_pack",
  config=GatePackConfig(),
  stats=STATS,
  padded_k=2048,
  wgmma=4,
  tma=5,
  warpgroups=3,
  redistribution=Redistribution(40, 232),
  epilogue_instructions=983.0,
)
GATHERED = compiled_kernels.GatheredRow(
  shape=Shape(512, 2048, 5632),
  kernel="gathered_down",
  config=GatherConfig(rows_per_step=8, segment_length=64),
  stats=STATS._replace(registers=128, notes=()),
  padded_k=2048,
  load_bytes=16,
  instructions_per_row=47.0,
  blocks_per_sm=4,
  bytes_in_flight=131072,
)
TRAINING = dataclasses.replace(
  GATHERED,
  kernel="spmm_two_values",
  stats=STATS._replace(registers=120, notes=()),
  of_training=True,
)
SECOND_PASS = compiled_kernels.Row(
  shape=Shape(512, 2048, 5632),
  kernel="add_parts of gathered_down",
  config=None,
  stats=STATS,
)


def with_stats(row, **changes):
  return dataclasses.replace(row, stats=row.stats._replace(**changes))


def report(monkeypatch, capsys, *rows, output=None):
  """The exit status, what was printed, and its last line."""
  monkeypatch.setattr(kernel_report, "compile_kernels", lambda shape: rows)
  monkeypatch.setattr(kernel_report.aot, "find_compiler", lambda: None)
  # The compiler's version is looked up where none may be installed.
  monkeypatch.setattr(
    kernel_report, "_describe", kernel_report.environment.describe
  )
  arguments = ["--shapes=512x2048x5632"]
  if output:
    arguments.append(f"--output={output}")
  status = kernel_report.main(arguments)
  *lines, last = capsys.readouterr().out.splitlines()
  return status, "\n".join(lines), json.loads(last)


def test_within_all_limits(monkeypatch, capsys, tmp_path):
  status, text, figures = report(
    monkeypatch,
    capsys,
    PACK,
    GATHERED,
    TRAINING,
    SECOND_PASS,
    output=tmp_path / "new" / "out",
  )
  assert status == 0
  assert figures["spills_total"] == 0
  # Two consumers over 128 · 256 · 2048 / 2048 clocks.
  assert figures["epilogue_share"] == pytest.approx(2 * 983 / 32768, abs=1e-4)
  assert figures["epilogue_share_at_k"] == {"2048": figures["epilogue_share"]}
  assert figures["max_registers"] == {
    "gate_pack": 168,
    "gathered": 128,
    "of_training": 120,
  }
  assert figures["within_limits"] == dict.fromkeys(kernel_report.LIMITS, True)
  assert figures["misses"] == []
  assert "40 + 232 + 232 = 504 of 504" in text
  both, training = text.split("## Gathered products of training")
  assert both.count("| spmm_two_values |") == 0
  assert training.count("| spmm_two_values |") == 1
  assert training.count("gathered_down |") == 0
  assert "C7519" in text
  written = json.loads((tmp_path / "new" / "out.json").read_text())
  assert written["kernels"][0]["config"]["tile_n"] == 256
  assert written["kernels"][1]["registers"] == 128
  assert "--shapes=512x2048x5632" in written["command"]
  assert written["command"] in (tmp_path / "new" / "out.md").read_text()
  for key in ("date", "versions", "revision", "device"):
    assert written[key] == figures[key]


@pytest.mark.parametrize(
  ("limit", "row", "what"),
  [
    ("spills", with_stats(GATHERED, spill_bytes=8), "8 bytes"),
    ("spills", with_stats(SECOND_PASS, spill_bytes=8), "8 bytes"),
    (
      "shared_memory",
      with_stats(PACK, shared_memory_bytes=227 * 1024 + 1),
      "232449 bytes",
    ),
    (
      "wgmma_notes",
      with_stats(
        PACK,
        notes=("(C7510) wgmma.mma_async instructions are serialized due to",),
      ),
      "C7510",
    ),
    ("instructions", dataclasses.replace(PACK, wgmma=0), "0 wgmma, 5 TMA"),
    ("instructions", dataclasses.replace(PACK, tma=0), "4 wgmma, 0 TMA"),
    (
      "instructions",
      dataclasses.replace(GATHERED, load_bytes=8),
      "loads of 8 bytes",
    ),
    ("gathered_registers", with_stats(GATHERED, registers=136), "136"),
    ("gathered_registers", with_stats(TRAINING, registers=129), "129"),
    ("spills", with_stats(TRAINING, spill_bytes=8), "8 bytes"),
    (
      "redistribution",
      dataclasses.replace(PACK, redistribution=Redistribution(40, 240)),
      "40 + 240 + 240 = 520 of 504",
    ),
    (
      "redistribution",
      with_stats(PACK, registers=160),
      "40 + 232 + 232 = 504 of 480",
    ),
    (
      "epilogue",
      dataclasses.replace(PACK, epilogue_instructions=984.0),
      "6.0%",
    ),
  ],
)
def test_a_missed_limit(limit, row, what, monkeypatch, capsys):
  others = [each for each in (PACK, GATHERED) if type(each) is not type(row)]
  status, text, figures = report(monkeypatch, capsys, row, *others)
  assert status == 1
  assert figures["within_limits"] == {
    name: name != limit for name in kernel_report.LIMITS
  }
  (miss,) = figures["misses"]
  assert miss.startswith(f"{limit}: {row.kernel} at 512x2048x5632: ")
  assert what in miss
  assert f"- {miss}" in text


def test_the_epilogue_at_a_small_k_is_reported_only(monkeypatch, capsys):
  small = dataclasses.replace(
    PACK, shape=Shape(512, 576, 1536), padded_k=576, epilogue_instructions=460.8
  )
  status, text, figures = report(monkeypatch, capsys, small, PACK, GATHERED)
  assert status == 0
  assert figures["epilogue_share"] == pytest.approx(0.1)
  assert figures["epilogue_share_at_k"]["576"] == figures["epilogue_share"]
  assert figures["epilogue_share_at_k"]["2048"] <= 0.06
  assert not figures["within_limits"]["epilogue"]
  assert "- epilogue: gate_pack at 512x576x1536: 10.0%" in text


def test_a_spill_at_a_small_k_is_not_excused(monkeypatch, capsys):
  small = dataclasses.replace(
    with_stats(PACK, spill_bytes=4), shape=Shape(512, 576, 1536), padded_k=576
  )
  status, _, figures = report(monkeypatch, capsys, small, GATHERED)
  assert status == 1
  assert figures["spills_total"] == 4


def test_one_small_shape(capsys):
  # Skips, or fails, where there is no compiler.
  compile_for_h200(lambda x: x, jax.ShapeDtypeStruct((8,), jnp.float32))
  status = kernel_report.main(["--shapes=3x320x256"])
  figures = json.loads(capsys.readouterr().out.splitlines()[-1])
  # The epilogue's share is missed at so small a K, and nothing else.
  assert status == 0
  assert figures["spills_total"] == 0
  assert figures["epilogue_share"] > 0.06
  assert figures["epilogue_share_at_k"] == {"320": figures["epilogue_share"]}
  assert figures["within_limits"] == {
    limit: limit != "epilogue" for limit in kernel_report.LIMITS
  }
  # gate_pack; both gathered kernels with and without y0, rows being split. So
  # few tokens are not trained on.
  assert figures["kernels"] == 9
  assert figures["max_registers"]["of_training"] is None
  assert figures["max_shared_memory_bytes"] > 8192
  assert "jax-cuda13-plugin" in figures["versions"]


@pytest.mark.slow
def test_the_kernels_of_training(capsys):
  # Skips, or fails, where there is no compiler.
  compile_for_h200(lambda x: x, jax.ShapeDtypeStruct((8,), jnp.float32))
  assert kernel_report.main(["--shapes=512x256x128"]) == 0
  *lines, last = capsys.readouterr().out.splitlines()
  figures = json.loads(last)
  # sddmm, and the three with sums, with and without y0, rows being split.
  text = "\n".join(lines)
  _, training = text.split("## Gathered products of training")
  for product, kind in gradient_kernels.KINDS.items():
    assert training.count(f"| {product.value} |") == 1
    assert training.count(f"| {product.value} + y0 |") == bool(kind.sums)
    parts = training.count(f"| add_parts of {product.value} ")
    assert parts == 2 * bool(kind.sums)
  assert figures["kernels"] == 9 + 7 + 6
  assert 0 < figures["max_registers"]["of_training"] <= 128


def test_the_shapes_that_are_asked_for():
  assert len(set(SHAPES)) == 6
  assert Shape(512, 576, 1536) in SHAPES


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--shapes=16384x2048", "'16384x2048' is no shape"),
    ("--shapes=axbxc", "'axbxc' is no shape"),
    ("--shapes=0x2048x5632", "has a size below 1"),
    ("--shape=1x2x3", "unrecognized arguments: --shape=1x2x3"),
  ],
)
def test_mistakes(flag, message, capsys):
  with pytest.raises(SystemExit) as caught:
    kernel_report.main([flag])
  assert caught.value.code == 2
  assert message in capsys.readouterr().err


def test_without_the_compiler(monkeypatch, capsys):
  monkeypatch.setattr(aot, "_has_plugin", lambda: False)
  monkeypatch.setattr(aot, "_APART", aot._APART / "nowhere")
  with pytest.raises(SystemExit) as caught:
    kernel_report.main(["--shapes=1x256x64"])
  assert caught.value.code == 2
  assert "make setup-aot" in capsys.readouterr().err
