"""The quickstart's report: Markdown and plots from figures and metrics."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window is needed

import matplotlib.pyplot as plt
import numpy as np

from experiments import environment

# Two hues that stay apart for colour-blind readers and in grey.
_COLOURS = {"sparse": "#d1495b", "dense": "#30638e"}
_LAYER_COLOURS = ("#00798c", "#edae49", "#d1495b", "#66a182", "#2e4057")

Records = Mapping[str, Sequence[Mapping[str, Any]]]


def write(
  figures: Mapping[str, Any], *, records: Records, directory: pathlib.Path
) -> pathlib.Path:
  """Writes report.md and its plots.

  Args:
    figures: What experiments/quickstart.py measured, and `sparse_from_step`.
    records: The metrics of the sparse and of the dense run.
    directory: Where to write.

  Returns:
    The path of report.md.
  """
  plots = {
    "loss.png": _plot_loss(records, figures),
    "activity.png": _plot_activity(records["sparse"], figures),
    "layers.png": _plot_layers(figures),
    "speed.png": _plot_speed(figures),
  }
  for name, figure in plots.items():
    figure.savefig(directory / name, dpi=120, bbox_inches="tight")
    plt.close(figure)
  path = directory / "report.md"
  path.write_text(_markdown(figures), encoding="utf-8")
  return path


def silent_fraction(figures: Mapping[str, Any]) -> float:
  """Share of the sparse model's activations that are zero on held-out text."""
  d_ff = figures["config"]["model"]["d_ff"]
  means = [layer["mean"] for layer in figures["activity"]["sparse"]]
  return 1 - float(np.mean(means)) / d_ff


def loss_increase(figures: Mapping[str, Any]) -> float:
  """Held-out loss of the sparse model over that of its twin, minus 1."""
  losses = figures["held_out_loss"]
  return losses["sparse"] / losses["dense"] - 1


def sparse_from_step(
  records: Sequence[Mapping[str, Any]],
) -> list[int | None]:
  """Since which step each layer has been computed by sparse products.

  Args:
    records: The metrics of a run.

  Returns:
    For each layer the first logged step after the last one that was computed by
    dense products for all tokens; None if that is the last one logged.
  """
  train = _of_kind(records, "train")
  sparse_since: list[int | None] = [None] * len(train[0]["dense_fraction"])
  for record in train:
    for layer, dense_fraction in enumerate(record["dense_fraction"]):
      if dense_fraction == 1:
        sparse_since[layer] = None
      elif sparse_since[layer] is None:
        sparse_since[layer] = record["step"]
  return sparse_since


