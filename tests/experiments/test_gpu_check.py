"""The H200 script, dry: interpreted, and with workers that misbehave."""

import ast
import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import gpu_check
from experiments.on_gpu import inputs, layers, pack_checks, plan, worker
from experiments.on_gpu.supervisor import Budget, Record, supervise
from tests.experiments import programs
from twell_jax.ops import sparse_ffn

# One stage of every kind.
ONLY = (
  "gate_pack, 64/8, cluster 2, 16x64x256: edges",
  "gathered_up_down, split segments, with y0, 4x256x40: not finite",
  "op, gated, no hot neurons, 1x5x20: edges",
  "gate product",
)

# Packages that a GPU machine need not have. JAX and Flax bring numpy, scipy and
# absl themselves.
ABSENT = (
  "jaxtyping",
  "ml_collections",
  "matplotlib",
  "grain",
  "tensorboardX",
  "jsonlines",
  "hypothesis",
)
WITHOUT = f"""
import importlib.machinery, sys

class Without(importlib.machinery.PathFinder):
  @classmethod
  def find_spec(cls, name, path=None, target=None):
    if name.split(".")[0] in {ABSENT!r} and path is None:
      path = [entry for entry in sys.path if "site-packages" not in entry]
    return super().find_spec(name, path, target)

usual = importlib.machinery.PathFinder
sys.meta_path = [Without if f is usual else f for f in sys.meta_path]
"""


@pytest.mark.slow
def test_dry_run_on_a_machine_with_little_installed(environment, tmp_path):
  (tmp_path / "sitecustomize.py").write_text(WITHOUT)
  output = tmp_path / "result.json"
  process = programs.run(
    [
      "-m",
      "experiments.gpu_check",
      "--dry",
      f"--output={output}",
      *(f"--only={name}" for name in ONLY),
    ],
    environment=environment | {"PYTHONPATH": str(tmp_path)},
  )
  assert process.returncode == 0, process.stderr
  *table, last_line = process.stdout.splitlines()
  summary = json.loads(last_line)
  assert summary["statuses"] == {"PASS": 3, "DONE": 1}
  assert (summary["failed"], summary["left_out"]) == ([], 0)
  assert any("mean nothing" in line for line in table)

  result = json.loads(output.read_text())
  assert result["summary"] == summary
  assert result["dry"]
  assert not result["device"]["has_jaxtyping"]
  stages = {stage["name"]: stage for stage in result["stages"]}
  assert len(stages) == len(ONLY)
  for name in ONLY[:3]:
    assert stages[name]["error"] <= stages[name]["limit"]
    assert stages[name]["same_bits_twice"]
  contenders = stages["gate product of 4 tokens"]["contenders"]
  assert "gate_pack" in contenders
  for figures in contenders.values():
    lower, upper = figures["quartiles_ms"]
    assert 0 < lower <= figures["median_ms"] <= upper
    # What an interpreter takes is no result.
    assert figures["ratio_to_dense"] is None


def test_no_hopper(environment, tmp_path):
  process = programs.run(
    ["-m", "experiments.gpu_check", f"--output={tmp_path / 'result.json'}"],
    environment=environment,
  )
  assert process.returncode == 2
  assert "need a Hopper GPU" in process.stderr
  assert "--dry" in process.stderr
  assert process.stdout == ""


# Stages of the workers below: name and what happens.
STAGES = {
  "good": {"status": "PASS", "error": 0, "limit": 0, "same_bits_twice": True},
  "wrong": {"status": "FAIL", "error": 9, "limit": 0, "same_bits_twice": True},
  "hangs": "time.sleep(60)",
  "dies": "os._exit(7)",
  "breaks": {"status": "ERROR", "message": "illegal address"},
  "last": {"status": "PASS", "error": 0, "limit": 1, "same_bits_twice": True},
}
FAKE_WORKER = f"""
import json, os, sys, time
request = json.loads(sys.argv[-1])
events = os.fdopen(request["events"], "w")
def emit(**event):
  print(json.dumps(event), file=events, flush=True)
stages = {STAGES!r}
emit(event="device", device={{"device": "none"}})
emit(event="plan", stages=list(stages))
for name, what in stages.items():
  if name not in request["skip"]:
    emit(event="begin", name=name, limit_s=0.5)
    if isinstance(what, str):
      exec(what)
    emit(event="end", result=what)
    if name == "breaks":
      sys.exit(9)
"""


def run_main(tmp_path, source, *options):
  output = tmp_path / "result.json"
  code = gpu_check.main(
    [f"--output={output}", *options], worker=(sys.executable, "-c", source)
  )
  return code, output


