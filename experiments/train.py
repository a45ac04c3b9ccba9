"""Trains a language model from a config file.

    python -m experiments.train --config=configs/quickstart.py --workdir=DIR

Every field of the config can be overridden (--config.steps=100), and --resume
continues from the latest checkpoint in DIR. Ctrl-C saves and says how.

On several machines that share DIR, one process on each:

    python -m experiments.train --config=... --workdir=DIR \
      --coordinator=HOST:PORT --num_processes=N --process_id=I

or --cluster=auto under SLURM, Open MPI, Kubernetes or on a TPU pod.
"""

import pathlib
import shlex
import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import grain
from absl import flags, logging
from ml_collections import ConfigDict

from configs import base
from experiments import cli
from twell_jax import data as data_lib
from twell_jax import nn, training

Start = Literal["fresh", "resume"]

# How long processes wait for the first to tokenise the text. If it dies, they
# end at once.
PREPARATION_TIMEOUT_S = 24 * 3600.0

# Beside the fields of a saved config: that of its text.
_TRAIN_KEY = "train_key"

WHOLE = training.DataShard(index=0, count=1)


class Run(NamedTuple):
  """A trained model, and the data it was trained and evaluated on."""

  result: training.TrainResult
  data: data_lib.Data
  held_out: grain.IterDataset


def model_config(config: ConfigDict) -> nn.TransformerConfig:
  """The model that a config asks for, checked."""
  fields = dict(config.model)
  # 0, "" and −1 leave the choice; a share of 0 is one.
  for name in ("head_dim", "implementation", "ell_width"):
    fields[name] = fields[name] or None
  if fields["dense_above"] == -1:
    fields["dense_above"] = None
  return nn.TransformerConfig(**fields)


def train_options(config: ConfigDict) -> training.TrainOptions:
  """How the run goes that a config asks for, checked."""
  return training.TrainOptions(
    steps=config.steps,
    seed=config.seed,
    accumulation_steps=config.accumulation_steps,
    optimizer=training.OptimizerOptions(**config.optimizer),
    l1=training.L1Options(**config.l1),
    dead_neurons=training.DeadNeuronOptions(**config.dead_neurons),
    log_every_steps=config.log_every_steps,
    eval_every_steps=config.eval.every_steps,
    eval_batches=config.eval.batches,
    checkpoint_every_steps=config.checkpoint.every_steps,
    keep_checkpoints=config.checkpoint.keep,
    reorder_neurons_every_steps=config.reorder_neurons_every_steps,
    non_finite=config.non_finite,
    max_skipped_in_a_row=config.max_skipped_in_a_row,
    stall_timeout_s=config.stall_timeout_s,
  )


def load_data(
  config: ConfigDict,
  workdir: pathlib.Path,
  *,
  shard: training.DataShard = WHOLE,
) -> data_lib.Data:
  """The text that a config asks for, tokenised in the cache."""
  fields = dict(config.data)
  cache_dir = fields.pop("cache_dir") or workdir / "data"
  return data_lib.load_data(
    **fields,
    vocab_size=config.model.vocab_size,
    seed=config.seed,
    cache_dir=cache_dir,
    shard_index=shard.index,
    shard_count=shard.count,
  )


def run(
  config: ConfigDict, *, workdir: pathlib.Path, start: Start = "fresh"
) -> Run:
  """Trains what the config asks for; what can be checked is checked first."""
  model = model_config(config)
  options = train_options(config)
  mesh = training.make_mesh(**config.mesh)
  training.check_batch_size(
    config.data.batch_size,
    mesh=mesh,
    accumulation_steps=config.accumulation_steps,
  )
  training.check_run(model, options, mesh=mesh, workdir=workdir, start=start)
  saved = read_saved(workdir) if start == "resume" else None
  if saved is not None:
    _check_same_fields(saved, config, workdir)
  if config.data.held_out_fraction <= 0:
    raise ValueError(
      f"data.held_out_fraction = {config.data.held_out_fraction} must be above"
      " 0: models are evaluated on held-out text"
    )
  # What one process prepares in the cache, the others find there.
  with training.first_process_first(
    "load_data", timeout_s=PREPARATION_TIMEOUT_S
  ):
    data = load_data(config, workdir, shard=training.data_shard(mesh))
  assert data.held_out is not None  # load_data raises if it would be empty
  if saved is not None:
    _check_same_text(saved, data, workdir)
  result = training.train(
    model,
    options,
    mesh=mesh,
    batches=iter(data.train),
    held_out=data.held_out,
    workdir=workdir,
    start=start,
    run_config={**config.to_dict(), _TRAIN_KEY: data.train_key},
  )
  return Run(result, data, data.held_out)


