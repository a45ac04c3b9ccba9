"""The feed-forward layer as a module, sparse or dense, for any Flax model."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from twell_jax.formats import Capacities
from twell_jax.nn.config import (
  ACTIVATIONS,
  check_choice,
  check_choices,
  check_implementation,
)
from twell_jax.nn.partitioning import Partitioning, parameter, use_weight
from twell_jax.ops import Activity, FFNOutput, sharded_sparse_ffn, sparse_ffn
from twell_jax.ops.choices import Choices


class SparseFFN(nnx.Module):
  """A feed-forward layer that computes active neurons only.

  gated      h = act(x gateᵀ) ⊙ (x upᵀ)   y = h down
  not gated  h = act(x gateᵀ)             y = h down

  Every parameter is [d_ff, d_model]: a neuron is one row of each.

  With activation "relu" the layer is `twell_jax.ops.sparse_ffn`. With "silu" it
  is the dense baseline in the same module: nothing is skipped, its `activity`
  counts the neurons whose h is not zero (nearly all), and its l1 is the
  constant zero, so that a sparsity objective leaves it alone.
  """

  def __init__(
    self,
    d_model: int,
    d_ff: int,
    *,
    gated: bool = True,
    activation: str = "relu",
    implementation: str | None = None,
    hot_neurons: int = 0,
    capacities: Capacities | None = None,
    dense_above: float | None = None,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    init_std: float = 0.02,
    partitioning: Partitioning | None = None,
    rngs: nnx.Rngs,
  ):
    """Draws the parameters.

    Args:
      d_model: Width of x and y.
      d_ff: Number of neurons.
      gated: Whether there is an up projection.
      activation: "relu" (sparse) or "silu" (dense).
      implementation: See `sparse_ffn`; None is the platform's choice.
      hot_neurons: See `sparse_ffn`, and `sharded_sparse_ffn` for a mesh.
      capacities: See `sparse_ffn`.
      dense_above: See `sparse_ffn`.
      dtype: Dtype of the computation; None is that of x.
      param_dtype: Dtype of the parameters.
      init_std: Standard deviation of the initial parameters.
      partitioning: The mesh over which tokens and neurons are cut. x must then
        be [batch, seq, d_model].
      rngs: Source of the initial parameters (stream "params").
    """
    choices = Choices(hot_neurons, capacities, dense_above)
    check_layer(
      d_ff=d_ff,
      activation=activation,
      implementation=implementation,
      choices=choices,
    )
    self.activation = activation
    self.implementation = implementation
    self.choices = choices
    self.dtype = dtype
    self.partitioning = partitioning

    def neurons():
      return parameter(
        rngs,
        (d_ff, d_model),
        ("mlp", "embed"),
        init_std=init_std,
        dtype=param_dtype,
      )

    self.gate = neurons()
    self.up = neurons() if gated else None
    self.down = neurons()

  def __call__(self, x: Float[Array, "*tokens d_model"]) -> FFNOutput:
    """Returns y, of the dtype of the computation, and the call's activity."""
    dtype = x.dtype if self.dtype is None else self.dtype
    x = x.astype(dtype)

    def weight(param: nnx.Param) -> Array:
      return use_weight(param, dtype=dtype, partitioning=self.partitioning)

    gate, down = weight(self.gate), weight(self.down)
    up = None if self.up is None else weight(self.up)
    return feed_forward(
      x,
      gate,
      up,
      down,
      activation=self.activation,
      implementation=self.implementation,
      choices=self.choices,
      partitioning=self.partitioning,
    )


def check_layer(
  *,
  d_ff: int,
  activation: str,
  implementation: str | None,
  choices: Choices,
) -> None:
  """Raises ValueError for a layer that cannot be computed."""
  check_choice("activation", activation, ACTIVATIONS)
  check_implementation(implementation, activation=activation)
  check_choices(choices, d_ff=d_ff, activation=activation)


def feed_forward(
  x: Float[Array, "*tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
  *,
  activation: str,
  implementation: str | None,
  choices: Choices,
  partitioning: Partitioning | None,
) -> FFNOutput:
  """What `SparseFFN` computes of weights as they are used."""
  if activation == "silu":
    return _dense_silu(x, gate, up, down)
  # On a mesh of one device the sharded layer is the layer itself.
  if partitioning is None or partitioning.mesh.size == 1:
    return sparse_ffn(
      x,
      gate,
      up,
      down,
      implementation=implementation,
      **choices._asdict(),
    )
  return sharded_sparse_ffn(
    x,
    gate,
    up,
    down,
    mesh=partitioning.mesh,
    token_axes=partitioning.batch_axes,
    neuron_axis=partitioning.tensor_axis,
    implementation=implementation,
    **choices._asdict(),
  )


def _dense_silu(
  x: Float[Array, "*tokens d_model"],
  gate: Float[Array, "d_ff d_model"],
  up: Float[Array, "d_ff d_model"] | None,
  down: Float[Array, "d_ff d_model"],
) -> FFNOutput:
  h = jax.nn.silu(jnp.einsum("...d,fd->...f", x, gate))
  if up is not None:
    h = h * jnp.einsum("...d,fd->...f", x, up)
  nonzero = (h != 0).astype(jnp.int32)
  activity = Activity(
    l1=jnp.float32(0),
    active=jnp.sum(nonzero, axis=-1),
    fired=jnp.sum(nonzero, axis=tuple(range(x.ndim - 1))),
    overflowed=jnp.int32(0),
    dense_tokens=jnp.int32(math.prod(x.shape[:-1])),
  )
  return FFNOutput(jnp.einsum("...f,fd->...d", h, down), activity)