def test_stages_that_hang_die_or_break_do_not_stop_the_rest(tmp_path, capsys):
  code, output = run_main(tmp_path, FAKE_WORKER)
  assert code == 1
  result = json.loads(output.read_text())
  statuses = {stage["name"]: stage["status"] for stage in result["stages"]}
  assert statuses == {
    "good": "PASS",
    "wrong": "FAIL",
    "hangs": "HUNG",
    "dies": "DIED",
    "breaks": "ERROR",
    "last": "PASS",
  }
  messages = {stage["name"]: stage.get("message") for stage in result["stages"]}
  assert messages["hangs"] == "no end within 0 s"
  assert messages["dies"] == "the process ended with exit code 7"
  assert result["left_out"] == []
  assert result["summary"]["failed"] == ["wrong", "hangs", "dies", "breaks"]
  verdicts = {target["verdict"] for target in result["targets"]}
  assert verdicts == {"not measured"}
  printed = capsys.readouterr().out
  assert "HUNG  hangs: no end within 0 s" in printed
  assert "Not as it should be: 4" in printed


def test_what_the_time_did_not_suffice_for(tmp_path, capsys):
  source = FAKE_WORKER.replace("limit_s=0.5", "limit_s=60")
  began = time.time()
  code, output = run_main(tmp_path, source, "--minutes=0.03")
  assert time.time() - began < 20
  assert code == 1
  result = json.loads(output.read_text())
  assert [stage["name"] for stage in result["stages"]] == ["good", "wrong"]
  assert result["left_out"] == ["hangs", "dies", "breaks", "last"]
  assert "Left out: 4\nhangs\ndies\nbreaks\nlast\n" in capsys.readouterr().out


def test_a_worker_that_does_not_start(tmp_path, capsys):
  code, _ = run_main(tmp_path, "import sys; sys.exit(3)")
  assert code == 2
  error = capsys.readouterr().err
  assert error.startswith("error: the worker ended with exit code 3 before any")
  assert error.count("\n") == 1


def test_the_file_is_whole_after_every_stage(tmp_path):
  path = tmp_path / "result.json"
  record = Record(path, {"seed": 1})
  seen = []

  def on_result(name, result):
    seen.append((name, json.loads(path.read_text())["stages"][-1]))

  now = time.time()
  supervise(
    (sys.executable, "-c", FAKE_WORKER),
    {},
    record=record,
    budget=Budget(now, now + 60),
    on_result=on_result,
  )
  assert [name for name, _ in seen] == list(STAGES)
  assert [written["name"] for _, written in seen] == list(STAGES)


class Clock:
  """Seconds that pass when a stage says so."""

  def __init__(self):
    self.now = 0.0

  def time(self):
    return self.now

  def stage(self, name, kind, seconds):
    def run():
      self.now += seconds
      return {"status": "DONE"}

    return worker.Stage(name, kind, run)


def run_stages(stages, *, clock, skip=(), ends=100.0):
  """The names of stages that began, their results, and what it returned."""
  began, results = [], []

  def emit(event, **fields):
    if event == "begin":
      began.append(fields["name"])
    else:
      results.append(fields["result"])

  clock.now = 0.0
  usable = worker.run_stages(
    stages, skip=skip, begins=0.0, ends=ends, limit_s=1.0, emit=emit
  )
  return began, results, usable


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(worker, "time", clock)
  return clock


def test_checks_leave_time_for_timings(clock):
  stages = [clock.stage(f"check {i}", "check", 20) for i in range(4)]
  stages.append(clock.stage("timing", "timing", 10))
  # At first, half of the time is for checks.
  began, _, usable = run_stages(stages, clock=clock, ends=95.0)
  assert began == ["check 0", "check 1", "check 2", "timing", "check 3"]
  assert usable
  # The last check would take longer than what is left.
  began, _, usable = run_stages(stages, clock=clock, ends=85.0)
  assert began == ["check 0", "check 1", "check 2", "timing"]
  assert usable
  began, _, _ = run_stages(stages, clock=clock, skip=["check 1", "timing"])
  assert began == ["check 0", "check 2", "check 3"]


def raising(error):
  def run():
    raise error

  return run


def test_a_stage_that_raises(clock):
  good = worker.Stage("good", "check", lambda: {"status": "PASS"})
  bad = worker.Stage("bad", "check", raising(ValueError("no such\ntile")))
  began, results, usable = run_stages([bad, good], clock=clock)
  assert began == ["bad", "good"]
  assert results[0]["status"] == "ERROR"
  assert results[0]["message"].startswith("ValueError: no such (test_gpu_check")
  assert results[1] == {"status": "PASS"}
  assert usable


def test_after_an_error_of_the_device_nothing_is_trusted(clock):
  good = worker.Stage("good", "check", lambda: {"status": "PASS"})
  bad = worker.Stage(
    "bad", "check", raising(jax.errors.JaxRuntimeError("hang"))
  )
  began, results, usable = run_stages([bad, good], clock=clock)
  assert began == ["bad"]
  assert results[0]["status"] == "ERROR"
  assert not usable


