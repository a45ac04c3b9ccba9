import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn import numpy_model
from twell_jax.nn import Attention, rotate_half_split
from twell_jax.nn.attention import causal_attention


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
