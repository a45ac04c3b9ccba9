import dataclasses
import json
import types

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from experiments import (
  autotune,
  gradient_kernels,
  timing,
  tuning_problems,
)
from experiments.kernel_shapes import Shape
from pallas_kernels import target, tuning
from pallas_kernels.gather_config import GatherConfig
from tests.helpers.kernels import compile_for_h200

TINY = Shape(4, 256, 64)


@pytest.fixture(autouse=True)
def tables(monkeypatch, tmp_path):
  tuning.load.cache_clear()
  monkeypatch.setattr(tuning, "TABLES", tmp_path / "tuned")
  yield tmp_path / "tuned"
  tuning.load.cache_clear()


def last_line(capsys):
  return json.loads(capsys.readouterr().out.splitlines()[-1])


def problem(kernel, shape=TINY):
  return tuning_problems.make_problem(
    kernel, shape, device=target.H200, active_share=0.05, seed=3
  )


# One of each kind of problem.
@pytest.mark.parametrize(
  "kernel",
  [
    "gate_pack",
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ("gathered_down", "sddmm_spmm")
    ),
  ],
)
def test_a_dry_run(kernel, capsys, tables, monkeypatch):
  monkeypatch.setattr(autotune, "_DRY_CONFIGS", 2)
  arguments = [f"--kernel={kernel}", f"--shapes={TINY}", "--interpret"]
  assert autotune.main(arguments) == 0
  summary = last_line(capsys)
  assert summary["dry"]
  assert summary["table"] is None
  (result,) = summary["results"]
  assert result["kernel"] == kernel
  assert result["shape"]["m"] == 4
  assert result["timed"] == 2
  assert "median_ms" not in result
  fields = dataclasses.fields(tuning.KERNELS[kernel].config)
  assert list(result["config"]) == [field.name for field in fields]
  assert not tables.exists()


@pytest.mark.parametrize("kernel", sorted(tuning.KERNELS))
def test_a_wrong_result_is_found(kernel):
  with plgpu.force_gpu_interpret_mode():
    wrong = problem(kernel)
    right = wrong._expected
    wrong.check(wrong.default)
    # One number of each array in turn.
    leaves, tree = jax.tree.flatten(right)
    for index, leaf in enumerate(leaves):
      changed = leaf.at[(1,) + (0,) * (leaf.ndim - 1)].add(1)
      wrong._expected = jax.tree.unflatten(
        tree, [*leaves[:index], changed, *leaves[index + 1 :]]
      )
      with pytest.raises(AssertionError, match="1 numbers differ"):
        wrong.check(wrong.default)


class FakeProblem(tuning_problems.Problem):
  """Three configs, of which the second spills and the third is the fastest."""

  kernel = "gathered_down"
  sizes = types.MappingProxyType({"m": 64, "n": 512, "k": 256, "width": 128})
  default = GatherConfig(rows_per_step=4, segment_length=4)
  spills = GatherConfig(rows_per_step=8, segment_length=8)
  fails = GatherConfig(rows_per_step=1, segment_length=1)
  fastest = GatherConfig(rows_per_step=2, segment_length=2)
  calls = 2
  wrong: tuple[GatherConfig, ...] = ()

  def __init__(self):
    self.checked = []

  def configs(self):
    yield from (self.spills, self.default, self.fails, self.fastest)

  def compiled(self, config):
    if config == self.fails:
      raise NotImplementedError("no such\nlayout")
    return [Stats(0), Stats(12 if config == self.spills else 0)]

  def check(self, config):
    self.checked.append(config)
    if config in self.wrong:
      raise AssertionError("7 numbers differ")

  def contender(self, config):
    assert config in self.checked
    return timing.Contender(lambda: config, [()], None)


@dataclasses.dataclass
class Stats:
  spill_bytes: int


@pytest.fixture
def fake(monkeypatch):
  """Tuning on a device that takes 2 ms for the fastest and else 6 ms."""
  problem = FakeProblem()
  monkeypatch.setattr(autotune, "make_problem", lambda *_, **__: problem)
  monkeypatch.setattr(autotune.aot, "find_compiler", lambda: None)
  monkeypatch.setattr(autotune.target, "device_of", lambda x: target.H200)

  def interleaved(contenders, **_):
    configs = {name: each.function() for name, each in contenders.items()}
    return {
      name: timing.Timing(ms, ms - 1, ms + 1)
      for name, config in configs.items()
      for ms in [2.0 if config == problem.fastest else 6.0]
    }

  monkeypatch.setattr(autotune.timing, "interleaved", interleaved)
  return problem


