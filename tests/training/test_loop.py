import dataclasses
import math
import signal
from typing import Any

import jax
import numpy as np
import pytest

from tests.training.runs import OPTIONS, STEPS, exact
from twell_jax import training
from twell_jax.nn import Partitioning


def stop_in(corpus, step):
  """Input that presses Ctrl-C while the batch of a step is made."""
  made = []

  def on_batch(batch):
    made.append(batch)
    if len(made) == step:
      signal.raise_signal(signal.SIGINT)
    return batch

  return corpus.batches(on_batch)


# All that is remembered between steps besides parameters and moments.
TRACKED = {
  "dead_neurons": training.DeadNeuronOptions(
    # Silent during three steps, of 48 tokens each.
    window_tokens=97,
    reinitialize_every_steps=1,
  ),
  "l1": training.L1Options(coefficient=4.0, target_active=1.0, target_gain=0.1),
  "reorder_neurons_every_steps": 4,
}


@pytest.mark.parametrize("changes", [{}, TRACKED], ids=["plain", "tracked"])
def test_interrupted_and_resumed_is_the_unbroken_run(
  run, corpus, tmp_path, changes
):
  whole = run("whole", **changes)
  assert whole.outcome == "finished"
  assert whole.step == STEPS == len(exact(tmp_path / "whole"))

  # Ignored, not Python's own, if the tests run in the background of a shell.
  handler = signal.getsignal(signal.SIGINT)
  broken = run("broken", batches=stop_in(corpus, 6), **changes)
  assert broken.outcome == "interrupted"
  assert broken.held_out is None
  assert training.saved_steps(tmp_path / "broken" / "checkpoints") == [6]
  assert signal.getsignal(signal.SIGINT) is handler
  resumed = run("broken", start="resume", **changes)
  assert resumed.outcome == "finished"

  # Bit for bit: JSON keeps every digit of a float.
  assert exact(tmp_path / "broken") == exact(tmp_path / "whole")
  jax.tree.map(
    np.testing.assert_array_equal, whole.state.params, resumed.state.params
  )
  assert resumed.held_out == whole.held_out
  records = exact(tmp_path / "whole")
  reinitialized = [sum(record["reinitialized"]) for record in records]
  coefficients = {record["l1_coefficient"] for record in records}
  if changes:
    # Of neurons whose silence began before the interruption.
    assert sum(reinitialized[6:8]) > 0
    assert len(coefficients) == STEPS
  else:
    assert sum(reinitialized) == 0
    assert not any(sum(record["dead_fraction"]) for record in records)
    assert max(coefficients) == np.float32(1e-3)


def test_reordering_changes_nothing_but_the_order(
  run, corpus, config, tmp_path
):
  def start(name, *, every=2, **arguments):
    return run(
      name,
      config=dataclasses.replace(config, hot_neurons=8),
      reorder_neurons_every_steps=every,
      **arguments,
    )

  whole = start("whole")
  # Once as neurons were re-ordered, and once between two re-orderings.
  for name, step in (("fresh", 4), ("resume", 1)):
    broken = start("broken", start=name, batches=stop_in(corpus, step))
    assert broken.outcome == "interrupted"
  assert training.saved_steps(tmp_path / "broken" / "checkpoints") == [4, 5]
  resumed = start("broken", start="resume")
  assert exact(tmp_path / "broken") == exact(tmp_path / "whole")
  jax.tree.map(
    np.testing.assert_array_equal, whole.state.params, resumed.state.params
  )

  plain = start("plain", every=0)
  assert plain.held_out is not None
  assert whole.held_out is not None
  assert whole.held_out.loss == pytest.approx(plain.held_out.loss, rel=1e-6)
  as_drawn, by_rate = exact(tmp_path / "plain"), exact(tmp_path / "whole")
  for one, other in zip(as_drawn, by_rate, strict=True):
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert other["frequent_neurons"] == one["frequent_neurons"]
  # Eight of 24 neurons; the learning rate is nearly 0, and so is the drift.
  for one, other in zip(as_drawn[-1]["hot_share"], by_rate[-1]["hot_share"]):
    assert 0 < one < 0.4 < other < 1


def test_a_killed_run_resumes_from_its_last_checkpoint(run, corpus, tmp_path):
  class Killed(Exception):
    pass

  made = []

  def on_batch(batch):
    made.append(batch)
    if len(made) == 11:
      raise Killed
    return batch

  with pytest.raises(Killed):
    run("killed", batches=corpus.batches(on_batch))
  run("killed", start="resume")
  run("whole")
  # Steps 9 and 10 were made twice and are recorded once.
  assert exact(tmp_path / "killed") == exact(tmp_path / "whole")
  assert exact(tmp_path / "killed", "held_out") == exact(
    tmp_path / "whole", "held_out"
  )


