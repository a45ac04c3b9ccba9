import json
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from experiments import bench_ffn
from tests.experiments import programs
from twell_jax.ops import sparse_ffn

KEYS = {
  "mode",
  "tokens",
  "d_model",
  "d_ff",
  "active",
  "dtype",
  "implementation",
  "hot_neurons",
  "dense_ms",
  "sparse_ms",
  "ratio",
  "dense_temp_bytes",
  "sparse_temp_bytes",
  "device",
  "versions",
  "date",
  "revision",
}
OPTIONS = {
  "mode": "forward",
  "d_model": 32,
  "d_ff": 64,
  "tokens": 8,
  "active": 8.0,
  "dtype": "float32",
  "gated": True,
  "implementation": "xla",
  "hot_neurons": 0,
  "min_seconds": 0.0,
  "seed": 0,
}


def check_output(output, options):
  """Checks what the benchmark prints, and returns the last line's figures."""
  *table, last_line = output.splitlines()
  figures = json.loads(last_line)
  assert figures.keys() >= KEYS
  for name in ("mode", "tokens", "d_model", "d_ff", "dtype", "implementation"):
    assert figures[name] == options[name]
  for side in ("dense", "sparse"):
    lower, upper = figures[f"{side}_spread_ms"]
    assert 0 < lower <= figures[f"{side}_ms"] <= upper < math.inf
    assert figures[f"{side}_temp_bytes"] >= 0
  assert figures["ratio"] == pytest.approx(
    figures["dense_ms"] / figures["sparse_ms"], rel=0.01, abs=1e-3
  )
  assert figures["versions"]["jax"] == jax.__version__
  # Of 4 × 8 tokens: a mean of 8 with a standard error well below 1.
  assert figures["active"] == pytest.approx(options["active"], abs=2)
  for name in ("dense", "sparse"):
    assert any(line.startswith(name) for line in table)
  return figures


def test_the_program(environment):
  options = OPTIONS | {"mode": "decode", "dtype": "bfloat16"}
  process = programs.run(
    [
      "-m",
      "experiments.bench_ffn",
      *(f"--{name}={value}" for name, value in options.items()),
    ],
    environment=environment,
  )
  assert process.returncode == 0, process.stderr
  assert process.stderr == ""
  check_output(process.stdout, options)


@pytest.mark.parametrize(
  "changes",
  [
    {"mode": "forward", "gated": False},
    {"mode": "train", "implementation": "reference"},
    {"mode": "train"},
    {"mode": "train", "hot_neurons": 16},
    {"mode": "forward", "hot_neurons": 64, "gated": False},
  ],
)
def test_every_mode(changes, monkeypatch, capsys):
  options = OPTIONS | changes
  monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(**options))
  assert bench_ffn.main() == 0
  figures = check_output(capsys.readouterr().out, options)
  assert figures["gated"] == options["gated"]
  assert figures["hot_neurons"] == options["hot_neurons"]
  if options["mode"] == "train":
    assert figures["dense_layout"] == "[in, out]"


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (["--dtype=bfloat16"], "need a Hopper GPU .* use implementation='xla'"),
    ([], "--dtype=float32: add --dtype=bfloat16"),
    (["--hot_neurons=65", "--dtype=bfloat16"], "hot_neurons = 65 .* d_ff = 64"),
  ],
)
def test_mosaic_without_what_it_needs(options, message, environment):
  process = programs.run(
    [
      "-m",
      "experiments.bench_ffn",
      "--mode=train",
      "--implementation=mosaic",
      "--d_model=32",
      "--d_ff=64",
      *options,
    ],
    environment=environment,
  )
  assert process.returncode == 2
  assert re.match(f"error: .*{message}", process.stderr)
  assert process.stderr.count("\n") == 1
  assert process.stdout == ""


def test_hot_neurons_are_those_that_fire_most():
  layer = layer_of(8.0)
  hot = bench_ffn._sorted_by_rate(layer, 3)
  fired = np.asarray(activity_of(hot).fired)
  assert fired[:51].sum() > 0.5 * fired.sum()
  assert fired.sum() == activity_of(layer).fired.sum()
  np.testing.assert_array_equal(
    np.sort(np.asarray(hot.down), axis=0), np.sort(layer.down, axis=0)
  )


def test_more_active_than_neurons(monkeypatch):
  options = OPTIONS | {"active": 65.0}
  monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(**options))
  with pytest.raises(ValueError, match=r"active=65.0 .* d_ff=64"):
    bench_ffn.main()


def layer_of(active, *, d_ff=512, d_model=64, gated=True):
  return bench_ffn.random_layer(
    np.random.default_rng(1),
    d_model=d_model,
    d_ff=d_ff,
    active=active,
    gated=gated,
  )


def activity_of(layer, *, tokens=2048):
  x = bench_ffn.random_tokens(
    np.random.default_rng(2), tokens=tokens, d_model=layer.gate.shape[1]
  )
  return sparse_ffn(x, *layer).activity


@pytest.mark.parametrize("active", [0, 1, 8, 30, 300, 512])
def test_the_mean_activity_is_the_one_asked_for(active):
  counts = activity_of(layer_of(active)).active
  mean = float(jnp.mean(counts.astype(jnp.float32)))
  if active in (0, 512):
    assert mean == active
  else:
    assert mean == pytest.approx(active, rel=0.15)


def test_firing_rates_have_a_heavy_tail():
  rates = np.sort(np.asarray(activity_of(layer_of(8.0)).fired) / 2048)
  # A tenth of the neurons makes more than half of the activations, and the
  # median neuron fires several times less than the mean.
  assert rates[-51:].sum() > 0.5 * rates.sum()
  assert np.median(rates) < 0.5 * np.mean(rates)
  # Yet the rest is not dead.
  assert np.mean(rates > 0) > 0.5


def test_a_layer_without_gate():
  layer = layer_of(8.0, gated=False)
  assert layer.up is None
  assert sparse_ffn(jnp.ones((2, 64)), *layer).y.shape == (2, 64)


@pytest.mark.parametrize("active", [-1.0, 512.5])
def test_activity_out_of_range(active):
  with pytest.raises(ValueError, match=rf"active={active} must be from 0"):
    layer_of(active)
