"""Training: objective, optimizer, step, mesh, checkpoints, metrics, loop."""

from twell_jax.training.checkpointing import (
  Checkpoints,
  config_differences,
  saved_steps,
)
from twell_jax.training.dead_neurons import (
  DeadNeuronOptions,
  reinitialize_dead,
)
from twell_jax.training.distributed import (
  CLUSTERS,
  first_process_first,
  is_first,
  join_processes,
)
from twell_jax.training.evaluation import HeldOut, evaluate
from twell_jax.training.loop import TrainResult, check_run, train
from twell_jax.training.metrics import (
  MetricsWriter,
  StepSummary,
  read_metrics,
  summarize,
)
from twell_jax.training.objective import (
  L1Options,
  coefficient_from_published,
  l1_feedback,
  l1_schedule,
)
from twell_jax.training.optimizer import (
  OptimizerOptions,
  learning_rate_schedule,
  make_optimizer,
)
from twell_jax.training.options import TrainOptions, Updates, make_updates
from twell_jax.training.reorder import make_reorder
from twell_jax.training.sharding import (
  DataShard,
  check_batch_size,
  data_shard,
  make_mesh,
  place_batch,
)
from twell_jax.training.state import (
  Model,
  TrainState,
  abstract_model,
  abstract_state,
  initial_state,
)
from twell_jax.training.step import make_eval_step, make_train_step

__all__ = [
  "CLUSTERS",
  "Checkpoints",
  "DataShard",
  "DeadNeuronOptions",
  "HeldOut",
  "L1Options",
  "MetricsWriter",
  "Model",
  "OptimizerOptions",
  "StepSummary",
  "TrainOptions",
  "TrainResult",
  "TrainState",
  "Updates",
  "abstract_model",
  "abstract_state",
  "check_batch_size",
  "check_run",
  "coefficient_from_published",
  "config_differences",
  "data_shard",
  "evaluate",
  "first_process_first",
  "initial_state",
  "is_first",
  "join_processes",
  "l1_feedback",
  "l1_schedule",
  "learning_rate_schedule",
  "make_eval_step",
  "make_mesh",
  "make_optimizer",
  "make_reorder",
  "make_train_step",
  "make_updates",
  "place_batch",
  "read_metrics",
  "reinitialize_dead",
  "saved_steps",
  "summarize",
  "train",
]
