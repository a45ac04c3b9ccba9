import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core

from tests.helpers.kernels import h200_mesh_with_cudnn
from tests.nn import numpy_model
from twell_jax.nn import (
  Partitioning,
  TransformerConfig,
  TransformerLM,
  logical_axes,
)


def tiny(**changes):
  fields: dict[str, Any] = {
    "vocab_size": 13,
    "d_model": 16,
    "d_ff": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "init_std": 0.3,
    "implementation": "reference",
  }
  return TransformerConfig(**(fields | changes))


def build(config):
  return TransformerLM(config, rngs=nnx.Rngs(0))


@nnx.jit
def run(model, tokens):
  return model(tokens)


def tokens(length=9):
  return jax.random.randint(jax.random.key(0), (2, length), 0, 13)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"gated": False, "tie_embeddings": False, "num_kv_heads": 1},
    {"activation": "silu", "implementation": None, "head_dim": 6},
  ],
  ids=["relu", "plain", "silu"],
)
def test_matches_numpy(changes):
  config = tiny(**changes)
  model = build(config)
  logits, activity = run(model, tokens())
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  expected = numpy_model.transformer(params, np.asarray(tokens()), config)
  np.testing.assert_allclose(logits, expected.logits, rtol=1e-3, atol=1e-4)
  np.testing.assert_array_equal(activity.active, expected.active)
  np.testing.assert_array_equal(activity.fired, expected.fired)
  l1 = expected.l1 if config.activation == "relu" else np.zeros(3)
  np.testing.assert_allclose(activity.l1, l1, rtol=1e-4)
  assert activity.overflowed.shape == (3,)


def test_the_future_does_not_matter():
  model = build(tiny())
  first = tokens()
  second = first.at[:, 5:].set((first[:, 5:] + 1) % 13)
  before, after = run(model, first).logits, run(model, second).logits
  np.testing.assert_array_equal(before[:, :5], after[:, :5])
  assert np.all(np.abs(before[:, 5:] - after[:, 5:]).max(-1) > 1e-4)


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_separate_documents_do_not_see_each_other(remat):
  """In one sequence each has the logits it has alone."""
  model = build(tiny(remat=remat))
  lengths = (4, 1, 7)
  whole = tokens(sum(lengths))
  segment_ids = jnp.repeat(jnp.arange(3), jnp.array(lengths))[None]
  positions = jnp.concatenate([jnp.arange(length) for length in lengths])[None]
  segment_ids = jnp.broadcast_to(segment_ids, whole.shape)

  @nnx.jit
  def packed(model, tokens):
    return model(tokens, positions=positions, segment_ids=segment_ids).logits

  logits = packed(model, whole)
  start = 0
  for length in lengths:
    alone = run(model, whole[:, start : start + length]).logits
    np.testing.assert_allclose(
      logits[:, start : start + length], alone, rtol=1e-4, atol=1e-5
    )
    start += length
  joined = run(model, whole).logits
  assert np.abs(joined - logits)[:, 4:].max() > 1e-2
  np.testing.assert_allclose(joined[:, :4], logits[:, :4], rtol=1e-4, atol=1e-5)


LAYERS: dict[str, dict[str, Any]] = {
  "reference": {},
  # It would choose dense products for so small a model.
  "xla": {"implementation": "xla", "dense_above": 1.0},
  "silu": {"activation": "silu", "implementation": None},
}


def objective(graphdef, *, length=9):
  """A function of the parameters to which all layers and tokens contribute."""

  def of_params(params):
    output = nnx.merge(graphdef, params)(tokens(length))
    return jnp.mean(jnp.square(output.logits)) + jnp.sum(output.activity.l1)

  return of_params


def value_and_gradient(**changes):
  graphdef, params = nnx.split(build(tiny(**changes)))
  return jax.jit(jax.value_and_grad(objective(graphdef)))(params)


def assert_close(expected, actual):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    expected,
    actual,
  )


@pytest.mark.parametrize(
  "layer",
  [
    "xla",
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in LAYERS
      if name != "xla"
    ),
  ],
)
def test_remat_changes_no_gradient(layer):
  expected = value_and_gradient(**LAYERS[layer])
  for remat in ("matmuls", "attention", "layer"):
    assert_close(expected, value_and_gradient(**LAYERS[layer], remat=remat))


@pytest.mark.parametrize("remat", ["none", "attention"])
def test_recomputing_the_ffn_changes_no_gradient(remat):
  fields = LAYERS["silu"] | {"remat": remat}
  assert_close(
    value_and_gradient(**fields),
    value_and_gradient(**fields, ffn_residuals="recomputed"),
  )


@pytest.mark.parametrize("layer", ["reference", "silu"])
def test_what_each_policy_keeps(layer):
  """In a block, and no more than the module's docstring says."""

  def kept(remat, **changes):
    config = tiny(**LAYERS[layer], remat=remat, **changes)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: build(config)))
    backward = jax.eval_shape(
      lambda params: jax.vjp(objective(graphdef), params)[1], params
    )
    sizes = collections.Counter(
      leaf.size // 3
      for leaf in jax.tree.leaves(backward)
      if leaf.shape[:1] == (3,)
    )
    # Parameters that the backward pass multiplies by are among them.
    return {size: n for size, n in sizes.items() if size % 18 == 0}

  # Numbers of 18 tokens; the parameters of a layer are no multiple of 18.
  x, key_or_value, neurons = 18 * 16, 18 * 8, 18 * 24
  assert kept("layer") == {x: 1}
  assert kept("attention") == {x: 1, neurons: 2}
  # The block's input, q and attention's output; k and v.
  assert kept("matmuls") == {x: 3, key_or_value: 2, neurons: 2}
  everything = kept("none")
  assert all(everything[size] >= n for size, n in kept("matmuls").items())
  assert sum(everything.values()) > 8
  assert neurons not in kept("none", ffn_residuals="recomputed")
  assert kept("matmuls", ffn_residuals="recomputed") == {x: 3, key_or_value: 2}
  assert kept("attention", ffn_residuals="recomputed") == {x: 1}


