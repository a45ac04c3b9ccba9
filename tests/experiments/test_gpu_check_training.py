"""What gpu_check does about training, dry."""

import json

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from experiments import gradient_kernels
from experiments.on_gpu import (
  gradient_checks,
  plan,
  timings,
  training_checks,
  training_timings,
)
from experiments.on_gpu.bench import HOT_COLD, ROW, Bench
from pallas_kernels.gradient_config import Product
from tests.experiments import programs

ONLY = (
  "sddmm_spmm, split segments, 4x256x40: not finite",
  "gradients, gated, some hot neurons, packed choices, 1x5x20: edges",
  "training of 4 tokens, 2 active, gamma 0.1 rates",
)


@pytest.mark.slow
def test_a_dry_run(environment, tmp_path):
  output = tmp_path / "result.json"
  process = programs.run(
    [
      "-m",
      "experiments.gpu_check",
      "--dry",
      f"--output={output}",
      *(f"--only={name}" for name in ONLY),
    ],
    environment=environment,
  )
  assert process.returncode == 0, process.stderr
  result = json.loads(output.read_text())
  assert result["summary"]["statuses"] == {"PASS": 2, "DONE": 2}
  stages = {stage["name"]: stage for stage in result["stages"]}
  for name in ONLY[:2]:
    assert stages[name]["error"] <= stages[name]["limit"]
    assert stages[name]["same_bits_twice"]
  step, parts = stages[ONLY[2]], stages[f"parts of {ONLY[2]}"]
  assert {ROW, HOT_COLD} < step["contenders"].keys()
  assert step["contenders"][ROW]["temporary_bytes"] > 0
  assert step["differences"][HOT_COLD].keys() == {
    "y",
    "dx",
    "dgate",
    "dup",
    "ddown",
  }
  names = {product.value for product in Product}
  assert names < parts["contenders"].keys()
  assert names < parts["configs"].keys()


def wrong_kernel(place):
  """A check's kernel, of which one number is 1 % off."""
  kernel = gradient_checks._kernel

  def changed(product, segments):
    def function(numbers, entries):
      leaves, tree = jax.tree.flatten(
        kernel(product, segments)(numbers, entries)
      )
      leaf = leaves[place].ravel()
      largest = jnp.argmax(jnp.abs(leaf))
      leaf = leaf.at[largest].multiply(jnp.asarray(1.01, leaf.dtype))
      leaves[place] = leaf.reshape(leaves[place].shape)
      return jax.tree.unflatten(tree, leaves)

    return jax.jit(function)

  return changed


@pytest.mark.parametrize("product", list(Product), ids=lambda each: each.value)
def test_a_wrong_kernel_fails(product, monkeypatch):
  shape = plan.Shape(3, 256, 12)
  case = gradient_checks._Case(product, "whole", "full rows", shape)
  kind = gradient_kernels.KINDS[product]
  with plgpu.force_gpu_interpret_mode():
    assert gradient_checks._check(case, 5, 1)["status"] == "PASS"
    for place in range(kind.own_rows + kind.sums):
      with monkeypatch.context() as patch:
        patch.setattr(gradient_checks, "_kernel", wrong_kernel(place))
        result = gradient_checks._check(case, 5, 1)
      assert result["status"] == "FAIL"
      assert result["error"] > 1
      assert result["same_bits_twice"]


def test_a_dot_product_of_no_entry_is_seen(monkeypatch):
  case = gradient_checks._Case(
    Product.SDDMM, "whole", "one row", plan.Shape(3, 256, 12)
  )
  kernel = gradient_checks._kernel

  def filled(product, segments):
    def function(numbers, entries):
      results = kernel(product, segments)(numbers, entries)
      dots = jnp.where(results.dots == 0, 1e-3, results.dots)
      return results._replace(dots=dots)

    return function

  monkeypatch.setattr(gradient_checks, "_kernel", filled)
  with plgpu.force_gpu_interpret_mode():
    assert gradient_checks._check(case, 5, 1)["status"] == "FAIL"


@pytest.mark.parametrize("name", ["y", "l1", "dx", "dgate", "dup", "ddown"])
@pytest.mark.parametrize("change", ["wrong", "not finite"])
def test_a_wrong_gradient_fails(name, change, monkeypatch):
  # The dense layer with one array changed stands for the kernels'.
  def changed(hot_neurons, choice):
    del hot_neurons, choice

    def step(*arguments):
      results = training_checks._dense_step(*arguments)
      array = getattr(results, name)
      array = array * 1.1 if change == "wrong" else array.at[...].set(jnp.nan)
      return results._replace(**{name: array.astype(jnp.bfloat16)})

    return jax.jit(step)

  monkeypatch.setattr(training_checks, "_mosaic", changed)
  case = training_checks._Case(True, "no", "packed", "heavy tail")
  result = training_checks._check(case, plan.Shape(16, 24, 40), 1)
  assert result["status"] == "FAIL"
  assert (result["error"] > 1) == (change == "wrong")
  assert (result["wrong_numbers"] > 0) == (change == "not finite")


def test_every_choice_is_checked():
  names = [stage.name for stage in training_checks.stages(plan.FULL, seed=0)]
  assert len(set(names)) == len(names)
  for part in ("packed", "tight", "default"):
    for activity in ("heavy tail", "edges", "everything", "not finite"):
      assert any(
        f", {part} choices" in name and name.endswith(activity)
        for name in names
      )


def test_training_is_timed_early():
  bench = Bench(plan.FULL, 0, False)
  names = {name for name, _ in training_timings.stages(bench)}
  ordered = [
    stage.name for stage in timings.stages(plan.FULL, seed=0, is_dry=False)
  ]
  assert names < set(ordered)
  assert ordered.index(plan.training_name(16384, 30, plan.UNIFORM)) < 5
