"""The gathered kernels of training, called alike, on the lists they go through.

A layer has the entries of its tokens in ELL, [tokens, width]. Kernels whose
rows are tokens go through those; kernels whose rows are neurons go through the
same entries, listed by neuron (twell_jax/formats/transpose.py).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import sddmm, spmm, target, work_list
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.gradient_config import Product


class Kind(NamedTuple):
  """What a kernel takes and gives.

  Attributes:
    own_rows: Whether it has a matrix with a row for each list, to multiply the
      gathered rows with; its first one.
    gathered: Matrices from which an entry gathers a row.
    values: Numbers of an entry.
    sums: Results with a row for each list.
  """

  own_rows: bool
  gathered: int
  values: int
  sums: int


KINDS = {
  Product.SDDMM: Kind(own_rows=True, gathered=1, values=0, sums=0),
  Product.SDDMM_SPMM: Kind(own_rows=True, gathered=1, values=1, sums=1),
  Product.SPMM_TWO_MATRICES: Kind(False, gathered=2, values=2, sums=1),
  Product.SPMM_TWO_VALUES: Kind(False, gathered=1, values=2, sums=2),
}


class Lists(NamedTuple):
  """The sizes of the lists of entries that a kernel goes through.

  Attributes:
    rows: Lists: tokens or neurons.
    columns: The others.
    width: Entries of a list at most.
    slots: Of all lists together.
  """

  rows: int
  columns: int
  width: int
  slots: int

  def matrix_rows(self, product: Product) -> tuple[int, ...]:
    """Rows of each matrix of a kernel."""
    kind = KINDS[product]
    return (self.rows,) * kind.own_rows + (self.columns,) * kind.gathered


def lists_of(
  product: Product, *, tokens: int, neurons: int, width: int
) -> Lists:
  """Those of a layer whose tokens have up to `width` entries."""
  slots = tokens * width
  if product.is_by_neuron:
    return Lists(neurons, tokens, tokens, slots)
  return Lists(tokens, neurons, width, slots)


def work_of(
  lists: Lists,
  starts: Int32[Array, "rows"],
  counts: Int32[Array, "rows"],
  *,
  length: int,
) -> work_list.Work:
  """The work list, with room for any counts."""
  sizes = {"width": lists.width, "length": length, "total": lists.slots}
  return work_list.segments(
    starts,
    counts,
    length=length,
    capacity=work_list.max_segments(lists.rows, **sizes),
    part_capacity=work_list.max_parts(lists.rows, **sizes),
  )


class Operands(NamedTuple):
  """What a kernel is called with, besides its config.

  Attributes:
    matrices: As its `Kind` says, in the order of its arguments.
    columns: Of each slot.
    values: Likewise, as many as its `Kind` says.
    work: Whose the slots are.
    added: What each sum is added to; empty for zeros.
  """

  matrices: tuple[BFloat16[Array, "_ k"], ...]
  columns: Int32[Array, "slots"]
  values: tuple[Float32[Array, "slots"], ...]
  work: work_list.Work
  added: tuple[Array, ...] = ()


class Results(NamedTuple):
  """What a kernel gives.

  Attributes:
    dots: Dot products of the slots; None if it has none.
    sums: Its sums, of shape [rows, k].
  """

  dots: Float32[Array, "slots"] | None
  sums: tuple[Array, ...]


def call(
  product: Product,
  operands: Operands,
  *,
  rows: int,
  config: GatherConfig,
  dtype: DTypeLike = jnp.bfloat16,
) -> Results:
  """Calls the kernel, interpreted where kernels are.

  Args:
    product: Which one.
    operands: What it takes.
    rows: Lists, those of the work list.
    config: How many entries a step takes.
    dtype: That of the sums.
  """
  matrices, columns, values, work, added = operands
  options: dict[str, Any] = {
    "columns": columns,
    "work": work,
    "config": config,
    "interpret": target.interpret_params(),
  }
  if product is Product.SDDMM:
    return Results(sddmm.sddmm(*matrices, **options), ())
  options |= {"dtype": dtype, **dict(zip(("y0", "z0"), added))}
  if product is Product.SDDMM_SPMM:
    dots, y = sddmm.sddmm_spmm(*matrices, values=values[0], **options)
    return Results(dots, (y,))
  if product is Product.SPMM_TWO_MATRICES:
    y = spmm.spmm_two_matrices(
      *matrices, m=rows, a_values=values[0], b_values=values[1], **options
    )
    return Results(None, (y,))
  two = spmm.spmm_two_values(
    *matrices, m=rows, y_values=values[0], z_values=values[1], **options
  )
  return Results(None, tuple(two))
