"""The gathered kernels of the layer, lowered and compiled for an H200."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import gather_config, gathered, rows, work_list
from pallas_kernels.gather_config import GatherConfig
from tests.helpers import gathered_cases, kernels

BOTH = pytest.mark.parametrize("matrices", [1, 2], ids=["down", "up_down"])

# M, K and N that the kernels are tuned for.
SHAPES = [
  (16384, 2048, 5632),
  (131072, 2048, 5632),
  (16384, 4096, 14336),
  (512, 768, 1536),
  (1, 2048, 5632),
  (64, 2048, 5632),
]
# Entries of a row of ELL at most.
ELL_WIDTH = 128


class Program(NamedTuple):
  """A kernel at a shape: a function, and the types of its arguments."""

  function: object
  arguments: tuple
  config: GatherConfig
  parts: int


def program(m, k, n, *, matrices, with_y0, length=None):
  config = gather_config.default_config(m, k, ELL_WIDTH, matrices=matrices)
  length = length or config.segment_length
  capacity = work_list.max_segments(m, width=ELL_WIDTH, length=length)
  parts = work_list.max_parts(m, width=ELL_WIDTH, length=length)

  def typed(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

  number = typed(dtype=jnp.int32)
  work = work_list.Work(
    typed(capacity, 4, dtype=jnp.int32),
    typed(parts // 2, 4, dtype=jnp.int32),
    number,
    number,
  )
  given = {
    "columns": typed(m * ELL_WIDTH, dtype=jnp.int32),
    "values": typed(m * ELL_WIDTH, dtype=jnp.float32),
    "work": work,
    "down": typed(n, k),
  }
  if with_y0:
    # What takes more registers.
    given["y0"] = jax.ShapeDtypeStruct((m, k), jnp.float32)
  if matrices == 2:
    given |= {"x": typed(m, k), "up": typed(n, k)}

  def function(given):
    given = given | {"config": config}
    if matrices == 1:
      return gathered.gathered_down(given.pop("down"), m=m, **given)
    x, up, down = (given.pop(name) for name in ("x", "up", "down"))
    return gathered.gathered_up_down(x, up, down, **given)

  return Program(function, (given,), config, parts)


@BOTH
@pytest.mark.parametrize("with_y0", [False, True], ids=["", "y0"])
@pytest.mark.parametrize("length", [ELL_WIDTH, 8], ids=["whole", "split"])
def test_lowers(matrices, with_y0, length):
  function, given, _, parts = program(
    16, 2048, 64, matrices=matrices, with_y0=with_y0, length=length
  )
  text = kernels.lower_for_cuda(function, *given)
  assert text.count("mosaic_gpu_v2") == (2 if parts else 1)


def check_compiled(compiled, program_, k, matrices):
  name = "gathered_up_down" if matrices == 2 else "gathered_down"
  gathered_cases.check_kernels(
    compiled, [name, *(["add_parts"] if program_.parts else [])]
  )
  # Of up_down, a row of x too.
  loads = matrices * program_.config.rows_per_step + (matrices == 2)
  assert gathered_cases.row_loads(compiled, k) >= loads
  # Neither weights nor results are copied. Parts are stored, and the halves of
  # a float32 y0.
  y0 = program_.arguments[0].get("y0")
  stored = program_.parts * k * 4 + (0 if y0 is None else y0.size * 4)
  assert gathered_cases.temporary_bytes(compiled) <= stored + 2**20


@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_y0", [False, True], ids=["", "y0"])
def test_compiles_for_h200(matrices, shape, with_y0):
  m, k, n = shape
  program_ = program(m, k, n, matrices=matrices, with_y0=with_y0)
  compiled = kernels.compile_for_h200(program_.function, *program_.arguments)
  check_compiled(compiled, program_, k, matrices)


@BOTH
@pytest.mark.parametrize(
  ("k", "length"),
  [(256, 8), (1024, ELL_WIDTH), (1536, 8), (3072, ELL_WIDTH), (5120, 8)],
)
def test_other_widths_compile(matrices, k, length):
  program_ = program(
    64, k, 1024, matrices=matrices, with_y0=True, length=length
  )
  compiled = kernels.compile_for_h200(program_.function, *program_.arguments)
  check_compiled(compiled, program_, k, matrices)


@BOTH
def test_widest_rows_do_not_spill(matrices):
  k = rows.MAX_WIDTH
  program_ = program(64, k, 64, matrices=matrices, with_y0=True, length=8)
  compiled = kernels.compile_for_h200(program_.function, *program_.arguments)
  for kernel in compiled.kernels:
    assert kernel.spill_bytes == 0
    # Three blocks an SM.
    assert kernel.registers <= 168


def test_barriers_part_writers_and_readers():
  # The interpreter runs 128 threads as one: only the program shows them.
  program_ = program(64, 2048, 64, matrices=2, with_y0=False)
  compiled = kernels.compile_for_h200(program_.function, *program_.arguments)
  start_up = ["wait"]
  step = ["store", "wait", "load", "store", "wait", "load"]
  assert (
    gathered_cases.shared_accesses(compiled.kernels[0].ptx) == start_up + step
  )
