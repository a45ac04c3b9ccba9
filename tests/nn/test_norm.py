import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn import numpy_model
from twell_jax.nn import RMSNorm


def test_matches_numpy():
  norm = RMSNorm(7, eps=1e-3)
  norm.scale[...] = jnp.arange(1.0, 8.0)
  x = 3 * jax.random.normal(jax.random.key(0), (2, 5, 7))
  expected = numpy_model.rms_norm(np.float64(x), np.arange(1.0, 8.0), eps=1e-3)
  np.testing.assert_allclose(norm(x), expected, rtol=2e-6)


def test_statistics_are_float32_in_half_precision():
  # The squares sum to 1e8, beyond float16, and are lost in bfloat16.
  x = jnp.full((1, 64), 1250.0, jnp.float16)
  y = RMSNorm(64, dtype=jnp.float16)(x)
  assert y.dtype == jnp.float16
  np.testing.assert_array_equal(y, np.ones((1, 64)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtype_defaults_to_that_of_x(dtype):
  norm = RMSNorm(4)
  assert norm(jnp.ones((3, 4), dtype)).dtype == dtype
  assert norm.scale[...].dtype == jnp.float32
