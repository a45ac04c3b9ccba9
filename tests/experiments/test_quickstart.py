"""experiments/quickstart.py, from text to the report."""

import json
import re
import types

import numpy as np
import pytest
from absl import flags
from matplotlib import image

from experiments import quickstart, reference_losses, report
from tests.experiments import programs
from twell_jax import training

PLOTS = ("activity.png", "layers.png", "loss.png", "speed.png")
PREFILL_TOKENS = 64
STEPS = 12  # more than between restarts of the reference


@pytest.fixture(scope="module")
def arguments(corpus, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("quickstart")
  return [
    "-m",
    "experiments.quickstart",
    f"--workdir={workdir}",
    f"--prefill_tokens={PREFILL_TOKENS}",
    "--min_seconds=0",
    *programs.tiny_flags(
      {
        "data.corpus": corpus,
        "steps": STEPS,
        "model.dense_above": 1.0,  # sparse products from the first step on
        "reorder_neurons_every_steps": 5,
      }
    ),
  ]


@pytest.fixture(scope="module")
def workdir(arguments, environment):
  """The folder of a quickstart from beginning to end."""
  process = programs.run(arguments, environment=environment)
  assert process.returncode == 0, process.stderr
  (argument,) = (a for a in arguments if a.startswith("--workdir="))
  folder = programs.ROOT / argument.removeprefix("--workdir=")
  text = (folder / "report.md").read_text()
  assert text in process.stdout
  assert str(folder / "report.md") in process.stdout.splitlines()[-1]
  return folder


@pytest.fixture
def figures(workdir):
  return json.loads((workdir / "report.json").read_text())


def numbers(text, label):
  """The numbers in the table's row of that label, per cents as such."""
  (row,) = (
    line for line in text.splitlines() if line.startswith(f"| {label} |")
  )
  cells = row.removeprefix(f"| {label} |").strip(" |").split("|")
  return [float(re.sub(r"[^\d.]", "", cell)) for cell in cells]


def test_both_models_are_trained(workdir, figures):
  for name in ("sparse", "dense"):
    records = training.read_metrics(workdir / name, kind="train")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    coefficients = {record["l1_coefficient"] for record in records}
    assert (max(coefficients) > 0) == (name == "sparse")
    held_out = training.read_metrics(workdir / name, kind="held_out")
    # config.eval.batches of it during training, all of it in the report.
    assert figures["held_out_loss"][name] == pytest.approx(
      held_out[-1]["loss"], rel=0.05
    )
  # Same parameters and text: only λ tells the first steps apart.
  losses = [
    training.read_metrics(workdir / name, kind="train")[0]["cross_entropy"]
    for name in ("sparse", "dense")
  ]
  assert losses[0] == pytest.approx(losses[1], rel=1e-5)
  assert (workdir / "data").is_dir()
  assert not (workdir / "sparse" / "data").exists()


def test_the_figures(figures):
  d_ff = figures["config"]["model"]["d_ff"]
  for layers in figures["activity"].values():
    assert len(layers) == 2
    for layer in layers:
      assert 0 < layer["p50"] <= layer["p95"] <= layer["maximum"] <= d_ff
      assert 0 < layer["mean"] <= layer["maximum"]
      assert 0 < layer["alive_fraction"] <= 1
  assert len(figures["speed"]) == 4
  for row in figures["speed"]:
    assert row["ratio"] == pytest.approx(row["dense_ms"] / row["sparse_ms"])
  assert f"{PREFILL_TOKENS} tokens" in figures["speed"][0]["what"]
  assert figures["train_tokens_per_model"] == STEPS * 4 * 32
  assert figures["corpus_tokens"] > figures["held_out_tokens"] > 0
  embedding, norms = 300 * 32, 5 * 32
  attention, ffn = 2 * (2 * 32 * 32 + 2 * 32 * 16), 2 * 3 * 64 * 32
  assert figures["parameters"] == embedding + norms + attention + ffn


def test_the_sparse_model_has_the_losses_of_the_reference(workdir, figures):
  reference = figures["reference_losses"]
  assert reference["steps"] == STEPS
  records = training.read_metrics(workdir / "sparse", kind="train")
  assert [record["dense_fraction"] for record in records] == [
    [0.0, 0.0]
  ] * STEPS
  for record, losses in zip(
    records, reference["reference_at_logged_steps"], strict=True
  ):
    for name in ("step", "loss", "cross_entropy"):
      assert record[name] == pytest.approx(losses[name], rel=1e-6)
  assert reference["largest_relative_difference"] < 1e-6
  # The same steps as the run's, re-ordering included.
  assert reference["difference_from_logged"] == 0
  assert figures["dense_above"] == 1.0
  assert figures["sparse_from_step"] == [1, 1]


def test_the_report_says_what_the_figures_say(workdir, figures):
  text = (workdir / "report.md").read_text()
  losses = figures["held_out_loss"]
  assert numbers(text, "held-out loss, nats per token") == pytest.approx(
    [losses["sparse"], losses["dense"]], abs=5e-5
  )
  for layer, (sparse, dense) in enumerate(
    zip(figures["activity"]["sparse"], figures["activity"]["dense"])
  ):
    assert numbers(text, str(layer)) == pytest.approx(
      [
        sparse["mean"],
        sparse["p50"],
        sparse["p95"],
        sparse["maximum"],
        100 * sparse["alive_fraction"],
        dense["mean"],
      ],
      abs=0.51,
    )
  for row in figures["speed"]:
    assert numbers(text, row["what"]) == pytest.approx(
      [row["dense_ms"], row["sparse_ms"], row["ratio"]], abs=5.1e-3
    )
  assert numbers(text, "sparse products at all logged steps since") == [1, 1]
  headline = text.splitlines()[2]
  silent, increase, ratio = (
    float(number) for number in re.findall(r"([+-]?\d+\.\d+)[%×]", headline)
  )
  assert silent == pytest.approx(
    100 * report.silent_fraction(figures), abs=0.051
  )
  assert increase == pytest.approx(
    100 * report.loss_increase(figures), abs=0.051
  )
  assert ratio == pytest.approx(figures["speed"][0]["ratio"], abs=5.1e-3)
  assert f"{PREFILL_TOKENS} tokens" in headline
  assert figures["date"] in text
  assert figures["device"] in text


def test_the_plots(workdir):
  assert {path.name for path in workdir.glob("*.png")} == set(PLOTS)
  text = (workdir / "report.md").read_text()
  for name in PLOTS:
    assert f"({name})" in text
    pixels = image.imread(workdir / name)
    height, width = pixels.shape[:2]
    assert height > 200
    assert width > 400
    # Something is drawn: neither blank nor a single colour.
    sample = pixels[::5, ::5].reshape(-1, pixels.shape[-1])
    assert np.unique(sample, axis=0).shape[0] > 20


def test_a_second_call_trains_nothing_again(workdir, arguments, environment):
  def runs():
    return {
      path: (path.stat().st_mtime_ns, path.read_bytes())
      for name in ("sparse", "dense")
      for path in (workdir / name / "checkpoints").rglob("*")
      if path.is_file()
    } | {
      name: training.read_metrics(workdir / name)
      for name in ("sparse", "dense")
    }

  before = runs()
  report_before = json.loads((workdir / "report.json").read_text())
  process = programs.run(arguments, environment=environment)
  assert process.returncode == 0, process.stderr
  assert runs() == before
  again = json.loads((workdir / "report.json").read_text())
  for name in ("held_out_loss", "activity", "config", "parameters"):
    assert again[name] == report_before[name]


def test_losses_that_are_not_the_references_fail(monkeypatch):
  losses = reference_losses.Losses(1, 4.0, 3.0)
  made = reference_losses.Steps([losses], [losses._replace(loss=4.1)])
  monkeypatch.setattr(reference_losses, "make_steps", lambda *_, **__: made)
  values = types.SimpleNamespace(reference_steps=1, reference_tolerance=2e-4)
  monkeypatch.setattr(flags, "FLAGS", values)
  records = [{"kind": "train"} | losses._asdict()]
  with pytest.raises(FloatingPointError, match=r"step 1 is 0\.024 away"):
    quickstart.compare_with_reference(
      programs.tiny_config({}), batches=[], records=records
    )
  monkeypatch.setattr(values, "reference_tolerance", 0.1)
  figures = quickstart.compare_with_reference(
    programs.tiny_config({}), batches=[], records=records
  )
  assert figures["at_step"] == 1
  assert figures["difference_from_logged"] == 0


def test_models_of_another_config_are_refused(workdir, arguments, environment):
  report = (workdir / "report.json").read_bytes()
  changed = [*arguments, "--config.l1.coefficient=0.5"]
  process = programs.run(changed, environment=environment)
  assert process.returncode == 2
  assert "l1.coefficient: " in process.stderr
  assert "choose another workdir" in process.stderr
  assert (workdir / "report.json").read_bytes() == report


@pytest.mark.parametrize(
  ("arguments", "overrides", "message"),
  [
    (
      {"prefill_tokens": 10**6},
      {},
      r"prefill_tokens = 1000000 .*held_out_fraction",
    ),
    (
      {"reference_steps": 2},
      {"log_every_steps": 3},
      r"reference_steps = 2 .* log_every_steps = 3",
    ),
    ({}, {"model.activation": "silu"}, r"activation = 'silu' .* use 'relu'"),
    ({}, {"model.num_heads": 5}, r"d_model = 32 .* num_heads = 5"),
  ],
)
def test_mistakes_are_found_before_the_training(
  arguments, overrides, message, corpus, tmp_path, monkeypatch
):
  flag_values = {
    "workdir": str(tmp_path),
    "config": programs.tiny_config({"data.corpus": str(corpus)} | overrides),
    "prefill_tokens": 8,
    "min_seconds": 0.0,
    "reference_steps": 8,
  }
  values = types.SimpleNamespace(**flag_values | arguments)
  monkeypatch.setattr(flags, "FLAGS", values)
  with pytest.raises(ValueError, match=message):
    quickstart.main()
  assert not (tmp_path / "sparse").exists()


def test_the_figures_of_merit():
  figures = {
    "config": {"model": {"d_ff": 200}},
    "activity": {"sparse": [{"mean": 4.0}, {"mean": 16.0}]},
    "held_out_loss": {"sparse": 2.06, "dense": 2.0},
  }
  assert report.silent_fraction(figures) == pytest.approx(0.95)
  assert report.loss_increase(figures) == pytest.approx(0.03)
