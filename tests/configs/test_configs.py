"""Every file of configs/ describes a run that can be built."""

import dataclasses
import importlib
import pathlib
import pkgutil
import sys
from typing import Any

import jax
import pytest
from absl import flags
from flax import nnx
from ml_collections import ConfigDict, config_flags

import configs
from experiments import train
from twell_jax import nn, training
from twell_jax.formats import Capacities
from twell_jax.ops.choices import Choices

FOLDER = pathlib.Path(configs.__path__[0])
NAMES = sorted(module.name for module in pkgutil.iter_modules([str(FOLDER)]))


@pytest.fixture(params=NAMES)
def module(request):
  return importlib.import_module(f"configs.{request.param}")


def leaves(config, prefix=""):
  """The fields that hold no other fields, by dotted name."""
  found: dict[str, Any] = {}
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      found |= leaves(value, f"{prefix}{name}.")
    else:
      found[f"{prefix}{name}"] = value
  return found


def build(config):
  return train.model_config(config), train.train_options(config)


def test_there_are_configs():
  assert "quickstart" in NAMES


def test_each_builds(module):
  config = module.get_config()
  model_config, options = build(config)
  device = jax.devices()[:1]
  mesh = training.make_mesh(**config.mesh, devices=device)
  training.check_batch_size(
    config.data.batch_size,
    mesh=mesh,
    accumulation_steps=config.accumulation_steps,
  )
  assert options.l1.start_step + options.l1.warmup_steps <= options.steps
  training.learning_rate_schedule(options.optimizer, steps=options.steps)
  model = nnx.eval_shape(
    lambda: nn.TransformerLM(model_config, rngs=nnx.Rngs(0))
  )
  matrices = 3 if model_config.gated else 2
  ffn = matrices * model_config.d_ff * model_config.d_model
  floor = model_config.num_layers * ffn
  assert floor < nn.num_parameters(model) < 20 * floor


def test_flags_reach_every_field_of_the_model(module):
  fields = {field.name for field in dataclasses.fields(nn.TransformerConfig)}
  assert set(module.get_config().model) == fields


def test_values_that_leave_the_choice(module):
  config = module.get_config()
  left = {"head_dim": 0, "implementation": "", "ell_width": 0}
  config.model.update({**left, "dense_above": -1.0})
  model = train.model_config(config)
  assert model.choices == Choices()
  assert (model.head_dim, model.implementation) == (None, None)
  config.model.update(
    {"head_dim": 8, "implementation": "mosaic", "hot_neurons": 2}
  )
  # A share of 0 is a choice: dense products, always.
  config.model.update({"ell_width": 4, "dense_rows": 3, "dense_above": 0.0})
  model = train.model_config(config)
  assert model.choices == Choices(2, Capacities(4, 3), 0.0)
  assert (model.head_dim, model.implementation) == (8, "mosaic")


def test_every_field_can_be_overridden(module, monkeypatch):
  config = module.get_config()
  fields = leaves(config)
  for name, value in fields.items():
    assert isinstance(value, (bool, int, float, str)), name
  # As the command line does it, with its types.
  values = flags.FlagValues()
  blank = module.get_config()
  for name, value in fields.items():
    blank.update_from_flattened_dict({name: type(value)()})
  command_line = [
    "program",
    *(f"--config.{name}={value}" for name, value in fields.items()),
  ]
  # Which is where ml_collections looks for the fields to define.
  monkeypatch.setattr(sys, "argv", command_line)
  config_flags.DEFINE_config_dict("config", blank, flag_values=values)
  values(command_line)
  assert values.config.to_dict() == config.to_dict()


def test_each_call_gives_a_config_of_its_own(module):
  first, second = module.get_config(), module.get_config()
  assert first.to_dict() == second.to_dict()
  first.steps += 1
  first.model.d_ff += 1
  assert first.model.d_ff != second.model.d_ff
  assert first.steps != second.steps


@pytest.mark.parametrize(
  "section", ["model", "optimizer", "l1", "dead_neurons"]
)
def test_a_field_that_nothing_reads_is_refused(module, section):
  config = module.get_config()
  config[section]["superfluous"] = 1
  with pytest.raises(TypeError, match="superfluous"):
    build(config)
