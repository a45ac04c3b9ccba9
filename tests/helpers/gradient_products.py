"""The kernels of training, called alike, and what they should give."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import gradient_config, sddmm, spmm, work_list
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.gradient_config import Product
from tests.helpers import gathered_cases, kernels
from tests.helpers.gathered_cases import Case, Shape

SDDMM = Product.SDDMM
SDDMM_SPMM = Product.SDDMM_SPMM
MATRICES = Product.SPMM_TWO_MATRICES
VALUES = Product.SPMM_TWO_VALUES


def of_each(*products: Product) -> pytest.MarkDecorator:
  """Parametrises a test by `product`; by all of them if none is named."""
  chosen = products or tuple(Product)
  return pytest.mark.parametrize(
    "product", chosen, ids=[product.value for product in chosen]
  )


def call(
  product: Product,
  case: Case,
  work: work_list.Work,
  config: GatherConfig,
  *,
  with_y0: bool = False,
  dtype: Any = jnp.bfloat16,
  **options: Any,
) -> tuple[jax.Array, ...]:
  """Dot products, if it has them, then sums, if it has them."""
  options |= {"columns": case.columns, "work": work, "config": config}
  if product == SDDMM:
    return (sddmm.sddmm(case.a, case.b, **options),)
  options["dtype"] = dtype
  if with_y0:
    options["y0"] = case.y0
  if product == SDDMM_SPMM:
    return sddmm.sddmm_spmm(case.a, case.b, values=case.v, **options)
  options["m"] = case.y0.shape[0]
  if product == MATRICES:
    values: dict[str, Any] = {"a_values": case.v, "b_values": case.w}
    return (spmm.spmm_two_matrices(case.b, case.c, **values, **options),)
  values = {"y_values": case.v, "z_values": case.w}
  if with_y0:
    options["z0"] = case.z0
  return spmm.spmm_two_values(case.b, **values, **options)


@functools.partial(
  jax.jit, static_argnames=("product", "config", "with_y0", "dtype", "spare")
)
def run(case, *, product, config, with_y0=False, dtype=jnp.bfloat16, spare=0):
  """`call`, interpreted, with a work list of the config."""
  y0, z0 = case.y0.astype(dtype), case.z0.astype(dtype)
  return call(
    product,
    case._replace(y0=y0, z0=z0),
    gathered_cases.make_work(case, config.segment_length, spare=spare),
    config,
    with_y0=with_y0,
    dtype=dtype,
    interpret=kernels.interpret_params(),
  )


def check(case, *, product, with_y0=False, dtype=jnp.bfloat16, **options):
  """`run` without races, its results compared with float64; returns them."""
  with kernels.no_races():
    results = jax.block_until_ready(
      run(case, product=product, with_y0=with_y0, dtype=dtype, **options)
    )
  sums = list(results)
  if product in (SDDMM, SDDMM_SPMM):
    gathered_cases.check_dots(sums.pop(0), gathered_cases.expected_dots(case))
  terms = {
    SDDMM: [],
    SDDMM_SPMM: [[(case.v, case.b)]],
    MATRICES: [[(case.v, case.b), (case.w, case.c)]],
    VALUES: [[(case.v, case.b)], [(case.w, case.b)]],
  }[product]
  for y, summed, y0 in zip(sums, terms, (case.y0, case.z0)):
    assert y.dtype == dtype
    gathered_cases.check_sum(
      y, gathered_cases.expected_sum(case, summed, y0 if with_y0 else None)
    )
  assert len(sums) == len(terms)
  return results


# Entries of a token at most, where a kernel is compiled.
ELL_WIDTH = 128


def shape_of(
  product: Product, tokens: int, k: int, neurons: int
) -> tuple[Shape, GatherConfig]:
  """By token or by neuron, as a backward pass has the product."""
  slots = tokens * ELL_WIDTH
  if product in (SDDMM, MATRICES):
    m, n, width = tokens, neurons, ELL_WIDTH
  else:
    m, n, width = neurons, tokens, tokens
  config = gradient_config.default_config(
    product, m=m, k=k, width=width, active=slots / 4 / m
  )
  shape = Shape(m, k, n, slots=slots, width=width, length=config.segment_length)
  return shape, config


def program(product, shape, config, *, dtype=jnp.bfloat16, **options):
  """A function to compile, and the types of its arguments."""
  types = gathered_cases.operand_types(shape)
  work = types.pop("work")
  types |= {"starts": None, "counts": None}
  for name in ("y0", "z0"):
    types[name] = jax.ShapeDtypeStruct(types[name].shape, dtype)

  def function(case, work):
    return call(product, case, work, config, dtype=dtype, **options)

  return function, (Case(**types), work)


def names_of(product: Product, work: work_list.Work) -> list[str]:
  """The kernels that it runs: its own, and one for each sum with parts."""
  sums = {SDDMM: 0, SDDMM_SPMM: 1, MATRICES: 1, VALUES: 2}[product]
  return [product.value] + ["add_parts"] * (sums if work.part_capacity else 0)
