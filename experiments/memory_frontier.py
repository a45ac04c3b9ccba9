r"""Peak memory of training steps against the FLOPs that buy it, for H200s.

    python -m experiments.memory_frontier \
        --output=experiments/results/memory_report

Compiles what experiments/memory_report.py compiles, for every paper size on 8
devices and 1.5B on one, with every rematerialisation policy, for the sparse
layer and the dense one (at 1.5B on 8, also for other dense rivals), and writes
OUTPUT.json, OUTPUT.md and the plots OUTPUT_frontier.png (1.5B on 8 devices) and
OUTPUT_sizes.png.

About an hour on two cores. OUTPUT.json is written after each step that was
compiled; what is in it is not compiled again, so that an interrupted run goes
on where it was, and a changed program needs a new OUTPUT.

Rematerialisation computes products again. Their FLOPs are counted as a share of
the dense step's, by formula. With m = d_model, a product multiplies, per token,

    query, out           m · heads · head_dim each
    key, value           m · kv_heads · head_dim each
    scores and mixing    2 · heads · head_dim · seq_len / 2  (causal: half)
    gate, up, down       m · d_ff each
    logits               m · vocab_size, once

and a step is three forward passes, since each product has two gradients. What
is computed again, in each layer:

    matmuls     nothing
    attention   query, key, value and out
    layer       these, scores and mixing, gate and up

A layer that recomputes its FFN adds gate and up to "none", "matmuls" and
"attention". Of the sparse layer, up is computed at active neurons only and not
counted. Nor is it counted what that layer saves otherwise: the axis says what
memory costs, not how fast a step is.
"""

import pathlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import jax
from absl import flags

from experiments import (
  cli,
  compile_cases,
  environment,
  memory_plots,
  memory_report,
)
from pallas_kernels import aot
from twell_jax import nn
from twell_jax.nn.config import REMAT_POLICIES, PaperSize

# Fields of `TransformerConfig` by name of the layer.
SIDES: Mapping[str, dict[str, Any]] = MappingProxyType(
  {**memory_report.DENSE, "mosaic": {"implementation": "mosaic"}}
)
TOKENS_PER_DEVICE = 16384
SEQ_LEN = 2048


class Case(NamedTuple):
  """A step to be compiled.

  Attributes:
    size: Of the paper's models.
    devices: Over which parameters and sequences are cut.
    cross_entropy: As in `TransformerConfig`.
    remat: As in `TransformerConfig`.
    side: A key of `SIDES`.
  """

  size: PaperSize
  devices: int
  cross_entropy: str
  remat: str
  side: str

  def config(self) -> nn.TransformerConfig:
    """The model."""
    fields: dict[str, Any] = {
      "attention": "cudnn",
      "cross_entropy": self.cross_entropy,
      "remat": self.remat,
    }
    return nn.paper_config(self.size, **fields, **SIDES[self.side])


def all_cases() -> list[Case]:
  """What is published: 1.5B on 8 devices with all rivals, then the others."""
  cases = [
    Case("1p5b", 8, "chunked", remat, side)
    for remat in REMAT_POLICIES
    for side in SIDES
    # Whole layers are recomputed with their FFNs.
    if (remat, side) != ("layer", "silu_recompute")
  ]
  models: list[tuple[PaperSize, int, str]] = [
    *((size, 8, "chunked") for size in get_args(PaperSize) if size != "1p5b"),
    ("1p5b", 1, "chunked"),
    ("1p5b", 8, "full"),
  ]
  return cases + [
    Case(*model, remat, side)
    for model in models
    for remat in REMAT_POLICIES
    for side in ("silu", "mosaic")
  ]


def extra_flops(config: nn.TransformerConfig, *, seq_len: int) -> float:
  """FLOPs of what is computed again over those of the dense step."""
  head_dim = config.resolved_head_dim
  projections = (
    2 * config.d_model * head_dim * (config.num_heads + config.num_kv_heads)
  )
  scores = config.num_heads * head_dim * seq_len
  neurons = config.d_model * config.d_ff
  matrices = 3 if config.gated else 2
  layer = projections + scores + matrices * neurons
  logits = config.d_model * config.vocab_size
  forward = config.num_layers * layer + logits

  is_dense = config.activation != "relu" or config.implementation == "reference"
  before_down = (matrices - 1 if is_dense else 1) * neurons
  again = {
    "none": 0,
    "matmuls": 0,
    "attention": projections,
    "layer": projections + scores + before_down,
  }[config.remat]
  if config.ffn_residuals == "recomputed" and config.remat != "layer":
    again += before_down
  return config.num_layers * again / (3 * forward)