class Saved(NamedTuple):
  """What made a checkpoint.

  Attributes:
    config: Its config. A field that was not there yet has its default.
    train_key: Of its text (`data.Data`); None if that was not saved yet.
  """

  config: dict[str, Any]
  train_key: str | None


def read_saved(workdir: pathlib.Path) -> Saved:
  """What made the latest checkpoint of a run."""
  with training.Checkpoints(workdir / "checkpoints") as checkpoints:
    saved = dict(checkpoints.config())
  train_key = saved.pop(_TRAIN_KEY, None)
  return Saved(_completed(saved, base.get_config().to_dict()), train_key)


def _completed(
  saved: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
  """A saved config with the defaults of the fields that it lacks."""
  complete = {**defaults, **saved}
  for name, default in defaults.items():
    if isinstance(default, Mapping):
      complete[name] = _completed(saved.get(name, {}), default)
  return complete


def _check_same_fields(
  saved: Saved, config: ConfigDict, workdir: pathlib.Path
) -> None:
  """Refuses another input on resuming: its position would be of other text."""
  differences = [
    difference
    for difference in training.config_differences(
      saved.config, config.to_dict()
    )
    if difference.startswith(("data.", "seed:"))
    and not difference.startswith("data.cache_dir:")
  ]
  if differences:
    raise ValueError(
      f"cannot resume {workdir} with another input ({'; '.join(differences)}):"
      " set it back, or train in another workdir"
    )


def _check_same_text(
  saved: Saved, data: data_lib.Data, workdir: pathlib.Path
) -> None:
  """Refuses text that has changed where the config finds it."""
  if saved.train_key not in (None, data.train_key):
    raise ValueError(
      f"cannot resume {workdir}: the text that data.corpus names is not what it"
      " was, so that the position in it would be of other text: bring it back,"
      " or train in another workdir"
    )


def main() -> int:
  """Trains as the flags say; the exit code is 130 after an interruption."""
  args = flags.FLAGS
  training.join_processes(
    coordinator=args.coordinator,
    num_processes=args.num_processes,
    process_id=args.process_id,
    cluster=args.cluster,
    heartbeat_timeout_s=args.heartbeat_timeout_s,
  )
  if not training.is_first():
    # One process speaks for all, but each of its own errors.
    logging.set_verbosity(logging.ERROR)
  start: Start = "resume" if args.resume else "fresh"
  result = run(
    args.config, workdir=pathlib.Path(args.workdir), start=start
  ).result
  if result.outcome == "interrupted" or result.held_out is None:
    arguments = [a for a in sys.argv[1:] if a != "--resume"]
    command = shlex.join(["python", "-m", "experiments.train", *arguments])
    said = f"saved step {result.step}; continue with\n  {command} --resume"
    exit_code = 130
  else:
    said = (
      f"step {result.step}: held-out loss {result.held_out.loss:.4f},"
      f" {result.held_out.active_fraction:.2%} of activations active"
    )
    exit_code = 0
  if training.is_first():
    print(said)
  return exit_code


if __name__ == "__main__":
  cli.define_config(None, "What to train: a file of configs/.")
  flags.DEFINE_string("workdir", None, "Where this run writes.")
  flags.DEFINE_bool("resume", False, "Continue from the latest checkpoint.")
  flags.DEFINE_string(
    "coordinator", None, "Of several processes: HOST:PORT of process 0."
  )
  flags.DEFINE_integer("num_processes", None, "How many processes there are.")
  flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")
  flags.DEFINE_string(
    "cluster",
    None,
    "Whose environment says these three instead: one of"
    f" {', '.join(training.CLUSTERS)}.",
  )
  flags.DEFINE_integer(
    "heartbeat_timeout_s",
    100,
    "Seconds of silence after which a process is taken for dead and all end.",
  )
  flags.mark_flags_as_required(["config", "workdir"])
  cli.run(main)
