"""The shape of a transformer, and the four sizes of arXiv 2603.23198."""

import dataclasses
from types import MappingProxyType
from typing import Any, Literal

from twell_jax.formats import Capacities
from twell_jax.ops import IMPLEMENTATIONS
from twell_jax.ops.choices import Choices

ACTIVATIONS = ("relu", "silu")
REMAT_POLICIES = ("none", "matmuls", "attention", "layer")
FFN_RESIDUALS = ("kept", "recomputed")
ATTENTIONS = ("full", "cudnn")
CROSS_ENTROPIES = ("full", "chunked")
DTYPES = ("float32", "bfloat16", "float16")
_CUDNN_DTYPES = ("bfloat16", "float16")

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
      with the weights, so norms, rotary positions and, without cuDNN, the
      softmax. "attention": also attention's products with its weights, so that
      of a block its input is kept, what its FFN asks for and cuDNN's result.
      "layer": everything, only each block's input is kept.
    ffn_residuals: Whether what the FFN asks for is "kept" or "recomputed" from
      its input, which of dense layers saves most of the memory at two thirds of
      the FLOPs of their forward pass.
    attention: How attention is computed. "full": with the scores of all pairs
      of tokens in memory, on any device and in any dtype. "cudnn": without
      them, by cuDNN on an NVIDIA GPU, in half precision, for heads whose width
      is a multiple of 8 up to 128, or 256 on Hopper GPUs, and for training with
      sequences of even length.
    cross_entropy: How training computes the loss: "full" from the logits of all
      tokens, "chunked" without ever holding them.
    cross_entropy_chunk: How many tokens of a device have logits at a time.
    implementation: How the sparse layer is computed: one of
      `twell_jax.ops.IMPLEMENTATIONS`, or None for the platform's choice.
    hot_neurons: First neurons of every layer that are computed for all tokens;
      a choice of speed (see `twell_jax.ops.sparse_ffn`). On a mesh, divisible
      by the size of its tensor axis.
    ell_width: For implementation "mosaic", active neurons of a token that are
      packed; None is 1/32 of the neurons, rounded up to a
      multiple of 128. Like the next two, a
      choice of speed and memory (`twell_jax.formats.capacities` makes the first
      two from measured activity).
    dense_rows: Of the tokens with more, how many a device keeps for the
      backward pass instead of computing them again; only with an ell_width.
    dense_above: Share of active neurons above which a layer is computed by
      dense products; None is the implementation's.
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
  ffn_residuals: str = "kept"
  attention: str = "full"
  cross_entropy: str = "full"
  cross_entropy_chunk: int = 2048
  implementation: str | None = None
  hot_neurons: int = 0
  ell_width: int | None = None
  dense_rows: int = 0
  dense_above: float | None = None

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
    if type(self.cross_entropy_chunk) is not int:
      raise ValueError(
        f"cross_entropy_chunk = {self.cross_entropy_chunk!r} must be an int: it"
        " is a number of tokens"
      )
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
    check_choice("ffn_residuals", self.ffn_residuals, FFN_RESIDUALS)
    check_attention(
      self.attention, dtype=self.dtype, head_dim=self.resolved_head_dim
    )
    check_choice("cross_entropy", self.cross_entropy, CROSS_ENTROPIES)
    check_choice("dtype", self.dtype, DTYPES)
    check_choice("param_dtype", self.param_dtype, DTYPES)
    check_implementation(self.implementation, activation=self.activation)
    if self.dense_rows and self.ell_width is None:
      raise ValueError(
        f"dense_rows = {self.dense_rows} are kept for tokens with more than"
        " ell_width active neurons, which is not given: set ell_width too"
      )
    check_choices(self.choices, d_ff=self.d_ff, activation=self.activation)

  @property
  def choices(self) -> Choices:
    """How the sparse layers are computed."""
    capacities = None
    if self.ell_width is not None:
      capacities = Capacities(self.ell_width, self.dense_rows)
    return Choices(self.hot_neurons, capacities, self.dense_above)

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


def check_attention(attention: str, *, dtype: str, head_dim: int) -> None:
  """Raises ValueError for an attention that cannot serve dtype or head_dim."""
  check_choice("attention", attention, ATTENTIONS)
  if attention != "cudnn":
    return
  if dtype not in _CUDNN_DTYPES:
    raise ValueError(
      f"attention = 'cudnn' computes in {' or '.join(_CUDNN_DTYPES)} and dtype"
      f" = {dtype!r}: change dtype or choose attention = 'full'"
    )
  if head_dim % 8 or head_dim > 256:
    raise ValueError(
      "attention = 'cudnn' takes heads of a multiple of 8 up to 256 wide and"
      f" head_dim = {head_dim}: change it or choose attention = 'full'"
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


def check_choices(choices: Choices, *, d_ff: int, activation: str) -> None:
  """Raises ValueError for choices that the layer cannot have."""
  choices.check(d_ff=d_ff)
  if choices != Choices() and activation != "relu":
    changed = {
      name: value
      for name, value in choices._asdict().items()
      if value != Choices._field_defaults[name]
    }
    name, value = next(iter(changed.items()))
    if name == "capacities":
      name = "capacities (ell_width)"
    raise ValueError(
      f"{name} = {value} is a choice for sparse ReLU layers and activation ="
      f" {activation!r} is dense: leave {name} unset or choose activation ="
      " 'relu'"
    )


def _check_positive(name: str, value: float) -> None:
  if not value > 0:
    raise ValueError(f"{name} = {value} must be positive: give a value above 0")
