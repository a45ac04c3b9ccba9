"""The kernels of training, lowered and compiled for an H200."""

import jax.numpy as jnp
import pytest

from pallas_kernels import rows
from tests.helpers import gathered_cases, kernels
from tests.helpers.gradient_products import (
  ELL_WIDTH,
  MATRICES,
  SDDMM,
  SDDMM_SPMM,
  VALUES,
  names_of,
  of_each,
  program,
  shape_of,
)


@of_each()
@pytest.mark.parametrize("length", [ELL_WIDTH, 8], ids=["whole", "split"])
def test_lowers(product, length):
  shape, config = shape_of(product, ELL_WIDTH, 2048, 64)
  shape = shape._replace(length=length)
  function, arguments = program(product, shape, config, with_y0=True)
  text = kernels.lower_for_cuda(function, *arguments)
  assert text.count("mosaic_gpu_v2") == len(names_of(product, arguments[1]))


# Tokens, K and neurons. The others are the widest rows for a step of so many.
SHAPES = [(16384, 2048, 5632), (16384, 4096, 14336), (512, 768, 1536)]
WIDTHS = {
  SDDMM: (256, 1024, 2560, 5120),
  SDDMM_SPMM: (256, 1024, 2560, 5120),
  MATRICES: (256, 1792, 3072),
  VALUES: (256, 1792, 3072),
}


@pytest.mark.parametrize(
  ("product", "shape"),
  [(product, shape) for product in WIDTHS for shape in SHAPES]
  + [(product, (2048, k, 4096)) for product in WIDTHS for k in WIDTHS[product]],
  ids=lambda value: getattr(value, "value", str(value)),
)
def test_compiles_for_h200(product, shape):
  tokens, k, neurons = shape
  sizes, config = shape_of(product, tokens, k, neurons)
  function, arguments = program(product, sizes, config)
  compiled = kernels.compile_for_h200(function, *arguments)
  names = names_of(product, arguments[1])
  gathered_cases.check_kernels(compiled, names)
  loads = {
    SDDMM: config.rows_per_step + 1,
    SDDMM_SPMM: config.rows_per_step + 1,
    MATRICES: 2 * config.rows_per_step,
    VALUES: config.rows_per_step,
  }[product]
  assert gathered_cases.row_loads(compiled, k) >= loads
  # Nothing is copied, only parts are stored.
  parts = arguments[1].part_capacity * (len(names) - 1)
  stored = gathered_cases.temporary_bytes(compiled)
  assert stored <= parts * k * 4 + 2**20


@of_each(SDDMM_SPMM, MATRICES, VALUES)
@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"]
)
def test_compiles_with_y0(product, dtype):
  shape, config = shape_of(product, 16384, 2048, 5632)
  function, arguments = program(
    product, shape, config, with_y0=True, dtype=dtype
  )
  compiled = kernels.compile_for_h200(function, *arguments)
  gathered_cases.check_kernels(compiled, names_of(product, arguments[1]))


@of_each()
def test_widest_rows_do_not_spill(product):
  shape, config = shape_of(product, 512, rows.MAX_WIDTH, 64)
  function, arguments = program(product, shape, config, with_y0=True)
  compiled = kernels.compile_for_h200(function, *arguments)
  # Three blocks an SM, and two of two sums.
  most = 255 if product == VALUES else 168
  gathered_cases.check_kernels(
    compiled, names_of(product, arguments[1]), max_registers=most
  )


@of_each(SDDMM, SDDMM_SPMM)
def test_barriers_part_writers_and_readers(product):
  # The interpreter runs 128 threads as one: only the program shows them.
  shape, config = shape_of(product, 512, 2048, 64)
  function, arguments = program(product, shape, config)
  compiled = kernels.compile_for_h200(function, *arguments)
  start_up = ["wait"]
  step = ["store", "wait", "load", "store", "wait", "load"]
  accesses = gathered_cases.shared_accesses(compiled.kernels[0].ptx)
  assert accesses == start_up + step