def measure(case: Case) -> dict[str, Any]:
  """Compiles one step, in a process of its own; returns a row of the results.

  Returns:
    The case's fields, those of `memory_report.Memory`, extra_flops, and where
    it was compiled.
  """
  # Nothing runs, and the plugin complains where there is no GPU.
  jax.config.update("jax_platforms", "cpu")
  aot.find_compiler()
  config = case.config()
  step = memory_report.measure(
    config,
    mesh_shape=(1, case.devices, 1),
    tokens_per_device=TOKENS_PER_DEVICE,
    seq_len=SEQ_LEN,
  )
  return {
    **case._asdict(),
    **step.memory._asdict(),
    "extra_flops": round(extra_flops(config, seq_len=SEQ_LEN), 4),
    **where_compiled(),
  }


def where_compiled() -> dict[str, Any]:
  """`environment.describe`, with the compiler's packages."""
  where = environment.describe()
  for package in ("jax-cuda13-plugin", "nvidia-cudnn-cu13"):
    where["versions"][package] = metadata.version(package)
  return where


def case_of(row: Mapping[str, Any]) -> Case:
  """The case that a row of the results is of."""
  return compile_cases.case_of(Case, row)


def markdown(rows: Sequence[Mapping[str, Any]], *, name: str) -> str:
  """The tables, and where they were made.

  Args:
    rows: Of all cases.
    name: Of the plots' files, up to the underscore.
  """
  lines = [
    "# Peak memory of a training step on H200s",
    "",
    "What XLA's buffer assignment says of one device, in GiB: compiled, not"
    f" run. {TOKENS_PER_DEVICE:,} tokens per device in sequences of"
    f" {SEQ_LEN:,}, bfloat16 computation with float32 parameters, AdamW, FSDP"
    " over the devices, cuDNN's attention, on both sides. `silu` is the dense"
    " baseline by autodiff, `silu_recompute` and `reference` are its rivals"
    " (see experiments/memory_report.py). Which of them divides matters: where"
    " nothing is rematerialised, autodiff of the SiLU layer keeps six arrays of"
    " a number for each token and neuron (with SiLU's own intermediates), while"
    " `reference` keeps two, as a policy makes `silu` do.",
    "",
    f"![peak against extra FLOPs]({name}_frontier.png)",
    "",
    "| size | devices | cross-entropy | remat |"
    + "".join(f" {side} |" for side in SIDES)
    + " mosaic / silu | mosaic / reference | FFN residuals, mosaic / silu |",
    "|---|---|---|---|" + "---|" * (len(SIDES) + 3),
  ]
  groups: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
  for row in rows:
    groups.setdefault(case_of(row)[:-1], {})[row["side"]] = row
  for model, sides in groups.items():
    peaks = [
      f"{memory_plots.gibibytes(sides[side]['peak']):.2f}"
      if side in sides
      else ""
      for side in SIDES
    ]
    dense, sparse = sides["silu"], sides["mosaic"]
    ratios = [
      _ratio(sparse, dense, "peak"),
      _ratio(sparse, sides.get("reference"), "peak"),
      _ratio(sparse, dense, "ffn_residuals"),
    ]
    lines.append(f"| {' | '.join([*map(str, model), *peaks, *ratios])} |")
  lines += [
    "",
    f"![all sizes]({name}_sizes.png)",
    "",
    "## 1.5B on 8 devices: what the peak is made of",
    "",
    "Residuals and gradients are parts of the temporaries; FFN residuals, from"
    " the layer's shapes, a part of the residuals. Extra FLOPs are those of"
    " products computed again in the backward pass, over the dense step's"
    " (see experiments/memory_frontier.py).",
    "",
    "| cross-entropy | remat | layer | extra FLOPs |"
    + "".join(f" {part} |" for part in _PARTS.values()),
    "|---|---|---|---|" + "---|" * len(_PARTS),
  ]
  for row in rows:
    if (row["size"], row["devices"]) != ("1p5b", 8):
      continue
    parts = [f"{memory_plots.gibibytes(row[part]):.2f}" for part in _PARTS]
    lines.append(
      f"| {row['cross_entropy']} | {row['remat']} | {row['side']} |"
      f" {row['extra_flops']:.1%} | {' | '.join(parts)} |"
    )
  sentences = dict.fromkeys(environment.sentence(row) for row in rows)
  return "\n".join(
    [
      *lines,
      "",
      *sentences,
      "",
      "    python -m experiments.memory_frontier"
      f" --output=experiments/results/{name}",
      "",
    ]
  )


def _ratio(
  sparse: Mapping[str, Any], dense: Mapping[str, Any] | None, part: str
) -> str:
  """Sparse over dense, or nothing where there is no dense figure."""
  if dense is None or not dense[part]:
    return ""
  return f"{sparse[part] / dense[part]:.3f}"


_PARTS = {
  "peak": "peak",
  "parameters": "parameters",
  "optimizer": "optimizer",
  "temporaries": "temporaries",
  "residuals": "residuals",
  "gradients": "gradients",
  "ffn_residuals": "FFN residuals",
}


def main() -> int:
  """Compiles what is missing and writes the files."""
  rows = compile_cases.publish(all_cases(), measure, markdown)
  memory_plots.write(rows, output=pathlib.Path(flags.FLAGS.output))
  return 0


if __name__ == "__main__":
  compile_cases.define_flags()
  cli.run(main)