def calls(jaxpr):
  """How often a function calls each kernel, those of its inner functions too.

  Those of the bodies of loops are counted once.
  """
  counts: collections.Counter[str] = collections.Counter()
  for equation in jaxpr.eqns:
    primitive = equation.primitive.name
    counts[equation.params.get("name", primitive)] += 1
    for inner in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda leaf: isinstance(leaf, core.Jaxpr | core.ClosedJaxpr),
    ):
      if isinstance(inner, core.ClosedJaxpr):
        counts += calls(inner.jaxpr)
      elif isinstance(inner, core.Jaxpr):
        counts += calls(inner)
  return counts


@pytest.mark.parametrize(
  ("remat", "ffn_residuals", "attention_runs", "gate_pack_runs"),
  [
    ("none", "kept", 1, 1),
    ("matmuls", "kept", 1, 1),
    ("attention", "kept", 1, 1),
    ("matmuls", "recomputed", 1, 2),
    ("layer", "kept", 2, 2),
  ],
)
def test_kernels_run_again_only_if_asked_to(
  remat, ffn_residuals, attention_runs, gate_pack_runs
):
  mesh = h200_mesh_with_cudnn(data=1, fsdp=2, tensor=1)
  config = tiny(
    d_model=64,
    d_ff=256,
    num_heads=8,
    dtype="bfloat16",
    implementation="mosaic",
    attention="cudnn",
    remat=remat,
    ffn_residuals=ffn_residuals,
  )
  model = nnx.eval_shape(
    lambda: TransformerLM(
      config, partitioning=Partitioning(mesh), rngs=nnx.Rngs(0)
    )
  )
  graphdef, params = nnx.split(model)
  gradient = jax.grad(objective(graphdef, length=8))
  counts = calls(jax.make_jaxpr(gradient)(params).jaxpr)
  assert counts["dot_product_attention_fwd_wrapper"] == attention_runs
  assert counts["dot_product_attention_bwd_wrapper"] == 1
  assert counts["gate_pack"] == gate_pack_runs


def test_hot_neurons_reach_every_layer():
  """And change no result, in a scan with remat."""

  def gradient(**changes):
    def loss(model):
      output = model(tokens())
      return jnp.mean(jnp.square(output.logits)) + jnp.sum(output.activity.l1)

    model = build(tiny(**changes))
    assert model.layers.ffn.choices.hot_neurons == changes.get("hot_neurons", 0)
    return nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(model))

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    gradient(**LAYERS["xla"], hot_neurons=7, remat="layer"),
    gradient(),
  )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
def test_logits_are_the_product_with_the_output_matrix(tied):
  model = build(tiny(tie_embeddings=tied))
  states = model.hidden_states(tokens())
  logits, activity = model(tokens())
  matrix = model.output_matrix[...]
  assert matrix.shape == (13, 16)
  np.testing.assert_allclose(states.hidden @ matrix.T, logits, rtol=1e-4)
  np.testing.assert_array_equal(states.activity.active, activity.active)


def test_layers_are_stacked_and_differ():
  params = nnx.to_pure_dict(nnx.state(build(tiny()), nnx.Param))
  gate = params["layers"]["ffn"]["gate"]
  assert gate.shape == (3, 24, 16)
  assert not np.array_equal(gate[0], gate[1])
  for leaf in jax.tree.leaves(params):
    if np.ptp(leaf) > 0:  # Every matrix; the scales start at one.
      np.testing.assert_allclose(np.std(leaf), 0.3, rtol=0.15)


def test_every_parameter_names_its_axes():
  model = nnx.eval_shape(lambda: build(tiny(tie_embeddings=False)))
  names = logical_axes(model)
  shapes = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  ranks = jax.tree.map(
    lambda leaf, axes: len(leaf.shape) - len(axes), shapes, names
  )
  assert set(jax.tree.leaves(ranks)) == {0}
  assert names == {
    "embedding": ("vocab", "embed"),
    "head": ("vocab", "embed"),
    "final_norm": {"scale": ("norm",)},
    "layers": {
      "attention_norm": {"scale": ("layers", "norm")},
      "ffn_norm": {"scale": ("layers", "norm")},
      "attention": {
        "query": ("layers", "embed", "heads", "head_dim"),
        "key": ("layers", "embed", "kv_heads", "head_dim"),
        "value": ("layers", "embed", "kv_heads", "head_dim"),
        "out": ("layers", "heads", "head_dim", "embed"),
      },
      "ffn": dict.fromkeys(("gate", "up", "down"), ("layers", "mlp", "embed")),
    },
  }


def test_half_precision_computes_float32_logits():
  config = tiny(dtype="bfloat16", remat="layer")
  logits = run(build(config), tokens()).logits
  assert logits.dtype == jnp.float32
  full = run(build(tiny()), tokens()).logits
  np.testing.assert_allclose(logits, full, atol=0.1 * np.abs(full).max())


def test_an_unknown_token_is_not_a_guess():
  batch = jnp.array([[1, 2, 12, 3], [1, 2, 13, 3]])
  logits = run(build(tiny()), batch).logits
  assert np.all(np.isfinite(logits[0]))
  assert np.all(np.isnan(logits[1]))
