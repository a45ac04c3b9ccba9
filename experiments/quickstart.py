"""Trains a sparse model and its dense twin, compares them, writes a report.

    make quickstart
    python -m experiments.quickstart --workdir=DIR

The twin is the same model without L1, computed densely: same seed, data and
steps. The sparse model's first steps are made again beside the reference
implementation's, which must have the same losses (reference_losses.py).

DIR/report.md has the figures and plots, DIR/report.json the figures. An
interrupted quickstart continues when it is started again.
"""

import json
import math
import pathlib
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jaxtyping import Array, Int32
from ml_collections import ConfigDict

from experiments import (
  cli,
  environment,
  reference_losses,
  report,
  train,
  trained_ffn,
)
from twell_jax import training
from twell_jax.nn import Partitioning, TransformerLM, num_parameters
from twell_jax.ops import xla
from twell_jax.training.sharding import HostBatch


class LayerActivity(NamedTuple):
  """Active neurons per token of one layer, on held-out text."""

  mean: float
  p50: float
  p95: float
  maximum: int
  alive_fraction: float  # neurons that were active on some token


@nnx.jit
def _activity(
  model: TransformerLM, tokens: Int32[Array, "batch seq"]
) -> tuple[Int32[Array, "layers batch seq"], Int32[Array, "layers d_ff"]]:
  activity = model(tokens).activity
  return activity.active, activity.fired


def held_out_activity(
  model: TransformerLM, held_out: Iterable[HostBatch]
) -> list[LayerActivity]:
  """Activity of every layer over all of the held-out text."""
  actives, fired = [], jnp.zeros((), jnp.int32)
  for batch in held_out:
    active, batch_fired = _activity(model, jnp.asarray(batch["inputs"]))
    # The last batch ends in padding.
    actives.append(np.asarray(active)[:, batch["weights"] > 0])
    fired = np.asarray(fired) + np.asarray(batch_fired)
  return [
    LayerActivity(
      mean=float(np.mean(counts)),
      p50=float(np.percentile(counts, 50)),
      p95=float(np.percentile(counts, 95)),
      maximum=int(np.max(counts)),
      alive_fraction=float(np.mean(layer_fired > 0)),
    )
    for counts, layer_fired in zip(np.concatenate(actives, axis=1), fired)
  ]


def train_to_end(config: ConfigDict, workdir: pathlib.Path) -> train.Run:
  """Trains, or continues where an interrupted quickstart stopped."""
  checkpoints = workdir / "checkpoints"
  if not training.saved_steps(checkpoints):
    return train.run(config, workdir=workdir)
  differences = training.config_differences(
    train.read_saved(workdir).config, config.to_dict()
  )
  if differences:
    raise ValueError(
      f"{workdir} has a model of another config ({'; '.join(differences)}):"
      " choose another workdir"
    )
  return train.run(config, workdir=workdir, start="resume")


def _twin(config: ConfigDict) -> ConfigDict:
  twin = config.copy_and_resolve_references()
  twin.l1.coefficient = 0.0
  twin.l1.target_active = 0.0
  twin.model.implementation = "reference"
  return twin


def _check(configs: Mapping[str, ConfigDict], workdir: pathlib.Path) -> None:
  """Finds before the training what would otherwise fail after it."""
  sparse = configs["sparse"]
  if sparse.model.activation != "relu":
    raise ValueError(
      f"model.activation = {sparse.model.activation!r} makes no sparse model:"
      " use 'relu'"
    )
  for config in configs.values():
    train.model_config(config)
    train.train_options(config)
  again = min(flags.FLAGS.reference_steps, sparse.steps)
  if again < min(sparse.log_every_steps, sparse.steps):
    raise ValueError(
      f"reference_steps = {again} has no step whose loss is logged: raise it to"
      f" log_every_steps = {sparse.log_every_steps} or more"
    )
  tokens = train.load_data(sparse, workdir).num_held_out_tokens
  if flags.FLAGS.prefill_tokens > tokens:
    raise ValueError(
      f"prefill_tokens = {flags.FLAGS.prefill_tokens} is more than the"
      f" {tokens} tokens of held-out text: lower it or raise"
      " data.held_out_fraction"
    )


