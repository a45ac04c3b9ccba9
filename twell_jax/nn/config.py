"""The shape of a transformer, and the four sizes of arXiv 2603.23198."""

import dataclasses
from types import MappingProxyType
from typing import Any, Literal

from twell_jax.ops import IMPLEMENTATIONS, ffn

ACTIVATIONS = ("relu", "silu")
REMAT_POLICIES = ("none", "matmuls", "attention", "layer")
CROSS_ENTROPIES = ("full", "chunked")
DTYPES = ("float32", "bfloat16", "float16")

PaperSize = Literal["0p5b", "1b", "1p5b", "2b"]
# Size: number of layers, the only thing in which the paper's models differ.
PAPER_SIZES = MappingProxyType({"0p5b": 8, "1b": 18, "1p5b": 28, "2b": 38})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Everything that decides the parameters and the maths of `TransformerLM`.

  Attributes:
    vocab_size: Rows of the embedding.
    d_model: Width of the residual stream.
    d_ff: Neurons of each feed-forward layer.
    num_layers: Decoder blocks.
    num_heads: Query heads.
    num_kv_heads: Key and value heads, each shared by num_heads / num_kv_heads
      query heads.
    head_dim: Width of one head; None is d_model / num_heads.
    gated: Whether a neuron's activation is multiplied by an up projection.
    activation: "relu" computes active neurons only; "silu" is the dense layer.
    tie_embeddings: Whether the output head is the embedding.
    rope_theta: Base of the rotary frequencies.
    norm_eps: Added to the mean square in RMSNorm.
    init_std: Standard deviation of every initial weight matrix.
    dtype: Name of the dtype of the computation.
    param_dtype: Name of the dtype of the parameters.
    remat: What the backward pass computes again instead of keeping it. "none":
      nothing, autodiff keeps what it asks for. "matmuls": all but the products
      with the weights, so norms, rotary positions and softmax. "attention":
      also the products of attention, so that of a block only its input and its
      FFN's z and u are kept. "layer": everything, only each block's input is
      kept.
    cross_entropy: How training computes the loss: "full" from the logits of all
      tokens, "chunked" without ever holding them.
    cross_entropy_chunk: How many tokens of a device have logits at a time.
    implementation: How the sparse layer is computed: one of
      `twell_jax.ops.IMPLEMENTATIONS`, or None for the platform's choice.
    hot_neurons: First neurons of every layer that are computed for all tokens;
      a choice of speed (see `twell_jax.ops.sparse_ffn`). On a mesh, divisible
      by the size of its tensor axis.
  """

  vocab_size: int
  d_model: int
  d_ff: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int | None = None
  gated: bool = True
  activation: str = "relu"
  tie_embeddings: bool = True
  rope_theta: float = 100_000.0
  norm_eps: float = 1e-5
  init_std: float = 0.02
  dtype: str = "float32"
  param_dtype: str = "float32"
  remat: str = "none"
  cross_entropy: str = "full"
  cross_entropy_chunk: int = 2048
  implementation: str | None = None
  hot_neurons: int = 0

  def __post_init__(self):
    for name in (
      "vocab_size",
      "d_model",
      "d_ff",
      "num_layers",
      "num_heads",
      "num_kv_heads",
      "rope_theta",
      "norm_eps",
      "init_std",
      "cross_entropy_chunk",
    ):
      _check_positive(name, getattr(self, name))
    if self.head_dim is not None:
      _check_positive("head_dim", self.head_dim)
    elif self.d_model % self.num_heads:
      raise ValueError(
        f"d_model = {self.d_model} is not divisible by num_heads = "
        f"{self.num_heads}: change one of them or give head_dim"
      )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads = {self.num_heads} is not divisible by num_kv_heads = "
        f"{self.num_kv_heads}: choose a divisor of num_heads"
      )
    if self.resolved_head_dim % 2:
      raise ValueError(
        f"head_dim = {self.resolved_head_dim} is odd and rotary embeddings "
        "rotate pairs: choose an even head_dim (d_model / num_heads)"
      )
    check_choice("activation", self.activation, ACTIVATIONS)
    check_choice("remat", self.remat, REMAT_POLICIES)
    check_choice("cross_entropy", self.cross_entropy, CROSS_ENTROPIES)
    check_choice("dtype", self.dtype, DTYPES)
    check_choice("param_dtype", self.param_dtype, DTYPES)
    check_implementation(self.implementation, activation=self.activation)
    check_hot_neurons(
      self.hot_neurons, d_ff=self.d_ff, activation=self.activation
    )

  @property
  def resolved_head_dim(self) -> int:
    """Width of one head, given or derived."""
    return self.head_dim or self.d_model // self.num_heads


def paper_config(
  size: PaperSize, *, gated: bool = True, **overrides: Any
) -> TransformerConfig:
  """The model of a published size.

  Args:
    size: A key of `PAPER_SIZES`.
    gated: The paper trains both; the layer without gate has 8192 neurons
      instead of 5632, which makes nearly as many parameters.
    **overrides: Fields of `TransformerConfig` that shall differ.

  Returns:
    The config, in bfloat16 computation with float32 parameters.
  """
  check_choice("size", size, tuple(PAPER_SIZES))
  fields: dict[str, Any] = {
    "vocab_size": 49_152,
    "d_model": 2048,
    "d_ff": 5632 if gated else 8192,
    "num_layers": PAPER_SIZES[size],
    "num_heads": 32,
    "num_kv_heads": 32,
    "gated": gated,
    "dtype": "bfloat16",
  }
  return TransformerConfig(**(fields | overrides))


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
  """Raises ValueError unless value is one of the choices."""
  if value not in choices:
    raise ValueError(
      f"{name} = {value!r} is unknown: choose one of {', '.join(choices)}"
    )


def check_implementation(
  implementation: str | None, *, activation: str
) -> None:
  """Raises ValueError for a name that cannot serve this activation."""
  if implementation is None:
    return
  check_choice("implementation", implementation, tuple(IMPLEMENTATIONS))
  if activation != "relu":
    raise ValueError(
      f"implementation = {implementation!r} computes sparse ReLU layers and "
      f"activation = {activation!r} is dense: leave implementation unset or "
      "choose activation = 'relu'"
    )


def check_hot_neurons(hot_neurons: int, *, d_ff: int, activation: str) -> None:
  """Raises ValueError for a number that the layer cannot have."""
  ffn.check_hot_neurons(hot_neurons, d_ff=d_ff)
  if hot_neurons and activation != "relu":
    raise ValueError(
      f"hot_neurons = {hot_neurons} splits sparse ReLU layers and activation ="
      f" {activation!r} is dense: leave hot_neurons at 0 or choose activation ="
      " 'relu'"
    )


def _check_positive(name: str, value: float) -> None:
  if not value > 0:
    raise ValueError(f"{name} = {value} must be positive: give a value above 0")