def _markdown(figures: Mapping[str, Any]) -> str:
  config, losses = figures["config"], figures["held_out_loss"]
  model = config["model"]
  prefill = figures["speed"][0]
  lines = [
    "# Quickstart: a sparse language model and its dense twin",
    "",
    f"{silent_fraction(figures):.1%} of the sparse model's feed-forward"
    " activations are silent on held-out text, at a held-out loss"
    f" {abs(loss_increase(figures)):.1%}"
    f" {'above' if loss_increase(figures) > 0 else 'below'} its dense twin's;"
    " on"
    f" {prefill['what'].split(', ')[1].removeprefix('prefill of ')} of that"
    " text its feed-forward layers run"
    f" {prefill['ratio']:.2f}× as fast as the same weights run densely.",
    "",
    "| | sparse | dense twin |",
    "|---|---|---|",
    f"| L1 coefficient λ | {config['l1']['coefficient']:g} | 0 |",
    f"| held-out loss, nats per token | {losses['sparse']:.4f} |"
    f" {losses['dense']:.4f} |",
    "| active neurons per token, mean of layers |"
    f" {_mean_active(figures, 'sparse'):.1f} |"
    f" {_mean_active(figures, 'dense'):.1f} |",
    "",
    f"{model['num_layers']} layers, d_model {model['d_model']}, d_ff"
    f" {model['d_ff']}, {figures['parameters']:,} parameters; both saw"
    f" {figures['train_tokens_per_model']:,} tokens of a corpus of"
    f" {figures['corpus_tokens']:,}, and were evaluated on"
    f" {figures['held_out_tokens']:,} tokens of documents that neither saw"
    f" ({figures['held_out_bytes_per_token']:.2f} bytes per token).",
    "",
    _reference_sentence(figures),
    "",
    "![loss](loss.png)",
    "",
    "## Activity on held-out text",
    "",
    f"Active neurons per token, of {model['d_ff']}; alive: active at some"
    " token.",
    "",
    "| layer | sparse: mean | median | p95 | max | alive | dense twin: mean |",
    "|---|---|---|---|---|---|---|",
    *(
      f"| {i} | {s['mean']:.1f} | {s['p50']:.0f} | {s['p95']:.0f} |"
      f" {s['maximum']} | {s['alive_fraction']:.1%} | {d['mean']:.1f} |"
      for i, (s, d) in enumerate(
        zip(figures["activity"]["sparse"], figures["activity"]["dense"])
      )
    ),
    "",
    "![activity of the layers](layers.png)",
    "",
    "## From dense to sparse products",
    "",
    *_switch(figures),
    "",
    "![activity during training](activity.png)",
    "",
    "## Speed of the trained sparse model",
    "",
    "The same weights and held-out text, in one process, in turn; medians."
    " Dense is the dense layer at its best: ordinary products, in the faster of"
    " two layouts of the kernels.",
    "",
    "| | dense ms | sparse ms | ratio |",
    "|---|---|---|---|",
    *(
      f"| {row['what']} | {row['dense_ms']:.2f} | {row['sparse_ms']:.2f} |"
      f" {row['ratio']:.2f}× |"
      for row in figures["speed"]
    ),
    "",
    "![speed](speed.png)",
    "",
    f"{environment.sentence(figures)} {figures['minutes']:.1f} minutes since"
    " the last start.",
    "",
    f"    {figures['command']}",
    "",
  ]
  return "\n".join(lines)


def _reference_sentence(figures: Mapping[str, Any]) -> str:
  reference = figures["reference_losses"]
  return (
    "The sparse model's losses are the reference implementation's: of its first"
    f" {reference['steps']} steps, made again beside those of dense layers that"
    f" set out from its state every {reference['restart_every_steps']} steps,"
    " none has a loss or a cross entropy further apart than"
    f" {reference['largest_relative_difference']:.1e}, relatively; a difference"
    f" of {reference['tolerance']:.0e} would have failed. What the run had"
    " logged of these steps came out again"
    f" {_within(reference['difference_from_logged'])}."
  )


def _within(difference: float) -> str:
  return f"to within {difference:.1e}" if difference else "to the last bit"


def _switch(figures: Mapping[str, Any]) -> list[str]:
  """Since when which layer has been sparse, and what decides it."""
  config, share = figures["config"], figures["dense_above"]
  rule = "is more than the implementation computes by sparse products"
  if share is not None:
    limit = share * config["model"]["d_ff"]
    rule = f"is above {share:.1%} of the neurons, {limit:.0f} of them"
  steps = figures["sparse_from_step"]
  layers = [f"layer {layer}" for layer in range(len(steps))]
  cells = ["never" if step is None else str(step) for step in steps]
  return [
    "While the sparse model trains, a layer is computed by dense products as"
    f" long as the mean number of active neurons {rule}. The device decides it"
    " in every step.",
    "",
    f"| | {' | '.join(layers)} |",
    f"|---{'|---' * len(layers)}|",
    f"| sparse products at all logged steps since | {' | '.join(cells)} |",
  ]


def _mean_active(figures: Mapping[str, Any], name: str) -> float:
  return float(np.mean([layer["mean"] for layer in figures["activity"][name]]))


def _of_kind(
  records: Sequence[Mapping[str, Any]], kind: str
) -> Sequence[Mapping[str, Any]]:
  return [record for record in records if record["kind"] == kind]


