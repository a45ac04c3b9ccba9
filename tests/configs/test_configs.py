"""Every file of configs/ describes a run that can be built."""

import dataclasses
import importlib
import itertools
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
from configs import paper
from experiments import train
from twell_jax import nn, training
from twell_jax.formats import Capacities
from twell_jax.ops.choices import Choices

FOLDER = pathlib.Path(configs.__path__[0])
NAMES = sorted(module.name for module in pkgutil.iter_modules([str(FOLDER)]))

# Published, of the gated models.
PAPER_PARAMETERS = {
  "0p5b": 511_739_904,
  "1b": 1_025_583_104,
  "1p5b": 1_539_426_304,
  "2b": 2_053_269_504,
}
PAPER_VARIANTS = [
  ",".join(words)
  for words in itertools.product(
    PAPER_PARAMETERS, ["gated", "non_gated"], ["sparse", "dense", "silu"]
  )
]


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


def paper_variant(variant):
  """The config of a variant, its defaults named too."""
  words = [w for w in variant.split(",") if w not in ("gated", "sparse")]
  return paper.get_config(",".join(words))


def parameters_of(config):
  model_config = train.model_config(config)
  return nn.num_parameters(
    nnx.eval_shape(lambda: nn.TransformerLM(model_config, rngs=nnx.Rngs(0)))
  )


def build(config):
  return train.model_config(config), train.train_options(config)


def test_there_are_configs():
  assert {"base", "cpu_12m", "paper", "quickstart"} <= set(NAMES)


def test_every_field_is_explained():
  previous = ""
  for line in (FOLDER / "base.py").read_text(encoding="utf-8").splitlines():
    if line.startswith("  config.") and "ConfigDict()" not in line:
      assert "  # " in line or previous.startswith("  # "), line
    previous = line


def test_each_builds(module):
  config = module.get_config()
  model_config, options = build(config)
  config.mesh.update(data=-1, fsdp=1, tensor=1)
  mesh = training.make_mesh(**config.mesh, devices=jax.devices()[:1])
  training.check_batch_size(
    config.data.batch_size,
    mesh=mesh,
    accumulation_steps=config.accumulation_steps,
  )
  assert options.l1.start_step + options.l1.warmup_steps <= options.steps
  training.learning_rate_schedule(options.optimizer, steps=options.steps)
  matrices = 3 if model_config.gated else 2
  ffn = matrices * model_config.d_ff * model_config.d_model
  floor = model_config.num_layers * ffn
  assert floor < parameters_of(config) < 20 * floor


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


@pytest.mark.parametrize("variant", PAPER_VARIANTS)
def test_paper_variant_builds(variant):
  config = paper_variant(variant)
  model_config, options = build(config)
  size, gate, kind = variant.split(",")
  assert model_config == nn.paper_config(
    size,
    gated=gate == "gated",
    activation="silu" if kind == "silu" else "relu",
    implementation={"sparse": "mosaic", "dense": "reference"}.get(kind),
    remat="attention",
    attention="cudnn",
    cross_entropy="chunked",
  )
  assert (options.l1.coefficient > 0) == (kind == "sparse")
  assert config.data.batch_size * config.data.seq_len == 2**20
  micro_batch = config.data.batch_size // config.accumulation_steps
  assert micro_batch * config.data.seq_len == 8 * 16_384
  published = PAPER_PARAMETERS[size]
  parameters = parameters_of(config)
  if gate == "gated":
    assert parameters == published
  else:
    # 2 · 8192 rows of a layer instead of 3 · 5632.
    rows = 2 * 8192 - 3 * 5632
    assert parameters - published == rows * 2048 * model_config.num_layers


def test_paper_uses_the_published_coefficient():
  options = train.train_options(paper.get_config("1b"))
  assert options.l1.coefficient == pytest.approx(
    training.coefficient_from_published(
      2e-5, accumulation_steps=8, world_size=8
    )
  )


def test_paper_reinitializes_if_asked():
  def every(variant):
    return paper.get_config(variant).dead_neurons.reinitialize_every_steps

  assert (every("2b"), every("2b,reinit")) == (0, 1)


@pytest.mark.parametrize(
  ("variant", "message"),
  [
    ("", "begins with no size"),
    ("3b", "begins with no size"),
    ("2b,sparse", "'sparse' in '2b,sparse' is unknown"),
    ("2b,dense,silu", "two baselines"),
    ("2b,silu,reinit", "leave out the baseline"),
  ],
)
def test_paper_refuses(variant, message):
  with pytest.raises(ValueError, match=message):
    paper.get_config(variant)
