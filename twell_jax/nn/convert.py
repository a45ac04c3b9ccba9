"""The parameters of a feed-forward layer, between models of any kind.

The common form is a plain dict of arrays [d_ff, d_model] named gate, up and
down, without up if the layer is not gated: what `sparse_ffn` takes, what the
parameters of the linen module are, and what these functions give and take.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from twell_jax.nn.ffn import SparseFFN

FFNParams = Mapping[str, Float[Array, "d_ff d_model"]]


def params_of(ffn: SparseFFN) -> dict[str, Array]:
  """The parameters of an nnx layer: gate, down and, if gated, up."""
  return nnx.to_pure_dict(nnx.state(ffn, nnx.Param))


def load_params(ffn: SparseFFN, params: FFNParams) -> None:
  """Gives an nnx layer other parameters, in the dtype of its own.

  Raises:
    ValueError: Names or shapes that are not the layer's.
  """
  own = params_of(ffn)
  if own.keys() != params.keys():
    remedy = "rename them"
    if own.keys() ^ params.keys() == {"up"}:
      remedy = f"build it with gated={'up' in params}"
    raise ValueError(
      f"the parameters are {', '.join(sorted(params))} and the layer has"
      f" {', '.join(sorted(own))}: {remedy}"
    )
  # All are looked at before any is changed.
  for name, value in own.items():
    if not hasattr(params[name], "shape"):
      raise ValueError(
        f"{name} is a {type(params[name]).__name__}, not an array: unbox the"
        " variables of a linen module (flax.linen.meta.unbox)"
      )
    if params[name].shape != value.shape:
      raise ValueError(
        f"{name} has shape {params[name].shape} and the layer's is"
        f" {value.shape}, [d_ff, d_model]: see from_kernels for other layouts"
      )
  for name, value in own.items():
    getattr(ffn, name)[...] = jnp.asarray(params[name], value.dtype)


def from_kernels(
  gate: Float[Array, "d_model d_ff"],
  down: Float[Array, "d_ff d_model"],
  *,
  up: Float[Array, "d_model d_ff"] | None = None,
) -> dict[str, Array]:
  """Parameters from the kernels of dense layers, [in, out] as in Flax.

  (The weights of `torch.nn.Linear` are [out, in]: its gate and up are ours as
  they are, its down is transposed.)

  Raises:
    ValueError: Kernels that do not make one layer.
  """
  shapes = {"up": up} if up is not None else {}
  for name, kernel, wanted in (
    *((name, kernel, gate.shape) for name, kernel in shapes.items()),
    ("down", down, gate.shape[::-1]),
  ):
    if gate.ndim != 2 or kernel.shape != wanted:
      raise ValueError(
        f"kernel {name} has shape {kernel.shape} beside a gate of {gate.shape}"
        f": it must be {wanted}, with a gate [d_model, d_ff]"
      )
  params = {"gate": gate.T, "down": down}
  return params | ({} if up is None else {"up": up.T})


def to_kernels(params: FFNParams) -> dict[str, Array]:
  """The kernels [in, out] of dense layers; the inverse of `from_kernels`."""
  return {
    name: value if name == "down" else value.T for name, value in params.items()
  }
