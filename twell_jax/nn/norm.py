"""RMS normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twell_jax.nn.partitioning import named_parameter


class RMSNorm(nnx.Module):
  """Divides by the root mean square in float32, then multiplies by the scale.

  The normalised value returns to the dtype of the computation before it meets
  the scale, as in the published models.
  """

  def __init__(
    self,
    d_model: int,
    *,
    eps: float = 1e-5,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
  ):
    self.eps = eps
    self.dtype = dtype
    self.scale = named_parameter(jnp.ones((d_model,), param_dtype), ("norm",))

  def __call__(
    self, x: Float[Array, "*tokens d_model"]
  ) -> Float[Array, "*tokens d_model"]:
    """Normalises the last axis."""
    dtype = x.dtype if self.dtype is None else self.dtype
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normalised = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(dtype)
    scale = self.scale[...].astype(dtype)
    return normalised * scale.reshape((1,) * (x.ndim - 1) + scale.shape)
