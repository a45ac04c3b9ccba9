"""A small sparse language model of the interpreter's own text, for a CPU.

    python -m experiments.train --config=configs/quickstart.py --workdir=DIR
    make quickstart      (this model and its dense twin, compared in a report)

2048 tokens a step (16 × 128), 0.9 M in all: three minutes on two cores. Every
field is explained in base.py and can be overridden:
--config.l1.coefficient=0 trains the dense twin.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
  """The default configuration of the quickstart."""
  config = base.get_config()
  config.steps = 450
  config.model.update(
    vocab_size=1024,
    d_model=192,
    d_ff=1024,
    num_layers=3,
    num_heads=3,
    num_kv_heads=1,
    dtype="float32",
  )
  config.data.update(
    corpus="python", seq_len=128, batch_size=16, held_out_fraction=0.05
  )
  config.optimizer.update(learning_rate=3e-3, warmup_steps=40)
  # Narrow models need more of it than the published 1.28e-3.
  config.l1.update(coefficient=4e-3, warmup_steps=50)
  config.dead_neurons.window_tokens = 65_536  # 32 updates
  config.eval.every_steps = 150
  config.checkpoint.update(every_steps=150, keep=2)
  return config