def compare_with_reference(
  config: ConfigDict,
  *,
  batches: Iterable[HostBatch],
  records: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
  """Makes a run's first steps again, beside the reference implementation's.

  Args:
    config: Of the run.
    batches: Its input, from the beginning.
    records: Its metrics.

  Returns:
    Figures for the report.

  Raises:
    FloatingPointError: The losses are further apart than rounding explains.
  """
  made = reference_losses.make_steps(
    train.model_config(config),
    train.train_options(config),
    mesh=training.make_mesh(**config.mesh),
    batches=batches,
    steps=flags.FLAGS.reference_steps,
  )
  difference = reference_losses.largest_difference(
    made.run, [losses._asdict() for losses in made.reference]
  )
  tolerance = flags.FLAGS.reference_tolerance
  reference_losses.check(difference, tolerance=tolerance)
  logged = [record for record in records if record["kind"] == "train"]
  logged_steps = {record["step"] for record in logged}
  return {
    "steps": len(made.run),
    "restart_every_steps": reference_losses.RESTART_EVERY_STEPS,
    "largest_relative_difference": difference.relative,
    "at_step": difference.step,
    "tolerance": tolerance,
    "difference_from_logged": reference_losses.largest_difference(
      made.run, logged
    ).relative,
    "reference_at_logged_steps": [
      losses._asdict()
      for losses in made.reference
      if losses.step in logged_steps
    ],
  }


def _dense_above(config: ConfigDict) -> float | None:
  """Share of active neurons above which a layer of this run is dense.

  None if that depends on more than the number of active neurons, or on another
  implementation than the platform's.
  """
  model = train.model_config(config)
  if model.implementation not in (None, "xla") or model.hot_neurons:
    return None
  if model.dense_above is not None:
    return min(model.dense_above, 1.0)
  mesh = training.make_mesh(**config.mesh)
  batch_axes = Partitioning(mesh).batch_axes
  calls = config.accumulation_steps * math.prod(
    mesh.shape[axis] for axis in batch_axes
  )
  return xla.sparse_share(
    config.data.batch_size * config.data.seq_len // calls,
    model.d_model,
    jnp.dtype(model.dtype).itemsize,
  )


def _speeds(
  config: ConfigDict, sparse: train.Run, model: TransformerLM
) -> list[trained_ffn.Speed]:
  batches = list(sparse.held_out)
  prefill = flags.FLAGS.prefill_tokens
  min_seconds = flags.FLAGS.min_seconds
  tokens = trained_ffn.held_out_tokens(batches, tokens=prefill)
  calls = trained_ffn.layer_calls(model, tokens)
  return [
    trained_ffn.forward_speed(
      calls,
      tokens=prefill,
      what=f"FFN forward, prefill of {prefill} tokens",
      min_seconds=min_seconds,
    ),
    *(
      trained_ffn.forward_speed(
        calls,
        tokens=n,
        what=f"FFN forward, decoding {n} token{'s'[: n > 1]}",
        min_seconds=min_seconds,
      )
      for n in (8, 1)
    ),
    trained_ffn.step_speed(
      train.model_config(config),
      train.train_options(config),
      sparse.result.state.params,
      batches[0],
      mesh=training.make_mesh(**config.mesh),
      min_seconds=min_seconds,
    ),
  ]


def main() -> int:
  """Trains both models and writes the report."""
  started_s = time.perf_counter()
  workdir = pathlib.Path(flags.FLAGS.workdir)
  config = flags.FLAGS.config
  if not config.data.cache_dir:
    config.data.cache_dir = str(workdir / "data")  # one for both models
  configs = {"sparse": config, "dense": _twin(config)}
  _check(configs, workdir)
  runs = {}
  for name, run_config in configs.items():
    print(f"training the {name} model", flush=True)
    runs[name] = train_to_end(run_config, workdir / name)
    if runs[name].result.outcome == "interrupted":
      print("saved; the same command continues from here")
      return 130
  sparse = runs["sparse"]
  records = {name: training.read_metrics(workdir / name) for name in runs}
  print("comparing the sparse model with the reference", flush=True)
  comparison = compare_with_reference(
    config, batches=iter(sparse.data.train), records=records["sparse"]
  )
  print("evaluating and timing", flush=True)
  models = {
    name: trained_ffn.unsharded(
      run.result.model.config, run.result.state.params
    )
    for name, run in runs.items()
  }
  figures = {
    "reference_losses": comparison,
    "dense_above": _dense_above(config),
    "sparse_from_step": report.sparse_from_step(records["sparse"]),
    "held_out_loss": {
      name: training.evaluate(
        run.result.model, run.result.state.params, run.held_out
      ).loss
      for name, run in runs.items()
    },
    "activity": {
      name: [
        layer._asdict() for layer in held_out_activity(model, sparse.held_out)
      ]
      for name, model in models.items()
    },
    "speed": [
      {
        "what": speed.what,
        "dense_ms": speed.dense.median_ms,
        "sparse_ms": speed.sparse.median_ms,
        "ratio": speed.ratio,
      }
      for speed in _speeds(config, sparse, models["sparse"])
    ],
    "parameters": num_parameters(models["sparse"]),
    "train_tokens_per_model": config.steps
    * config.data.batch_size
    * config.data.seq_len,
    "corpus_tokens": sparse.data.num_train_tokens,
    "held_out_tokens": sparse.data.num_held_out_tokens,
    "held_out_bytes_per_token": sparse.data.held_out_bytes_per_token,
    "command": shlex.join(
      ["python", "-m", "experiments.quickstart", *sys.argv[1:]]
    ),
    "minutes": (time.perf_counter() - started_s) / 60,
    "config": config.to_dict(),
    **environment.describe(),
  }
  (workdir / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
  path = report.write(figures, records=records, directory=workdir)
  print(path.read_text())
  print(f"the report with its plots: {path}")
  return 0


if __name__ == "__main__":
  cli.define_config("configs/quickstart.py", "What to train, with L1.")
  flags.DEFINE_string("workdir", None, "Where the runs and the report go.")
  flags.DEFINE_integer(
    "prefill_tokens", 2048, "Tokens of a prefill-sized batch.", lower_bound=1
  )
  flags.DEFINE_float(
    "min_seconds", 3.0, "How long to time each figure.", lower_bound=0.0
  )
  flags.DEFINE_integer(
    "reference_steps",
    100,
    "First steps to make again beside the reference implementation's, if there"
    " are so many.",
    lower_bound=1,
  )
  flags.DEFINE_float(
    "reference_tolerance",
    2e-4,
    "Relative difference of their losses at which the quickstart fails.",
    lower_bound=0.0,
  )
  flags.mark_flag_as_required("workdir")
  cli.run(main)
