r"""Which of the paper's models train on which devices, and what they exchange.

    python -m experiments.scale_report \
        --output=experiments/results/scale_report

Compiles the training step (memory_report.py) of every size, gated and not, as
the dense SiLU baseline and with the sparse layer, for one H200 and for eight on
meshes of each axis alone and of all three, and writes OUTPUT.json and
OUTPUT.md: peak memory of a device, whether it fits, and the bytes that a device
sends for the collectives of a step (collectives.py), by kind and mesh axes.

All with remat="attention", cuDNN's attention and chunked cross-entropy, for one
micro-batch of 16,384 tokens on each device; the devices along "tensor" share
theirs. Layers without up projection are compiled for 0.5B and 2B. About
three quarters of an hour on two cores; what is in OUTPUT.json is not compiled
again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax

from experiments import (
  cli,
  collectives,
  compile_cases,
  environment,
  memory_report,
)
from experiments import memory_frontier as frontier
from pallas_kernels import aot
from twell_jax import nn
from twell_jax.nn.config import PaperSize

TOKENS_PER_DEVICE = 16384
SEQ_LEN = 2048
MESHES = ("1x1x1", "8x1x1", "1x8x1", "1x1x8", "2x2x2")
# Whose collectives are written out one by one, in order.
_IN_FULL = "2b"
_SMALL_BYTES = 2**20


class Case(NamedTuple):
  """A step to be compiled.

  Attributes:
    size: Of the paper's models.
    gated: Whether it has an up projection.
    mesh: DATAxFSDPxTENSOR.
    side: "silu" or "mosaic" (`memory_frontier.SIDES`).
  """

  size: PaperSize
  gated: bool
  mesh: str
  side: str

  def config(self) -> nn.TransformerConfig:
    """The model."""
    return nn.paper_config(
      self.size,
      gated=self.gated,
      remat="attention",
      attention="cudnn",
      cross_entropy="chunked",
      **frontier.SIDES[self.side],
    )


def all_cases() -> list[Case]:
  """What is published, the largest model first."""
  sizes = reversed(get_args(PaperSize))
  models = [(size, True) for size in sizes] + [("2b", False), ("0p5b", False)]
  return [
    Case(size, gated, mesh, side)
    for size, gated in models
    for mesh in MESHES
    for side in ("mosaic", "silu")
  ]


def measure(case: Case) -> dict[str, Any]:
  """Compiles one step, in a process of its own; returns a row of the results.

  Returns:
    The case's fields, those of `memory_report.Memory`, `fits`, `sent_bytes` by
    "kind over axes", `sequence`, and where it was compiled.
  """
  # Nothing runs, and the plugin complains where there is no GPU.
  jax.config.update("jax_platforms", "cpu")
  aot.find_compiler()
  step = memory_report.measure(
    case.config(),
    mesh_shape=memory_report.parse_mesh(case.mesh),
    tokens_per_device=TOKENS_PER_DEVICE,
    seq_len=SEQ_LEN,
  )
  return {
    **case._asdict(),
    **step.memory._asdict(),
    "fits": memory_report.fits(step.memory.peak),
    "sent_bytes": {
      f"{kind} over {axes}": sent
      for (kind, axes), sent in collectives.total_bytes(
        step.collectives
      ).items()
    },
    "sequence": [
      {
        "kind": found.kind,
        "axes": "+".join(found.axes),
        "runs": found.runs,
        "shapes": list(found.shapes),
        "sent_bytes": found.sent_bytes,
      }
      for found in step.collectives
      if (found.runs or 1) * found.sent_bytes >= _SMALL_BYTES
    ],
    **frontier.where_compiled(),
  }


def markdown(rows: Sequence[Mapping[str, Any]], *, name: str) -> str:
  """The tables, and where they were made."""
  usable = f"{memory_report.USABLE:.0%}"
  lines = [
    "# The paper's models on 1 and 8 devices",
    "",
    "Compiled for H200s, not run: peak memory of a device in GiB, and GiB that"
    " a device sends for the collectives of one step, by mesh (data x fsdp x"
    f" tensor). A step is one micro-batch of {TOKENS_PER_DEVICE:,} tokens a"
    f" device, in sequences of {SEQ_LEN:,}; devices along tensor share theirs,"
    " so that a step of 1x1x8 has an eighth of the tokens of 1x8x1. bfloat16"
    " computation, float32 parameters, AdamW, remat `attention`, cuDNN's"
    " attention, chunked cross-entropy; the dense baseline is SiLU by autodiff."
    f" Fits: the peak is at most {usable} of 80 GB (H100) or 141 GB (H200); the"
    " rest is for CUDA, NCCL and the libraries' workspaces, which are not in"
    " it.",
    "",
    "| size | gated | mesh | parameters and moments | peak, dense |"
    " peak, sparse | fits 80 GB: dense, sparse | fits 141 GB: dense, sparse |"
    " sent, dense | sent, sparse |",
    "|---|---|---|---|---|---|---|---|---|---|",
  ]
  by_case = {compile_cases.case_of(Case, row): row for row in rows}
  for case, sparse in by_case.items():
    if case.side != "mosaic":
      continue
    dense = by_case[case._replace(side="silu")]
    fitting = [
      ", ".join(
        "yes" if row["fits"][device] else "**no**" for row in (dense, sparse)
      )
      for device in memory_report.DEVICES
    ]
    cells = [
      case.size,
      "yes" if case.gated else "no",
      case.mesh,
      _gibibytes(sparse["parameters"] + sparse["optimizer"]),
      _gibibytes(dense["peak"]),
      _gibibytes(sparse["peak"]),
      *fitting,
      _gibibytes(sum(dense["sent_bytes"].values())),
      _gibibytes(sum(sparse["sent_bytes"].values())),
    ]
    lines.append(f"| {' | '.join(cells)} |")
  lines += ["", f"## Collectives of {_IN_FULL}, sparse", ""]
  for case, row in by_case.items():
    if (case.size, case.gated, case.side) != (_IN_FULL, True, "mosaic"):
      continue
    if not row["sequence"]:
      continue
    totals = "; ".join(
      f"{what} {_gibibytes(sent)} GiB"
      for what, sent in row["sent_bytes"].items()
      if sent >= _SMALL_BYTES
    )
    lines += [
      f"### {case.mesh}",
      "",
      f"Sent by a device in a step: {totals}. In the order of the program,"
      " without those that send less than a MiB:",
      "",
      "| kind | axes | runs | results on a device | MiB sent in a run |",
      "|---|---|---|---|---|",
      *(
        f"| {found['kind']} | {found['axes']} | {found['runs']} |"
        f" {' '.join(found['shapes'])} | {found['sent_bytes'] / 2**20:.1f} |"
        for found in row["sequence"]
      ),
      "",
    ]
  sentences = dict.fromkeys(environment.sentence(row) for row in rows)
  return "\n".join(
    [
      *lines,
      *sentences,
      "",
      "    python -m experiments.scale_report"
      f" --output=experiments/results/{name}",
      "",
    ]
  )


def _gibibytes(size: int) -> str:
  return f"{size / 2**30:.2f}"


def main() -> int:
  """Compiles what is missing and writes the files."""
  compile_cases.publish(all_cases(), measure, markdown)
  return 0


if __name__ == "__main__":
  compile_cases.define_flags()
  cli.run(main)
