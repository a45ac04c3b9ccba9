"""Inputs and float64 results of the gathered kernels of training."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import aot, rows, work_list

# Rows of the matrices that are gathered from: columns of the pattern.
N = 24


class Case(NamedTuple):
  """Matrices, and lists of entries with gaps and garbage between them."""

  a: jax.Array  # [m, K], a row for each list
  b: jax.Array  # [N, K], gathered
  c: jax.Array  # [N, K], gathered
  y0: jax.Array  # [m, K]
  z0: jax.Array  # [m, K]
  columns: jax.Array  # [slots]
  v: jax.Array  # [slots]
  w: jax.Array  # [slots]
  starts: jax.Array  # [m]
  counts: jax.Array  # [m]


def make_case(
  counts: list[int], k: int, *, slots: int | None = None, seed: int = 0
) -> Case:
  """Lists of so many entries, in any order, of ascending columns.

  Slots between and after them are poisoned: columns out of bounds, values NaN.
  """
  rng = np.random.default_rng(seed)
  m = len(counts)
  gaps = rng.integers(0, 4, m)
  slots = slots or sum(counts) + int(gaps.sum()) + 5
  columns = rng.choice([-5, N, 10**6, 0, 7], slots)
  values = np.full((2, slots), np.nan)
  starts = np.zeros(m, np.int32)
  place = 0
  for row in rng.permutation(m):
    place += gaps[row]
    starts[row] = place
    end = place + counts[row]
    columns[place:end] = np.sort(rng.permutation(N)[: counts[row]])
    values[:, place:end] = rng.normal(size=(2, counts[row]))
    place = end
  assert place <= slots

  def bf16(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  return Case(
    a=bf16(m, k),
    b=bf16(N, k),
    c=bf16(N, k),
    y0=bf16(m, k),
    z0=bf16(m, k),
    columns=jnp.asarray(columns, jnp.int32),
    v=jnp.asarray(values[0], jnp.float32),
    w=jnp.asarray(values[1], jnp.float32),
    starts=jnp.asarray(starts),
    counts=jnp.asarray(counts, jnp.int32),
  )


def make_work(case: Case, length: int, *, spare: int = 0) -> work_list.Work:
  """The work list of a case, with entries to spare that are unused."""
  m = case.counts.shape[0]
  return work_list.segments(
    case.starts,
    case.counts,
    length=length,
    capacity=spare + work_list.max_segments(m, width=N, length=length),
    part_capacity=work_list.max_parts(m, width=N, length=length),
  )


class Expected(NamedTuple):
  """A result in float64, and how far off a float32 sum may be."""

  value: np.ndarray
  bound: np.ndarray


def expected_sum(
  case: Case, terms: list[tuple[jax.Array, jax.Array]], y0: jax.Array | None
) -> Expected:
  """y0 and the sum over all entries and terms (values, matrix), [m, K]."""
  m, k = case.y0.shape
  y = np.zeros((m, k)) if y0 is None else np.asarray(y0, np.float64)
  size = np.abs(y)
  for values, matrix in terms:
    weights = np.asarray(values, np.float64)
    matrix_rows = np.asarray(matrix, np.float64)
    for row, place, column in entries(case):
      y[row] += weights[place] * matrix_rows[column]
      size[row] += np.abs(weights[place] * matrix_rows[column])
  # Sums of 24 bits, in whichever order, of at most so many terms.
  return Expected(y, size * (len(terms) * N + 2) * 2.0**-24)


def expected_dots(case: Case) -> Expected:
  """a · b at the entries, 0 in other slots, [slots]."""
  a, b = (np.asarray(array, np.float64) for array in (case.a, case.b))
  dots, size = np.zeros((2, case.columns.shape[0]))
  for row, place, column in entries(case):
    dots[place] = a[row] @ b[column]
    size[place] = np.abs(a[row]) @ np.abs(b[column])
  return Expected(dots, size * a.shape[1] * 2.0**-24)


def entries(case: Case) -> list[tuple[int, int, int]]:
  """(row, slot, column) of each entry."""
  return [
    (row, place, int(case.columns[place]))
    for row, (start, count) in enumerate(
      zip(np.asarray(case.starts), np.asarray(case.counts))
    )
    for place in range(start, start + count)
  ]


def check_sum(y: jax.Array, expected: Expected) -> None:
  """Within the bound of the sum, and of one rounding if it is bfloat16."""
  rounding = {jnp.bfloat16: 2.0**-8, jnp.float32: 2.0**-24}[y.dtype.type]
  bound = expected.bound + np.abs(expected.value) * rounding
  error = np.abs(np.asarray(y, np.float64) - expected.value)
  assert np.all(error <= bound), np.max(error - bound)


def check_dots(dots: jax.Array, expected: Expected) -> None:
  """Within the bound; exactly 0 where there is no entry."""
  assert dots.dtype == jnp.float32
  error = np.abs(np.asarray(dots, np.float64) - expected.value)
  assert np.all(error <= expected.bound), np.max(error - expected.bound)


def bits(array: jax.Array) -> np.ndarray:
  """A floating-point array as integers, which tell zeros and NaNs apart."""
  floats = np.asarray(array)
  return floats.view({2: np.uint16, 4: np.uint32}[floats.dtype.itemsize])


def assert_same_bits(results: Any, expected: Any) -> None:
  """Two pytrees of floating-point arrays, bit for bit."""
  jax.tree.map(
    lambda one, other: np.testing.assert_array_equal(bits(one), bits(other)),
    results,
    expected,
  )


class Shape(NamedTuple):
  """Sizes that a kernel is compiled for, and how its lists are cut."""

  m: int
  k: int
  n: int
  slots: int
  width: int
  length: int


def operand_types(shape: Shape) -> dict[str, Any]:
  """The types of a case's arrays and of its work list."""

  def typed(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)

  sizes = {
    "width": shape.width,
    "length": shape.length,
    "total": shape.slots,
  }
  int32 = {"dtype": jnp.int32}
  capacity = work_list.max_segments(shape.m, **sizes)
  parts = work_list.max_parts(shape.m, **sizes)
  by_row = typed(shape.m, shape.k)
  gathered = typed(shape.n, shape.k)
  values = typed(shape.slots, dtype=jnp.float32)
  return {
    "a": by_row,
    "b": gathered,
    "c": gathered,
    "y0": by_row,
    "z0": by_row,
    "columns": typed(shape.slots, **int32),
    "v": values,
    "w": values,
    "work": work_list.Work(
      typed(capacity, 4, **int32),
      typed(parts // 2, 4, **int32),
      typed(**int32),
      typed(**int32),
    ),
  }


MAX_REGISTERS = 128  # four blocks an SM


def check_kernels(
  compiled: aot.Compiled, names: list[str], max_registers: int = MAX_REGISTERS
) -> None:
  """The kernels' names, and that they leave room for four blocks an SM."""
  # From jax 0.12 on, a kernel that runs twice is compiled once.
  found = dict.fromkeys(kernel.name for kernel in compiled.kernels)
  assert list(found) == list(dict.fromkeys(names))
  for kernel in compiled.kernels:
    assert kernel.registers <= max_registers
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    # Four blocks leave most of an SM's 256 KiB to the L1 cache.
    assert kernel.shared_memory_bytes <= 16 * 1024
    assert kernel.notes == ()


def temporary_bytes(compiled: aot.Compiled) -> int:
  """What the executable needs besides its arguments and results."""
  memory = compiled.executable.memory_analysis()
  assert memory is not None
  return memory.temp_size_in_bytes


def row_loads(compiled: aot.Compiled, k: int) -> int:
  """Rows that the first kernel loads, each in loads as wide as can be."""
  suffix = {0: ".v4", 512: ".v2"}.get(k % 1024, "")
  pattern = rf"\bld(?:\.global)?{re.escape(suffix)}\.b32"
  loads = re.findall(pattern, compiled.kernels[0].ptx)
  return len(loads) // rows.chunk_count(k)


def shared_accesses(ptx: str) -> list[str]:
  """Stores to and loads from shared memory and barriers, runs shortened."""
  found: list[str] = []
  for store, load, barrier in re.findall(
    r"(stmatrix|\bst\.shared)|(\bld\.shared)|(\bbar\.sync)", ptx
  ):
    kind = "store" if store else "load" if load else "wait" if barrier else ""
    if found[-1:] != [kind]:
      found.append(kind)
  return found
