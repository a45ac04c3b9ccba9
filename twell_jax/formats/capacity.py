"""The sizes of a hybrid matrix, chosen from measured activity."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

# Widths are multiples of it: rows of ELL then begin at lines of 128 bytes, for
# values of any dtype.
_WIDTH_MULTIPLE = 128

# Dense rows are multiples of it, the rows that a tensor-core product takes.
_DENSE_ROWS_MULTIPLE = 64


class Capacities(NamedTuple):
  """Sizes of a hybrid matrix.

  Attributes:
    width: Entries kept per token in ELL.
    dense_rows: Tokens with more that are kept.
  """

  width: int
  dense_rows: int


def capacities(
  active: Int[np.ndarray, "*layers measured"],
  *,
  d_ff: int,
  tokens: int | None = None,
  slack: float = 1.5,
  value_bytes: int = 4,
) -> Capacities:
  """Sizes that take the least memory for the activity that was measured.

  A wider ELL part costs every token, and a dense row is d_ff wide. For each
  width, a multiple of 128 or d_ff itself, the share of the measured tokens that
  do not fit is known. It goes with that share of `tokens` in dense rows, times
  the slack, rounded up to a multiple of 64. Of these pairs the one of the
  fewest bytes is taken:

      tokens · width · (value_bytes + 2) + dense_rows · d_ff · value_bytes

  with 4 bytes for a column instead of 2 from 65,537 neurons on.

  No result depends on the sizes, and a token for which there is no room costs
  its recomputation and nothing else. At d_ff = 5632 another 128 entries pay for
  themselves where they take in some 2 % of the tokens.

  Layers in a scan share their sizes. They are then those of the layer with the
  most dense rows, at each width.

  Args:
    active: Active neurons of each measured token, as in `Activity.active`, on
      the host; of all layers that are to share the sizes.
    d_ff: Neurons.
    tokens: Tokens of a call; as many as were measured, by default.
    slack: Dense rows for each one that the measured tokens would need.
    value_bytes: Bytes kept of an active entry, besides its column: those of the
      gate value and, for training, of the up product.

  Raises:
    ValueError: An argument out of its bounds.
  """
  active = np.asarray(active)
  _check_activity(active, d_ff)
  measured = active.shape[-1]
  tokens = measured if tokens is None else tokens
  for name, value, least in (
    ("tokens", tokens, 1),
    ("slack", slack, 1),
    ("value_bytes", value_bytes, 1),
  ):
    if not least <= value < math.inf:
      raise ValueError(f"{name}={value} must be at least {least} and finite")

  column_bytes = 2 if d_ff <= 2**16 else 4

  def dense_rows(width: int) -> int:
    if width == d_ff:
      return 0
    beyond = int(np.max(np.sum(active > width, axis=-1)))
    needed = math.ceil(slack * beyond * tokens / measured)
    blocks = max(1, -(-needed // _DENSE_ROWS_MULTIPLE))
    return min(tokens, blocks * _DENSE_ROWS_MULTIPLE)

  def size_bytes(sizes: Capacities) -> int:
    entries = tokens * sizes.width * (value_bytes + column_bytes)
    return entries + sizes.dense_rows * d_ff * value_bytes

  widths = [*range(_WIDTH_MULTIPLE, d_ff, _WIDTH_MULTIPLE), d_ff]
  return min((Capacities(w, dense_rows(w)) for w in widths), key=size_bytes)


def _check_activity(active: np.ndarray, d_ff: int) -> None:
  if active.ndim == 0 or not active.size or active.dtype.kind not in "iu":
    raise ValueError(
      f"active is {active.dtype}{list(active.shape)} but must be integers, one"
      " for each of at least one token"
    )
  if d_ff < 1 or active.min() < 0 or active.max() > d_ff:
    raise ValueError(
      f"active is in {active.min()}..{active.max()} but must be in 0..{d_ff=},"
      " which is at least 1: give the d_ff of the layer that was measured"
    )