def test_a_wrong_kernel_fails(monkeypatch):
  """What is compared is what the kernel gave."""
  pack = pack_checks._packed

  def dropping_one(x, gate):
    z = pack_checks._exact_z(x, gate)
    z = z.at[jnp.unravel_index(jnp.argmax(z), z.shape)].set(0)
    return pack(z, tile_width=64, slots=16)

  monkeypatch.setattr(pack_checks, "_pack", lambda config: dropping_one)
  config = pack_checks.GatePackConfig(tile_n=64, tile_width=64, slots=16)
  shape = plan.Shape(16, 64, 256)
  result = pack_checks._check(config, "heavy tail", shape, 1)
  assert result["status"] == "FAIL"
  assert result["wrong"]["counts"] == 1
  assert result["same_bits_twice"]


def test_targets():
  stage, contender = plan.TARGETS[0].stage, plan.TARGETS[0].contender
  for ratio, verdict in ((0.9, "met"), (0.8, "missed"), (None, "not measured")):
    stages = {stage: {"contenders": {contender: {"ratio_to_dense": ratio}}}}
    first, *others = plan.verdicts(stages)
    assert (first["measured"], first["verdict"]) == (ratio, verdict)
    assert {other["verdict"] for other in others} == {"not measured"}


def test_targets_are_stages_that_are_timed():
  from experiments.on_gpu import timings

  names = {
    stage.name for stage in timings.stages(plan.FULL, seed=0, is_dry=False)
  }
  assert {target.stage for target in plan.TARGETS} <= names
  assert set(timings._FIRST) <= names


@pytest.mark.parametrize("rates", plan.RATES)
@pytest.mark.parametrize("active", [2, 20])
def test_layers_fire_at_the_rates_asked_for(rates, active):
  d_ff, d_model, tokens = 256, 128, 4096
  asked = inputs.firing_rates(
    np.random.default_rng(0), rates, d_ff=d_ff, active=active
  )
  assert asked.sum() == pytest.approx(active, rel=1e-6)
  layer = inputs.timed_layer(inputs.key(0, "layer"), asked, d_model=d_model)
  x = inputs.timed_tokens(inputs.key(0, "x"), tokens=tokens, d_model=d_model)
  activity = sparse_ffn(x, *layer).activity
  mean = float(jnp.mean(activity.active.astype(jnp.float32)))
  assert mean == pytest.approx(active, rel=0.2)
  measured = np.asarray(activity.fired) / tokens
  assert np.abs(measured - asked).max() < 0.1


def test_layers_are_split_by_measured_rates():
  made = layers.make_layers(plan.DRY, 3, 2, plan.HEAVY_TAIL, 2)
  assert 0 < made.hot_neurons < plan.DRY.layer[1]
  assert 0.5 < made.hot_share <= 1
  x = inputs.timed_tokens(
    inputs.key(0, "x"), tokens=256, d_model=plan.DRY.layer[0]
  )
  for mixed, by_rate in zip(made.mixed, made.by_rate, strict=True):
    fired = sparse_ffn(x, *by_rate).activity.fired
    assert fired[: made.hot_neurons].sum() > fired[made.hot_neurons :].sum()
    assert fired.sum() == sparse_ffn(x, *mixed).activity.fired.sum()


def test_edges_are_what_they_say():
  edges = inputs.Edges(tile_width=64, slots=8, row_width=96)
  shape = plan.Shape(16, 40, 256)
  x, gate, _ = inputs.gate_inputs(0, "edges", shape, edges)
  active = x.astype(np.float32) @ gate.astype(np.float32).T > 0
  per_tile = active.reshape(16, 4, 64).sum(2).max(1)
  assert per_tile[:5].tolist() == [0, 1, 8, 9, 64]
  assert active.sum(1)[5:7].tolist() == [96, 97]
  tiny_x, tiny_gate, z = inputs.gate_inputs(0, "subnormal", shape, edges)
  assert z is not None
  exact = tiny_x.astype(np.float64) @ tiny_gate.astype(np.float64).T
  np.testing.assert_array_equal(z.astype(np.float64), exact)
  assert 0 < np.abs(exact).max() < np.finfo(np.float32).tiny


def test_the_stand_in_has_what_our_code_imports():
  root = pathlib.Path(gpu_check.__file__).parents[1]
  stand_in = root / "experiments/on_gpu/stand_ins/jaxtyping.py"
  names = set()
  for package in ("experiments", "pallas_kernels", "twell_jax"):
    for path in (root / package).rglob("*.py"):
      for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping":
          names |= {alias.name for alias in node.names}
  provided: dict[str, Any] = {}
  exec(stand_in.read_text(encoding="utf-8"), provided)
  assert names <= set(provided["__all__"])
  assert set(provided["__all__"]) <= provided.keys()