def _axes(title: str, xlabel: str, ylabel: str) -> tuple[plt.Figure, plt.Axes]:
  figure, axes = plt.subplots(figsize=(7, 3.6))
  axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
  axes.grid(alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)
  return figure, axes


def _plot_loss(records: Records, figures: Mapping[str, Any]) -> plt.Figure:
  figure, axes = _axes("Loss", "step", "cross entropy, nats per token")
  for name, run in records.items():
    steps = [record["step"] for record in _of_kind(run, "train")]
    losses = [record["cross_entropy"] for record in _of_kind(run, "train")]
    axes.plot(
      steps, losses, color=_COLOURS[name], alpha=0.5, label=f"{name}, training"
    )
    held_out = _of_kind(run, "held_out")
    axes.plot(
      [record["step"] for record in held_out],
      [record["loss"] for record in held_out],
      "o--",
      color=_COLOURS[name],
      markersize=4,
      label=f"{name}, held-out",
    )
  reference = figures["reference_losses"]["reference_at_logged_steps"]
  axes.plot(
    [losses["step"] for losses in reference],
    [losses["cross_entropy"] for losses in reference],
    "k+",
    label="sparse, training by the reference",
  )
  axes.legend(frameon=False)
  return figure


def _plot_activity(
  records: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]
) -> plt.Figure:
  figure, axes = _axes(
    "Active neurons per token while the sparse model trains",
    "step",
    f"active of {figures['config']['model']['d_ff']}",
  )
  train = _of_kind(records, "train")
  steps = [record["step"] for record in train]
  for layer in range(figures["config"]["model"]["num_layers"]):
    colour = _LAYER_COLOURS[layer % len(_LAYER_COLOURS)]
    mean = [record["active_mean"][layer] for record in train]
    p95 = [record["active_p95"][layer] for record in train]
    axes.plot(steps, mean, color=colour, label=f"layer {layer}: mean")
    axes.plot(steps, p95, ":", color=colour, label="95th percentile")
    since = figures["sparse_from_step"][layer]
    if since is not None:
      axes.plot(
        since,
        mean[steps.index(since)],
        "o",
        color=colour,
        markeredgecolor="black",
        label=f"sparse products since step {since}",
      )
  axes.set_yscale("log")
  if figures["dense_above"] is not None:
    axes.axhline(
      figures["dense_above"] * figures["config"]["model"]["d_ff"],
      color="grey",
      linestyle="--",
      linewidth=1,
      label="dense products above",
    )
  # Beside the axes, where it covers no curve.
  axes.legend(
    frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1)
  )
  return figure


def _plot_layers(figures: Mapping[str, Any]) -> plt.Figure:
  figure, axes = _axes(
    "Active neurons per token on held-out text",
    "layer",
    f"mean active of {figures['config']['model']['d_ff']}",
  )
  layers = np.arange(len(figures["activity"]["sparse"]))
  for name, shift in (("sparse", -0.2), ("dense", 0.2)):
    means = [layer["mean"] for layer in figures["activity"][name]]
    bars = axes.bar(
      layers + shift, means, width=0.38, color=_COLOURS[name], label=name
    )
    axes.bar_label(bars, fmt="%.0f", fontsize=8)
  axes.set_xticks(layers)
  axes.legend(frameon=False)
  return figure


def _plot_speed(figures: Mapping[str, Any]) -> plt.Figure:
  figure, axes = _axes(
    "Time of the sparse model over that of the same weights run densely",
    "sparse time / dense time (shorter is faster)",
    "",
  )
  rows = figures["speed"][::-1]
  bars = axes.barh(
    [row["what"] for row in rows],
    [1 / row["ratio"] for row in rows],
    color=_COLOURS["sparse"],
    height=0.55,
  )
  labels = axes.bar_label(
    bars, [f"{row['ratio']:.2f}× as fast" for row in rows], padding=4
  )
  for label in labels:  # readable across the line of the dense time
    label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
  axes.axvline(1, color=_COLOURS["dense"], linestyle="--", label="dense")
  axes.margins(x=0.25)
  axes.legend(frameon=False, loc="lower right")
  return figure
