r"""What L1 and re-initialisation do to a model of 12 M parameters.

    python -m experiments.training_curves --workdir=workdir/curves \
        --output=experiments/results/training_curves

Trains configs/cpu_12m.py for 1200 updates without L1, with it, with dead
neurons re-initialised after every update, and with λ adjusted to a target, from
the same seed on the same text, and writes OUTPUT.md, OUTPUT.json and plots of
the held-out loss, the active neurons per token and the neurons that are alive.

About 20 minutes each on two cores. When it is interrupted and started again it
goes on where it was.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window is needed

import matplotlib.pyplot as plt
import numpy as np
from absl import flags
from matplotlib import ticker
from ml_collections import ConfigDict

from configs import cpu_12m
from experiments import cli, environment, quickstart

STEPS = 1200
# What is different in each run, by its folder in the workdir.
RUNS: Mapping[str, dict[str, Any]] = MappingProxyType(
  {
    "dense": {"l1.coefficient": 0.0},
    "l1": {},
    "reinit": {"dead_neurons.reinitialize_every_steps": 1},
    "target": {"l1.target_active": 50.0},
  }
)
_NAMES = {
  "dense": "λ = 0",
  "l1": "λ = {coefficient:g}",
  "reinit": "λ = {coefficient:g}, re-initialised",
  "target": "λ for {target:g} active",
}
# Hues that stay apart for colour-blind readers.
_COLOURS = {
  "dense": "#30638e",
  "l1": "#d1495b",
  "reinit": "#edae49",
  "target": "#66a182",
}

Records = Sequence[Mapping[str, Any]]


def config_of(run: str, *, steps: int = STEPS) -> ConfigDict:
  """The config of one of `RUNS`."""
  config = cpu_12m.get_config()
  config.steps = steps
  config.update_from_flattened_dict(RUNS[run])
  return config


def train(run: str, *, workdir: pathlib.Path) -> None:
  """Trains a run, or what is left of it; notes where it was trained."""
  folder = workdir / run
  where = folder / "environment.json"
  config = config_of(run)
  config.data.cache_dir = str(workdir / "data")
  if not where.exists():
    folder.mkdir(parents=True, exist_ok=True)
    where.write_text(json.dumps(environment.describe()), encoding="utf-8")
  quickstart.train_to_end(config, folder)


def read_records(folder: pathlib.Path) -> Records:
  """The metrics of a run."""
  lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  return [json.loads(line) for line in lines]


def summarize(records: Records) -> dict[str, Any]:
  """The curves of a run: means over its layers, and its last state."""
  held_out = [r for r in records if r["kind"] == "held_out"]
  trained = [r for r in records if r["kind"] == "train"]
  last = trained[-1]
  return {
    "held_out": {
      "step": [r["step"] for r in held_out],
      "loss": [round(r["loss"], 4) for r in held_out],
      "active": [round(float(np.mean(r["active_mean"])), 1) for r in held_out],
    },
    "train": {
      "step": [r["step"] for r in trained],
      "active": [round(float(np.mean(r["active_mean"])), 1) for r in trained],
      "alive": [
        round(1 - float(np.mean(r["dead_fraction"])), 4) for r in trained
      ],
      "l1_coefficient": [float(f"{r['l1_coefficient']:.3g}") for r in trained],
    },
    "last": {
      "active_by_layer": [round(a, 1) for a in held_out[-1]["active_mean"]],
      "alive_by_layer": [round(1 - d, 3) for d in last["dead_fraction"]],
    },
  }


def markdown(figures: Mapping[str, Any], *, name: str) -> str:
  """The tables, the plots, and where it was trained."""
  runs, config = figures["runs"], figures["config"]
  model, data = config["model"], config["data"]
  batch_tokens = data["batch_size"] * data["seq_len"]
  window = config["dead_neurons"]["window_tokens"]
  dense_loss = runs["dense"]["held_out"]["loss"][-1]
  lines = [
    "# L1 and re-initialisation, at 12 M parameters on a CPU",
    "",
    f"{model['num_layers']} layers of {model['d_ff']:,} neurons, d_model"
    f" {model['d_model']}; {config['steps']} updates of {batch_tokens:,} tokens"
    " of the Python standard library, the same in all runs, with one seed"
    " (configs/cpu_12m.py). Held out are"
    f" {config['eval']['batches'] * batch_tokens:,} tokens of other files. A"
    f" neuron is dead if it was silent for {window:,} tokens, else alive.",
    "",
    "| | held-out loss | of λ = 0 | active per token | of the neurons | alive |"
    " λ at the end |",
    "|---|---|---|---|---|---|---|",
  ]
  for run, figure in runs.items():
    held_out, trained = figure["held_out"], figure["train"]
    active = held_out["active"][-1]
    lines.append(
      f"| {_name(run, config)} | {held_out['loss'][-1]:.4f} |"
      f" {held_out['loss'][-1] / dense_loss - 1:+.1%} | {active:.1f} |"
      f" {active / model['d_ff']:.2%} | {trained['alive'][-1]:.1%} |"
      f" {trained['l1_coefficient'][-1]:g} |"
    )
  lines += [
    "",
    *(f"![{what}]({name}_{what}.png)" for what in _PLOTS),
    "",
    "At the end, layer by layer:",
    "",
    "| | "
    + " | ".join(f"layer {i}" for i in range(config["model"]["num_layers"]))
    + " |",
    "|---|" + "---|" * config["model"]["num_layers"],
  ]
  for what, key, form in (
    ("active", "active_by_layer", "{:.1f}"),
    ("alive", "alive_by_layer", "{:.0%}"),
  ):
    for run, figure in runs.items():
      cells = " | ".join(form.format(v) for v in figure["last"][key])
      lines.append(f"| {what}, {_name(run, config)} | {cells} |")
  sentences = dict.fromkeys(
    environment.sentence(figure["where"]) for figure in runs.values()
  )
  return "\n".join(
    [
      *lines,
      "",
      *sentences,
      "",
      "    python -m experiments.training_curves --workdir=workdir/curves"
      f" --output=experiments/results/{name}",
      "",
    ]
  )


# What is plotted: the records it is read from, its field and its axis.
_PLOTS = {
  "loss": ("held_out", "loss", "held-out loss, nats per token", "linear"),
  "active": ("held_out", "active", "active neurons per token, held out", "log"),
  "alive": ("train", "alive", "share of neurons that are alive", "linear"),
}


def plot(what: str, figures: Mapping[str, Any]) -> plt.Figure:
  """One of `_PLOTS`, a curve for each run."""
  kind, field, label, scale = _PLOTS[what]
  figure, axes = plt.subplots(figsize=(6.4, 3.6))
  for run, curves in figures["runs"].items():
    axes.plot(
      curves[kind]["step"],
      curves[kind][field],
      color=_COLOURS[run],
      label=_name(run, figures["config"]),
    )
  axes.set_xlabel("step")
  axes.set_ylabel(label)
  axes.set_yscale(scale)
  if scale == "log":  # 60, not 6 · 10¹
    plain = ticker.FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
  axes.grid(alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(frameon=False)
  return figure


def _name(run: str, config: Mapping[str, Any]) -> str:
  return _NAMES[run].format(
    coefficient=config["l1"]["coefficient"],
    target=RUNS["target"]["l1.target_active"],
  )


def main() -> int:
  """Trains what is missing and writes the files."""
  workdir = pathlib.Path(flags.FLAGS.workdir)
  output = pathlib.Path(flags.FLAGS.output)
  runs = {}
  for run in RUNS:
    print(run, flush=True)
    train(run, workdir=workdir)
    where = (workdir / run / "environment.json").read_text(encoding="utf-8")
    runs[run] = summarize(read_records(workdir / run))
    runs[run]["where"] = json.loads(where)
  figures = {"config": config_of("l1").to_dict(), "runs": runs}
  output.parent.mkdir(parents=True, exist_ok=True)
  output.with_suffix(".json").write_text(
    json.dumps(figures, indent=1) + "\n", encoding="utf-8"
  )
  output.with_suffix(".md").write_text(
    markdown(figures, name=output.name), encoding="utf-8"
  )
  for what in _PLOTS:
    figure = plot(what, figures)
    path = output.with_name(f"{output.name}_{what}.png")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
  return 0


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Where the runs write.")
  flags.DEFINE_string("output", None, "Where to write, without suffix.")
  flags.mark_flags_as_required(["workdir", "output"])
  cli.run(main)
