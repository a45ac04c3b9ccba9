import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import aot
from tests.helpers.kernels import h200_mesh_with_cudnn
from tests.nn import numpy_model
from twell_jax.nn import (
  Attention,
  Partitioning,
  attention,
  rotate_half_split,
)
from twell_jax.nn.attention import causal_attention, cudnn_attention
from twell_jax.training import make_mesh


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_matches_numpy(num_kv_heads):
  attention = Attention(
    10,
    num_heads=4,
    num_kv_heads=num_kv_heads,
    head_dim=6,
    rope_theta=100.0,
    init_std=0.5,
    rngs=nnx.Rngs(0),
  )
  x = jax.random.normal(jax.random.key(1), (2, 7, 10))
  weights = jax.tree.map(
    np.float64, nnx.to_pure_dict(nnx.state(attention, nnx.Param))
  )
  expected = numpy_model.attention(np.float64(x), weights, theta=100.0)
  np.testing.assert_allclose(attention(x), expected, rtol=1e-4, atol=1e-5)


def test_agrees_with_the_library_in_bfloat16():
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = [(2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)]
  query, key, value = (
    jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes)
  )
  ours = causal_attention(query, key, value)
  with jax.numpy_dtype_promotion("standard"):
    library = jax.nn.dot_product_attention(query, key, value, is_causal=True)
  assert ours.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    ours.astype(jnp.float32), library.astype(jnp.float32), atol=1e-2
  )


def test_bfloat16_has_a_gradient_under_strict_promotion():
  x = jnp.ones((1, 3, 2, 4), jnp.bfloat16)
  gradient = jax.grad(lambda q: jnp.sum(causal_attention(q, x, x)))(x)
  assert gradient.dtype == jnp.bfloat16


def test_positions_are_relative():
  attention = Attention(
    8, num_heads=2, num_kv_heads=1, head_dim=4, init_std=0.5, rngs=nnx.Rngs(0)
  )
  x = jax.random.normal(jax.random.key(1), (2, 5, 8))
  positions = jnp.arange(5)[None]
  here = attention(x, positions=positions)
  np.testing.assert_allclose(here, attention(x), rtol=1e-6)
  elsewhere = attention(x, positions=positions + 1000)
  np.testing.assert_allclose(here, elsewhere, rtol=1e-3, atol=1e-5)
  stretched = attention(x, positions=3 * positions)
  assert np.abs(here - stretched).max() > 1e-3


def test_rotation_pairs_the_two_halves():
  x = jnp.zeros((1, 2, 1, 6)).at[..., 1].set(1.0)
  turned = rotate_half_split(x, jnp.arange(2)[None], theta=1000.0)[0, :, 0]
  angle = 1000.0 ** (-1 / 3)
  expected = np.zeros((2, 6))
  expected[0, 1] = 1.0
  expected[1, [1, 4]] = np.cos(angle), np.sin(angle)
  np.testing.assert_allclose(turned, expected, atol=1e-6)


