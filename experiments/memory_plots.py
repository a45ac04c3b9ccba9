"""The plots of experiments/memory_frontier.py: peak against extra FLOPs."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib

matplotlib.use("Agg")  # no window is needed

import matplotlib.pyplot as plt


class _Style(NamedTuple):
  """How a layer is drawn.

  Attributes:
    label: Its name in the legend.
    colour: One that stays apart for colour-blind readers and in grey.
    fill: Of its markers: "full", or "none" to show what lies below.
    size: Of its markers, in points.
  """

  label: str
  colour: str
  fill: Literal["full", "none"] = "full"
  size: int = 7


_STYLES = {
  "silu": _Style("dense SiLU", "#30638e"),
  "silu_recompute": _Style("dense SiLU, gate and up recomputed", "#66a182"),
  # Often where the first is.
  "reference": _Style("dense ReLU, z and u kept", "#edae49", "none", 11),
  "mosaic": _Style("sparse (mosaic)", "#d1495b"),
}
_MARKERS = {"none": "o", "matmuls": "s", "attention": "^", "layer": "D"}
_SIZE_NAMES = {"0p5b": "0.5B", "1b": "1B", "1p5b": "1.5B", "2b": "2B"}

Rows = Sequence[Mapping[str, Any]]


def gibibytes(size: int) -> float:
  """A number of bytes in GiB."""
  return size / 2**30


def write(rows: Rows, *, output: pathlib.Path) -> None:
  """Writes OUTPUT_frontier.png and OUTPUT_sizes.png."""
  for name, figure in (
    ("frontier", _frontier(rows)),
    ("sizes", _all_sizes(rows)),
  ):
    path = output.with_name(f"{output.name}_{name}.png")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _frontier(rows: Rows) -> plt.Figure:
  """1.5B on 8 devices, each point with its peak."""
  figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
  model = _of_model(rows, "1p5b", 8)
  _draw(axes, model)
  _label(axes, model)
  axes.margins(x=0.1)
  axes.set_title("Peak memory of a training step, 1.5B on 8 H200s")
  axes.set_xlabel(
    "products computed again in the backward pass, % of the dense step's FLOPs"
  )
  axes.set_ylabel("peak per device, GiB")
  axes.legend(frameon=False, handles=_legend())
  return figure


def _all_sizes(rows: Rows) -> plt.Figure:
  models = [*((size, 8) for size in _SIZE_NAMES), ("1p5b", 1)]
  figure, line = plt.subplots(
    1, len(models), figsize=(15, 4), sharex=True, layout="constrained"
  )
  for axes, (size, devices) in zip(line, models, strict=True):
    _draw(axes, _of_model(rows, size, devices))
    plural = "s" if devices > 1 else ""
    axes.set_title(f"{_SIZE_NAMES[size]}, {devices} H200{plural}")
  figure.supxlabel(
    "products computed again in the backward pass, % of the dense step's FLOPs"
  )
  figure.supylabel("peak per device, GiB")
  figure.legend(
    handles=_legend(), loc="outside upper center", ncols=4, frameon=False
  )
  return figure


def _of_model(rows: Rows, size: str, devices: int) -> Rows:
  wanted = (size, devices, "chunked")
  return [
    row
    for row in rows
    if (row["size"], row["devices"], row["cross_entropy"]) == wanted
  ]


def _draw(axes: plt.Axes, rows: Rows) -> None:
  """A line for each layer, a marker for each policy."""
  for side, style in _STYLES.items():
    points = [row for row in rows if row["side"] == side]
    x = [100 * row["extra_flops"] for row in points]
    y = [gibibytes(row["peak"]) for row in points]
    axes.plot(x, y, color=style.colour, linewidth=1, alpha=0.6)
    for row, flops, peak in zip(points, x, y, strict=True):
      axes.plot(
        flops,
        peak,
        _MARKERS[row["remat"]],
        color=style.colour,
        fillstyle=style.fill,
        markersize=style.size,
      )
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)


def _label(axes: plt.Axes, rows: Rows) -> None:
  """Writes each policy and peak beside its point.

  The ReLU layer's are left out where they are those of the SiLU layer.
  """
  peaks = {row["remat"]: row["peak"] for row in rows if row["side"] == "silu"}
  for row in rows:
    style = _STYLES[row["side"]]
    difference = row["peak"] / peaks[row["remat"]] - 1
    if row["side"] == "reference" and abs(difference) < 0.1:
      continue
    axes.annotate(
      f"{row['remat']} {gibibytes(row['peak']):.1f}",
      (100 * row["extra_flops"], gibibytes(row["peak"])),
      xytext=(7, 5),
      textcoords="offset points",
      color=style.colour,
      fontsize=8,
    )


def _legend() -> list[plt.Line2D]:
  """Lines for the layers, then markers for the policies."""
  lines = [
    plt.Line2D([], [], linewidth=3, color=style.colour, label=style.label)
    for style in _STYLES.values()
  ]
  markers = [
    plt.Line2D(
      [], [], marker=marker, linestyle="", color="0.35", label=f"remat: {name}"
    )
    for name, marker in _MARKERS.items()
  ]
  return lines + markers
