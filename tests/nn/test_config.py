import dataclasses
from typing import Any, cast

import pytest
from flax import nnx

from twell_jax.nn import (
  PAPER_SIZES,
  TransformerConfig,
  TransformerLM,
  num_parameters,
  paper_config,
)

VALID: dict[str, Any] = {
  "vocab_size": 12,
  "d_model": 16,
  "d_ff": 24,
  "num_layers": 2,
  "num_heads": 4,
  "num_kv_heads": 2,
}


def test_head_dim_follows_d_model_unless_given():
  assert TransformerConfig(**VALID).resolved_head_dim == 4
  assert TransformerConfig(**VALID, head_dim=6).resolved_head_dim == 6
  # A given head_dim frees d_model from being a multiple of the heads.
  odd = TransformerConfig(**{**VALID, "d_model": 33}, head_dim=8)
  assert odd.resolved_head_dim == 8


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"d_model": 18}, "d_model = 18 is not divisible by num_heads = 4"),
    ({"num_kv_heads": 3}, "num_heads = 4 is not divisible by num_kv_heads = 3"),
    ({"head_dim": 3}, "head_dim = 3 is odd"),
    ({"d_model": 12}, "head_dim = 3 is odd"),
    ({"d_ff": 0}, "d_ff = 0 must be positive"),
    ({"num_layers": -1}, "num_layers = -1 must be positive"),
    ({"norm_eps": 0.0}, "norm_eps = 0.0 must be positive"),
    ({"activation": "gelu"}, "activation = 'gelu' is unknown.*relu, silu"),
    ({"remat": "all"}, "remat = 'all' is unknown.*none, matmuls, attention,"),
    (
      {"cross_entropy": "some"},
      "cross_entropy = 'some' is unknown.*full, chunked",
    ),
    ({"cross_entropy_chunk": 0}, "cross_entropy_chunk = 0 must be positive"),
    ({"dtype": "float8"}, "dtype = 'float8' is unknown.*bfloat16"),
    ({"ffn_residuals": "none"}, "ffn_residuals = 'none' is unknown.*kept"),
    ({"attention": "flash"}, "attention = 'flash' is unknown.*full, cudnn"),
    ({"attention": "cudnn"}, "dtype = 'float32': change dtype or choose"),
    (
      {"attention": "cudnn", "dtype": "bfloat16", "head_dim": 12},
      "head_dim = 12: change it or choose attention = 'full'",
    ),
    ({"param_dtype": "f32"}, "param_dtype = 'f32' is unknown"),
    ({"implementation": "cuda"}, "implementation = 'cuda' is unknown.*xla"),
    ({"hot_neurons": 25}, "hot_neurons = 25 must be an int .* d_ff = 24"),
    (
      {"activation": "silu", "hot_neurons": 8},
      "hot_neurons = 8 is a choice for sparse ReLU layers and activation =",
    ),
    (
      {"activation": "silu", "implementation": "xla"},
      "implementation = 'xla' computes sparse ReLU layers",
    ),
  ],
)
def test_errors_name_the_value_in_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as error:
    TransformerConfig(**{**VALID, **changes})
  assert "\n" not in str(error.value)


def test_replace_validates_too():
  config = TransformerConfig(**VALID)
  with pytest.raises(ValueError, match="num_heads = 5"):
    dataclasses.replace(config, num_heads=5)


@pytest.mark.parametrize(
  ("size", "parameters"),
  [
    ("0p5b", 511_739_904),
    ("1b", 1_025_583_104),
    ("1p5b", 1_539_426_304),
    ("2b", 2_053_269_504),
  ],
)
def test_paper_sizes(size, parameters):
  def build(config):
    return nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))

  gated = paper_config(size)
  assert num_parameters(build(gated)) == parameters
  plain = paper_config(size, gated=False)
  # Two matrices of 8192 neurons instead of three of 5632.
  difference = PAPER_SIZES[size] * 2048 * (3 * 5632 - 2 * 8192)
  assert num_parameters(build(plain)) == parameters - difference


def test_paper_config_takes_overrides():
  assert paper_config("1b", remat="layer").remat == "layer"
  with pytest.raises(ValueError, match=r"size = '7b' is unknown.*0p5b"):
    paper_config(cast(Any, "7b"))