@pytest.mark.parametrize(("devices", "segments"), [(1, 1), (2, 1), (2, 3)])
def test_cudnn_holds_no_scores(devices, segments):
  mesh = h200_mesh_with_cudnn(data=1, fsdp=devices, tensor=devices)
  partitioning = None if devices == 1 else Partitioning(mesh)
  # Cut in another way than they are used.
  spec = jax.P(None, ("fsdp", "tensor"))

  def array(heads):
    return jax.ShapeDtypeStruct(
      (2, 512, heads, 64), jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec)
    )

  segment_ids = None
  if segments > 1:
    segment_ids = jnp.broadcast_to(jnp.arange(512) * segments // 512, (2, 512))

  def loss(query, key, value):
    mixed = cudnn_attention(
      query, key, value, segment_ids=segment_ids, partitioning=partitioning
    )
    assert mixed.shape == (2, 512, 4, 64)
    return jnp.sum(mixed.astype(jnp.float32) ** 2)

  gradients = jax.grad(loss, argnums=(0, 1, 2))
  compiled = aot.compile_for_h200(
    gradients, array(4), array(2), array(2), mesh=mesh
  ).executable
  text = compiled.as_text()
  assert text is not None  # XLA:GPU has one
  form = "ScaleBiasSoftmax" if segments > 1 else "Softmax"
  assert text.count(f'custom_call_target="__cudnn$fmha{form}"') == 1
  assert text.count(f'custom_call_target="__cudnn$fmha{form}Backward"') == 1
  # With segments a number for each pair, which all heads share.
  scores = {
    math.prod(int(size) for size in sizes.split(","))
    for sizes in re.findall(r"\[([\d,]+512,512)\]", text)
  }
  assert not scores or segments > 1
  assert max(scores, default=0) <= 2 * 512 * 512
  for gradient, heads in zip(compiled.out_info, (4, 2, 2), strict=True):
    assert gradient.shape == (2, 512, heads, 64)
    assert gradient.dtype == jnp.bfloat16


def test_each_device_attends_with_its_heads(monkeypatch):
  """The kernel replaced by its definition, which runs without a GPU."""
  monkeypatch.setattr(
    attention,
    "_cudnn",
    lambda *arrays: causal_attention(*arrays[:3], segment_ids=arrays[3]),
  )
  monkeypatch.setattr(attention, "_check_platform", lambda *_: None)
  partitioning = Partitioning(make_mesh(data=1, fsdp=2, tensor=2))
  keys = jax.random.split(jax.random.key(0), 3)
  query, key, value = (
    jax.random.normal(k, (2, 5, heads, 8), jnp.bfloat16)
    for k, heads in zip(keys, (4, 2, 2), strict=True)
  )
  for segment_ids in (None, jnp.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])):
    mixed = jax.jit(cudnn_attention, static_argnames="partitioning")(
      query, key, value, segment_ids=segment_ids, partitioning=partitioning
    )
    expected = causal_attention(query, key, value, segment_ids=segment_ids)
    np.testing.assert_array_equal(
      mixed.astype(jnp.float32), expected.astype(jnp.float32)
    )


@pytest.mark.parametrize(
  ("head_dim", "dtype", "message"),
  [
    (8, jnp.float32, "computes in bfloat16 or float16 and dtype = 'float32'"),
    (12, jnp.bfloat16, "multiple of 8 up to 256 wide and head_dim = 12"),
    (264, jnp.float16, "multiple of 8 up to 256 wide and head_dim = 264"),
    (8, jnp.bfloat16, "needs an NVIDIA GPU and this device is a cpu"),
  ],
)
@pytest.mark.parametrize("sharded", [True, False])
def test_what_cudnn_cannot(head_dim, dtype, message, sharded):
  layer = Attention(
    8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=head_dim,
    implementation="cudnn",
    partitioning=Partitioning(make_mesh()) if sharded else None,
    rngs=nnx.Rngs(0),
  )
  with pytest.raises(ValueError, match=message) as error:
    layer(jnp.ones((4, 3, 8), dtype))
  assert "choose attention = 'full'" in str(error.value)


def test_without_cudnn(monkeypatch):
  def not_found(*_, **__):
    raise RuntimeError("cuDNN is not detected.")

  monkeypatch.setattr(jax.nn, "dot_product_attention", not_found)
  monkeypatch.setattr(attention, "_check_platform", lambda *_: None)
  x = jnp.ones((1, 3, 2, 8), jnp.bfloat16)
  with pytest.raises(ValueError, match=r"not detected.*nvidia-cudnn-cu13"):
    cudnn_attention(x, x, x)


def test_an_unknown_implementation():
  with pytest.raises(ValueError, match="implementation = 'flash' is unknown"):
    Attention(
      8,
      num_heads=2,
      num_kv_heads=2,
      head_dim=4,
      implementation="flash",
      rngs=nnx.Rngs(0),
    )