def test_the_fastest_right_config_is_written(fake, capsys):
  arguments = ["--kernel=gathered_down", "--shapes=64x256x512"]
  assert autotune.main(arguments) == 0
  assert fake.checked == [fake.default, fake.fastest]
  (result,) = last_line(capsys)["results"]
  assert result["config"] == dataclasses.asdict(fake.fastest)
  assert result["median_ms"] == 1.0
  assert result["default_median_ms"] == 3.0
  spills, fails = result["skipped"]
  assert spills["why"] == "spills 12 bytes"
  assert fails["why"] == "does not compile: no such layout"
  tuned = tuning.for_gathered(target.H200, 60, 512, 256, 128, matrices=1)
  assert tuned == fake.fastest
  (entry,) = tuning.load(tuning.table_path("NVIDIA H200"), "NVIDIA H200")
  assert entry.measured.jax == jax.__version__
  assert entry.measured.active_share == pytest.approx(30 / 5632)


def test_the_table_that_is_asked_for(fake, tables, tmp_path, capsys):
  path = tmp_path / "other" / "table.json"
  arguments = ["--kernel=gathered_down", "--shapes=64x256x512"]
  assert autotune.main([*arguments, f"--output={path}"]) == 0
  assert last_line(capsys)["table"] == str(path)
  assert len(tuning.load(path, "NVIDIA H200")) == 1
  assert not tables.exists()


def test_nothing_is_timed_after_a_wrong_result(fake, tables):
  fake.wrong = (fake.fastest,)
  with pytest.raises(AssertionError, match=r"rows_per_step=2.*: 7 numbers"):
    autotune.main(["--kernel=gathered_down", "--shapes=64x256x512"])
  assert not tables.exists()


def test_without_a_default_there_is_no_comparison(fake, capsys, monkeypatch):
  monkeypatch.setattr(fake, "spills", fake.default)
  with pytest.raises(SystemExit) as caught:
    autotune.main(["--kernel=gathered_down", "--shapes=64x256x512"])
  assert caught.value.code == 2
  assert "nothing to compare with" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(tuning.KERNELS))
def test_configs_are_different_and_compile(kernel):
  with plgpu.force_gpu_interpret_mode():  # few calls
    # Lists of neurons are as long as there are tokens.
    tuned = problem(kernel, Shape(64, 256, 64))
  configs = list(tuned.configs())
  assert len(set(configs)) == len(configs) > 20
  # Skips, or fails, where there is no compiler.
  compile_for_h200(lambda x: x, jax.ShapeDtypeStruct((8,), jnp.float32))
  for config in (tuned.default, configs[-1]):
    first, *_ = tuned.compiled(config)
    assert first.name == kernel
    assert first.spill_bytes == 0


def test_what_needs_much_memory_is_not_tried(monkeypatch):
  with plgpu.force_gpu_interpret_mode():
    tuned = problem("spmm_two_values")
  sizes = {"rows": 4096, "columns": 16384, "width": 16384, "slots": 2**22}
  monkeypatch.setattr(tuned, "lists", gradient_kernels.Lists(**sizes))
  lengths = {config.segment_length for config in tuned.configs()}
  # Two sums of 256 float32 in about 2²³ / (length + 1) parts.
  assert min(lengths) == 4
  monkeypatch.setattr(tuned, "sums", 1)
  assert min(config.segment_length for config in tuned.configs()) == 1


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--shapes=1x256x64"], "required: --kernel"),
    (["--kernel=spmm", "--shapes=1x256x64"], "invalid choice: 'spmm'"),
    (["--kernel=gate_pack"], "--shapes is needed"),
    (["--kernel=gate_pack", "--shapes=1x2"], "'1x2' is no shape"),
    (
      ["--kernel=gate_pack", "--interpret", "--output=table.json"],
      "a dry run writes no table",
    ),
    (
      ["--kernel=gate_pack", "--interpret", "--active_share=1.5"],
      "--active_share=1.5 must be in (0, 1)",
    ),
  ],
)
def test_mistakes(flags, message, capsys):
  with pytest.raises(SystemExit) as caught:
    autotune.main(flags)
  assert caught.value.code == 2
  assert message in capsys.readouterr().err


def test_refuses_a_device_that_is_no_hopper(monkeypatch, capsys):
  monkeypatch.setattr(autotune.aot, "find_compiler", lambda: None)
  with pytest.raises(SystemExit) as caught:
    autotune.main(["--kernel=gate_pack", "--shapes=1x256x64"])
  assert caught.value.code == 2
  assert "need a Hopper GPU" in capsys.readouterr().err
