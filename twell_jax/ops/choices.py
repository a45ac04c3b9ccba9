"""How a layer is computed: choices of speed and memory, never of result.

They are static, a part of the compiled program, and handed to an implementation
as one. What an implementation has no use for it ignores.
"""

from typing import NamedTuple

from twell_jax.formats import Capacities


class Choices(NamedTuple):
  """The choices of one call of `sparse_ffn`.

  Attributes:
    hot_neurons: The first neurons, computed for all tokens by dense products;
      0 for none.
    capacities: Of the packed activation, the ELL width and the dense rows;
      None for the implementation's.
    dense_above: Share of the neurons (of those that are not hot) that is active
      in the mean over tokens and above which all tokens are computed by dense
      products; None for what was measured or modelled of the implementation.
  """

  hot_neurons: int = 0
  capacities: Capacities | None = None
  dense_above: float | None = None

  def check(self, *, d_ff: int) -> None:
    """Raises the ValueError of a choice that a layer of d_ff cannot have."""
    hot = self.hot_neurons
    if not _is_int(hot) or not 0 <= hot <= d_ff:
      raise ValueError(
        f"hot_neurons = {hot!r} must be an int from 0 to d_ff = {d_ff}: it is"
        " part of the program, not data"
      )
    if self.capacities is not None:
      if not isinstance(self.capacities, tuple) or len(self.capacities) != 2:
        raise ValueError(
          f"capacities = {self.capacities!r} must be a pair of ints: give"
          " formats.Capacities(width, dense_rows)"
        )
      width, dense_rows = self.capacities
      if not _is_int(width) or width < 1:
        raise ValueError(
          f"capacities.width = {width!r} must be an int of at least 1: the"
          " entries of a token that are packed (ell_width of a config)"
        )
      if not _is_int(dense_rows) or dense_rows < 0:
        raise ValueError(
          f"capacities.dense_rows = {dense_rows!r} must be an int of at least"
          " 0: the tokens with more entries that are kept"
        )
    share = self.dense_above
    if share is None:
      return
    is_number = isinstance(share, float | int) and not isinstance(share, bool)
    if not is_number or not 0 <= share <= 1:
      raise ValueError(
        f"dense_above = {share!r} must be a Python float: a share of the"
        " neurons from 0, always dense, to 1, never"
      )


def _is_int(value: object) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)
