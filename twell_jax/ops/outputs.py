"""What a sparse feed-forward layer returns: its output and its activity."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int32, PyTree


class Activity(NamedTuple):
  """Which neurons worked in one call, as arrays on device.

  Attributes:
    l1: Mean over tokens of the sum over neurons of |h|, where h is the
      activation that enters the down projection; a float32 scalar and the only
      differentiable field. It is the layer's term of the sparsity objective
      (arXiv 2603.23198): add `coefficient * l1` to the loss.
    active: Active neurons of each token, the leading shape of x.
    fired: Tokens on which each neuron was active; 0 means that the neuron was
      silent during the whole call.
    overflowed: Tokens that did not fit the capacity of a packed format.
    dense_tokens: Tokens computed by dense products: those that overflowed, or
      all where the layer is too active for the sparse ones to be faster. The
      result depends on neither.
  """

  l1: Float[Array, ""]
  active: Int32[Array, "*tokens"]
  fired: Int32[Array, "d_ff"]
  overflowed: Int32[Array, ""]
  dense_tokens: Int32[Array, ""]


class FFNOutput(NamedTuple):
  """The output y, of the shape and dtype of x, and the call's `Activity`."""

  y: Float[Array, "*tokens d_model"]
  activity: Activity


class Forward(NamedTuple):
  """What the forward function of an implementation returns.

  `kept` is what its backward function receives besides the inputs: any pytree.
  """

  output: FFNOutput
  kept: PyTree[Array]


class Gradients(NamedTuple):
  """Cotangents of the inputs; `up` is None for a layer without one."""

  x: Float[Array, "tokens d_model"]
  gate: Float[Array, "d_ff d_model"]
  up: Float[Array, "d_ff d_model"] | None
  down: Float[Array, "d_ff d_model"]

  def add_matrices(self, part: "Gradients") -> "Gradients":
    """The sums over two sets of tokens, of the matrices; x as it is here."""
    up = self.up
    if up is not None and part.up is not None:
      up = up + part.up
    return self._replace(
      gate=self.gate + part.gate, up=up, down=self.down + part.down
    )
