"""`SparseFFN` for models that are written in Flax linen.

    from twell_jax.nn import linen as sparse_linen

    y, activity = sparse_linen.SparseFFN(d_model, d_ff, name="ffn")(x)

The layer, its parameters' names and shapes and its logical axes are those of
the nnx module: the parameters of one are the parameters of the other
(`params_of`, `load_params`). It is a module of its own, not a bridge around the
other, so that `flax.linen`'s transformations, its axis metadata and
`get_partition_spec` find what they know.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twell_jax.formats import Capacities
from twell_jax.nn.ffn import check_layer, feed_forward
from twell_jax.nn.partitioning import Partitioning, gather_weight
from twell_jax.ops import FFNOutput
from twell_jax.ops.choices import Choices

_AXES = ("mlp", "embed")


class SparseFFN(linen.Module):
  """A feed-forward layer that computes active neurons only.

  See `twell_jax.nn.SparseFFN`, whose attributes these are. Parameters: gate,
  down and, if gated, up, [d_ff, d_model], boxed with their logical axes.
  """

  d_model: int
  d_ff: int
  gated: bool = True
  activation: str = "relu"
  implementation: str | None = None
  hot_neurons: int = 0
  capacities: Capacities | None = None
  dense_above: float | None = None
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  init_std: float = 0.02
  partitioning: Partitioning | None = None

  @linen.compact
  def __call__(self, x: Float[Array, "*tokens d_model"]) -> FFNOutput:
    """Returns y, of the dtype of the computation, and the call's activity.

    Raises:
      ValueError: Attributes that do not go together, or an x of another width.
    """
    choices = Choices(self.hot_neurons, self.capacities, self.dense_above)
    check_layer(
      d_ff=self.d_ff,
      activation=self.activation,
      implementation=self.implementation,
      choices=choices,
    )
    dtype = x.dtype if self.dtype is None else self.dtype
    # Drawn in float32 whatever the dtype: bfloat16 draws are coarse.
    draw = linen.initializers.normal(self.init_std, jnp.float32)

    def weight(name: str) -> Array:
      # Unboxed, whatever its declared type.
      param: Any = self.param(
        name,
        linen.with_logical_partitioning(
          lambda key: draw(key, (self.d_ff, self.d_model)).astype(
            self.param_dtype
          ),
          _AXES,
        ),
      )
      return gather_weight(
        param, _AXES, dtype=dtype, partitioning=self.partitioning
      )

    return feed_forward(
      x.astype(dtype),
      weight("gate"),
      weight("up") if self.gated else None,
      weight("down"),
      activation=self.activation,
      implementation=self.implementation,
      choices=choices,
      partitioning=self.partitioning,
    )