def test_records(run, tmp_path):
  result = run("run", log_every_steps=5)
  train = training.read_metrics(tmp_path / "run", kind="train")
  assert [r["step"] for r in train] == [5, 10, 12]
  for record in train:
    assert record["tokens_per_s"] > 0
    assert len(record["active_p95"]) == 2
    assert 0 < record["active_fraction"] < 1
    mean_l1 = sum(record["l1"]) / 2
    expected = record["cross_entropy"] + record["l1_coefficient"] * mean_l1
    assert record["loss"] == pytest.approx(expected, rel=1e-6)
  held_out = training.read_metrics(tmp_path / "run", kind="held_out")
  assert [r["step"] for r in held_out] == [5, 8, 10, 12]
  assert held_out[-1]["loss"] == result.held_out.loss
  assert result.held_out.loss < held_out[0]["loss"] < math.log(12) + 0.1


def test_the_trained_module_and_its_evaluation(run, corpus, single_mesh):
  result = run("run", steps=3)
  again = training.evaluate(result.model, result.state.params, corpus.held_out)
  assert again == result.held_out
  first = training.evaluate(
    result.model, result.state.params, corpus.held_out, max_batches=1
  )
  assert first != again
  batch = next(iter(corpus.held_out))
  module = result.model.bind(result.state.params)
  dense = training.abstract_model(
    dataclasses.replace(result.model.config, implementation="xla"),
    Partitioning(single_mesh),
  ).bind(result.state.params)
  np.testing.assert_allclose(
    module(batch["inputs"]).logits,
    dense(batch["inputs"]).logits,
    rtol=1e-4,
    atol=1e-5,
  )


def test_a_finished_run_resumes_to_its_result(run, tmp_path):
  first = run("run", steps=3)
  records = exact(tmp_path / "run")
  again = run("run", steps=3, start="resume")
  assert again.outcome == "finished"
  assert again.held_out == first.held_out
  assert exact(tmp_path / "run") == records


def test_a_changed_config_is_reported(run, caplog):
  run("run", steps=3, run_config={"l1": {"coefficient": 0.0}})
  with caplog.at_level("WARNING"):
    run("run", steps=3, start="resume", run_config={"l1": {"coefficient": 1.0}})
  assert "l1.coefficient: 0.0 -> 1.0" in caplog.text


def test_fresh_and_resume_are_not_confused(run, tmp_path):
  with pytest.raises(ValueError, match=r"no checkpoint in .*nowhere"):
    run("nowhere", start="resume")
  assert not (tmp_path / "nowhere").exists()
  run("run", steps=3)
  with pytest.raises(ValueError, match="already has a checkpoint of step 3"):
    run("run", steps=3)


def test_errors_before_anything_is_written(run, config, tmp_path):
  with pytest.raises(ValueError, match=r"warmup_steps = 2 .* steps = 2"):
    run("run", steps=2)
  mesh = training.make_mesh(data=1, tensor=4)
  with pytest.raises(ValueError, match="kv_heads = 2 is not divisible"):
    run("run", mesh=mesh)
  assert list(tmp_path.iterdir()) == []


def test_neurons_without_an_order(run, config, single_mesh, tmp_path):
  silu = dataclasses.replace(config, activation="silu", implementation=None)
  options = dataclasses.replace(OPTIONS, reorder_neurons_every_steps=2)
  message = "activation = 'silu' leaves no neuron silent"
  with pytest.raises(ValueError, match=message):
    run("run", config=silu, reorder_neurons_every_steps=2)
  with pytest.raises(ValueError, match=message):
    training.check_run(silu, options, mesh=single_mesh, workdir=tmp_path)
  assert list(tmp_path.iterdir()) == []


def test_resuming_with_another_shape(run, config):
  run("run", steps=3)
  with pytest.raises(ValueError, match=r"shape \(2, 24, 16\)"):
    run("run", start="resume", config=dataclasses.replace(config, d_ff=32))


def test_a_loss_that_is_not_finite_stops_the_run(run, tmp_path):
  options = training.OptimizerOptions(learning_rate=1e30, warmup_steps=0)
  with pytest.raises(FloatingPointError, match=r"the loss is .* at step"):
    run("run", optimizer=options)
  assert training.saved_steps(tmp_path / "run" / "checkpoints") == []


def test_input_that_ends(run, corpus):
  with pytest.raises(ValueError, match="the input ended after 2 batches"):
    run("run", batches=iter(corpus.held_out))
  with pytest.raises(ValueError, match="held-out input has no targets"):
    run("other", held_out=[])


@pytest.mark.parametrize(
  "name", ["steps", "log_every_steps", "checkpoint_every_steps"]
)
def test_options_are_checked(name):
  with pytest.raises(ValueError, match=f"{name} = 0 must be at least 1"):
    dataclasses.replace(OPTIONS, **dict[str, Any]({name: 0}))


@pytest.mark.parametrize(
  "name", ["eval_batches", "reorder_neurons_every_steps"]
)
def test_negative_options(name):
  with pytest.raises(ValueError, match=f"{name} = -1 is negative: 0 is"):
    dataclasses.replace(OPTIONS, **dict[str, Any]({name: -1}))
