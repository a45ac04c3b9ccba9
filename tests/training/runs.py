"""The tiny run of the tests of the loop, and what is compared of two runs."""

from twell_jax import training

STEPS = 12
OPTIONS = training.TrainOptions(
  steps=STEPS,
  optimizer=training.OptimizerOptions(learning_rate=3e-2, warmup_steps=2),
  l1=training.L1Options(coefficient=1e-3, start_step=2, warmup_steps=4),
  log_every_steps=1,
  eval_every_steps=5,
  checkpoint_every_steps=8,
)


def exact(directory, kind="train"):
  """What must not depend on interruptions: everything but the speed."""
  records = training.read_metrics(directory, kind=kind)
  for record in records:
    record.pop("tokens_per_s", None)
  return records
