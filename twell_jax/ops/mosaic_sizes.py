"""The static sizes of a call of the mosaic implementation, and their rules."""

from typing import NamedTuple

from jaxtyping import Array, Float

from pallas_kernels import rows
from twell_jax.formats import Capacities
from twell_jax.ops.choices import Choices
from twell_jax.ops.gate import check_dtype
from twell_jax.ops.hot_cold import H200


class Sizes(NamedTuple):
  """Static sizes of a call.

  Attributes:
    width: Of the ELL part.
    dense_rows: Tokens with more entries that are kept.
    max_active: Entries up to which the products at the entries are taken.
  """

  width: int
  dense_rows: int
  max_active: int


def default_ell_width(d_ff: int) -> int:
  """Active neurons of a token up to which its entries are packed.

  1/32 of the neurons, rounded up to a multiple of 128. Gathering breaks even
  with dense products at about 1/100 (`dense_above`), so a token beyond this
  width is better computed densely; it is as wide as it is because dense tokens
  come in blocks.
  """
  return min(d_ff, -(-d_ff // 32 // 128) * 128)


def dense_above(tokens: int) -> float:
  """Active share above which gathered rows take longer than dense products.

  One dense product takes as long as the rows of the modelled break-even share.
  Here it takes half as much again, since z is then computed twice: in the
  forward pass three products instead of two, and about as much more with the
  backward pass. Few tokens wait for the rows of a dense product, each of which
  serves all of them, so that the share is at least that of one token.
  """
  return 1.5 * max(H200.break_even(2), 1 / tokens)


def choose_sizes(
  x: Float[Array, "tokens d_model"], d_ff: int, choices: Choices
) -> Sizes:
  """Checks a call, and chooses its sizes.

  Args:
    x: Tokens.
    d_ff: Neurons, hot ones included.
    choices: What the caller chose.

  Raises:
    NotImplementedError: A dtype or d_model that the kernels do not have.
    ValueError: So many tokens that the work list cannot number their entries.
  """
  check_dtype(x)
  tokens, d_model = x.shape
  if d_model > rows.MAX_WIDTH:
    raise NotImplementedError(
      f"the Mosaic kernels hold rows of up to {rows.MAX_WIDTH} numbers and"
      f" d_model is {d_model}: use implementation='xla'"
    )
  # The slices of a layer on a mesh, or few tokens, may be smaller than what is
  # chosen for all.
  cold = d_ff - choices.hot_neurons
  width, dense_rows = choices.capacities or Capacities(
    default_ell_width(cold), 0
  )
  width, dense_rows = min(width, cold), min(dense_rows, tokens)
  # The entries are numbered twice over when their pattern is transposed.
  if tokens * width >= 2**30:
    raise ValueError(
      f"{tokens} tokens × {width} slots must be below 2^30, the range of the"
      " work lists: call the layer on fewer tokens at once"
    )
  share = choices.dense_above
  share = dense_above(tokens) if share is None else share
  max_active = min(tokens * width, int(min(share, 1.0) * tokens * cold))
  return Sizes(width, dense_rows, max_active)
