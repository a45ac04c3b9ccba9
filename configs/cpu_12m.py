"""A sparse model of 12 M parameters of the interpreter's own text, for a CPU.

    python -m experiments.train --config=configs/cpu_12m.py --workdir=DIR

2048 tokens a step (8 × 256), 4.1 M in all, more than one epoch of the standard
library: within an hour on two cores. The experiment of training_curves.py runs
its first 1200 steps with and without L1 and re-initialisation; its result, what
to expect, is experiments/results/training_curves.md. Every field is explained
in base.py.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
  """6 layers of 2048 neurons, which are four fifths of the parameters."""
  config = base.get_config()
  config.steps = 2000
  config.model.update(
    vocab_size=4096,
    d_model=256,
    d_ff=2048,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    dtype="float32",
  )
  config.data.update(
    corpus="python", seq_len=256, batch_size=8, held_out_fraction=0.05
  )
  config.optimizer.update(learning_rate=2e-3, warmup_steps=60)
  config.l1.update(coefficient=2e-3, warmup_steps=200)
  config.dead_neurons.window_tokens = 65_536  # 32 updates
  config.eval.update(every_steps=100, batches=30)
  config.checkpoint.update(every_steps=200, keep=2)
  return config
