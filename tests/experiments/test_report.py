"""experiments/report.py on figures of a run that never was."""

import re
from typing import Any

import pytest

from experiments import report


def record(step, *dense_fraction):
  return {
    "kind": "train",
    "step": step,
    "cross_entropy": 4.0 - step / 100,
    "dense_fraction": list(dense_fraction),
    "active_mean": [40.0, 20.0, 10.0],
    "active_p95": [80.0, 60.0, 50.0],
  }


# Sparse from the second record, at times and in the end, and never.
RECORDS = [
  record(10, 1.0, 1.0, 1.0),
  {"kind": "held_out", "step": 10, "loss": 4.1},
  record(20, 0.0, 0.5, 1.0),
  record(30, 0.1, 1.0, 0.0),
  record(40, 0.0, 0.0, 1.0),
]
LAYER = {
  "mean": 4.0,
  "p50": 3.0,
  "p95": 9.0,
  "maximum": 12,
  "alive_fraction": 0.5,
}
FIGURES: dict[str, Any] = {
  "config": {
    "model": {"d_ff": 200, "d_model": 32, "num_layers": 3},
    "l1": {"coefficient": 0.1},
  },
  "reference_losses": {
    "steps": 25,
    "restart_every_steps": 5,
    "largest_relative_difference": 2.5e-6,
    "at_step": 20,
    "tolerance": 1e-3,
    "difference_from_logged": 0.0,
    "reference_at_logged_steps": [
      {"step": step, "loss": 5.0, "cross_entropy": 4.0} for step in (10, 20)
    ],
  },
  "dense_above": 0.04,
  "sparse_from_step": report.sparse_from_step(RECORDS),
  "held_out_loss": {"sparse": 2.06, "dense": 2.0},
  "activity": {"sparse": [LAYER] * 3, "dense": [LAYER] * 3},
  "speed": [
    {
      "what": "FFN forward, prefill of 8 tokens",
      "dense_ms": 2.0,
      "sparse_ms": 1.0,
      "ratio": 2.0,
    }
  ],
  "parameters": 1,
  "train_tokens_per_model": 1,
  "corpus_tokens": 1,
  "held_out_tokens": 1,
  "held_out_bytes_per_token": 1.0,
  "command": "python",
  "minutes": 1.0,
  "device": "none",
  "versions": {},
  "date": "2026-01-01",
  "revision": "0",
}


def write(directory, **changes):
  path = report.write(
    FIGURES | changes,
    records={"sparse": RECORDS, "dense": RECORDS},
    directory=directory,
  )
  return path.read_text()


def test_the_step_since_which_layers_are_sparse():
  assert report.sparse_from_step(RECORDS) == [20, 40, None]
  assert report.sparse_from_step(RECORDS[:3]) == [20, 20, None]
  assert report.sparse_from_step([record(5, 0.0)]) == [5]


def test_the_switch_is_reported(tmp_path):
  text = write(tmp_path)
  row = "| sparse products at all logged steps since | 20 | 40 | never |"
  assert row in text.splitlines()
  assert "is above 4.0% of the neurons, 8 of them." in text
  assert "neurons, " not in write(tmp_path, dense_above=None)


@pytest.mark.parametrize(
  "changes", [{"dense_above": None}, {"sparse_from_step": [None, 40, None]}]
)
def test_the_switch_is_drawn(changes, tmp_path):
  write(tmp_path)
  drawn = (tmp_path / "activity.png").read_bytes()
  write(tmp_path)
  assert (tmp_path / "activity.png").read_bytes() == drawn
  write(tmp_path, **changes)
  assert (tmp_path / "activity.png").read_bytes() != drawn


def test_the_comparison_with_the_reference(tmp_path):
  text = write(tmp_path)
  (line,) = (line for line in text.splitlines() if "made again" in line)
  numbers = [float(n) for n in re.findall(r"\d\S*\d|\d", line)]
  assert numbers == [25, 5, 2.5e-6, 1e-3]
  assert line.endswith("came out again to the last bit.")
  reference = FIGURES["reference_losses"] | {"difference_from_logged": 3e-7}
  text = write(tmp_path, reference_losses=reference)
  assert "came out again to within 3.0e-07." in text
