"""Runs experiments/bench_ffn.py at the published shapes, as a Markdown table.

    python -m experiments.bench_ffn_table --output=experiments/results/bench_ffn

writes OUTPUT.md, and OUTPUT.json with every figure of every run. Each row is a
process of its own.
"""

import json
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

from absl import flags

from experiments import cli, environment


class Case(NamedTuple):
  """Flags of one run, and the ratio that is asked of it, if any."""

  mode: str
  tokens: int
  d_model: int = 2048
  d_ff: int = 5632
  active: int = 30
  dtype: str = "float32"
  target: float | None = None


CASES = (
  Case("forward", 512, target=2.4),
  Case("decode", 1, target=2.8),
  Case("train", 2048, target=3.5),
  Case("forward", 512, 576, 1536, 7, target=2.0),
  Case("forward", 512, dtype="bfloat16", target=2.1),
  Case("forward", 8),
  Case("decode", 1, dtype="bfloat16"),
  Case("decode", 1, active=300),
  Case("forward", 512, active=100),
  Case("forward", 512, active=300),
  Case("forward", 512, active=700),
  Case("forward", 512, active=2816),
  Case("forward", 512, active=2816, dtype="bfloat16"),
  Case("forward", 512, 576, 1536, 768),
  Case("train", 2048, active=300),
  Case("train", 2048, active=2816),
  Case("train", 2048, 576, 1536, 7),
)


def run(case: Case) -> dict[str, Any]:
  """Runs the benchmark; returns its JSON line, with the case's target."""
  arguments = [
    f"--{name}={value}"
    for name, value in case._asdict().items()
    if name != "target"
  ]
  output = subprocess.run(
    [sys.executable, "-m", "experiments.bench_ffn", *arguments],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  ).stdout
  return json.loads(output.splitlines()[-1]) | {"target": case.target}


def markdown(rows: list[dict[str, Any]]) -> str:
  """The table, and where it was measured."""
  lines = [
    "# Sparse against dense feed-forward layer",
    "",
    "Medians in one process per row; the dense layer at its best (see"
    " experiments/bench_ffn.py). Temporaries are those of XLA's buffer"
    " assignment.",
    "",
    "| mode | tokens | d_model, d_ff | active | dtype | dense ms | sparse ms |"
    " ratio | target | temporaries, dense → sparse MB |",
    "|---|---|---|---|---|---|---|---|---|---|",
  ]
  for row in rows:
    target = "" if row["target"] is None else f"≥ {row['target']}"
    lines.append(
      f"| {row['mode']} | {row['tokens']} | {row['d_model']}, {row['d_ff']} |"
      f" {row['active']:.0f} | {row['dtype']} | {row['dense_ms']:.2f} |"
      f" {row['sparse_ms']:.2f} | {row['ratio']:.2f} | {target} |"
      f" {row['dense_temp_bytes'] / 1e6:.1f} →"
      f" {row['sparse_temp_bytes'] / 1e6:.1f} |"
    )
  lines += [
    "",
    environment.sentence(rows[-1]),
    "",
    "    python -m experiments.bench_ffn_table"
    " --output=experiments/results/bench_ffn",
    "",
  ]
  return "\n".join(lines)


def main() -> int:
  """Runs every case and writes the two files."""
  rows = []
  for case in CASES:
    rows.append(run(case))
    print(json.dumps(rows[-1]), flush=True)
  output = pathlib.Path(flags.FLAGS.output)
  output.parent.mkdir(parents=True, exist_ok=True)
  output.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")
  output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
  return 0


if __name__ == "__main__":
  flags.DEFINE_string("output", None, "Where to write, without suffix.")
  flags.mark_flag_as_required("output")
  cli.run(main)
