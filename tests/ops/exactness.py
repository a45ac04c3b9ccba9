"""How exact a result is, in comparison with an ordinary dense layer."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tests.ops.dense_layer import GRADIENTS, Results, oracle
from tests.ops.settings import results_of, results_of_plain

FLOATING = ("y", "l1", *GRADIENTS)


class Spread(NamedTuple):
  """Errors of many numbers, in units of the rounding of the output."""

  largest: float
  rms: float


def spread(pairs, dtype) -> Spread:
  """Of (actual, expected) pairs, each in units of its own scale."""
  unit = float(jnp.finfo(dtype).eps)
  largest, squares = [], []
  for actual, expected in pairs:
    error = np.abs(np.asarray(actual, np.float64) - expected).ravel()
    if not expected.any():
      assert not error.any()
      continue
    largest.append(error.max() / np.abs(expected).max())
    squares.append(np.mean(error**2) / np.mean(expected**2))
  return Spread(max(largest) / unit, np.sqrt(np.mean(squares)) / unit)


def assert_no_worse(name, triples, dtype):
  """Errors of (exact, actual, plain) against 1.5 × those of plain.

  As much as the rounding of the output, one unit, is allowed in any case. Few
  numbers are held to four instead of either, since the sums that they come from
  may all cancel: with one feature those of a case are multiples of one another.
  """
  few = np.shape(triples[0][0])[-1:] in ((), (1,))
  factor, units = (4, 4) if few else (1.5, 1)
  if few:
    triples = pooled(triples)
  ours = spread([(actual, exact) for exact, actual, _ in triples], dtype)
  dense = spread([(plain, exact) for exact, _, plain in triples], dtype)
  assert ours.rms <= max(factor * dense.rms, units), (name, ours, dense)
  # The largest of many errors is about four times their root mean square.
  largest = max(factor * dense.largest, 4 * units)
  assert ours.largest <= largest, (name, ours, dense)


def pooled(triples):
  """One (exact, actual, plain) of all: small results, beside larger ones."""
  return [
    tuple(
      np.concatenate(
        [np.ravel(np.asarray(array, np.float64)) for array in part]
      )
      for part in zip(*triples)
    )
  ]


def assert_no_less_exact_than_dense(cases, setting, dtype):
  """Errors of at most 1.5 × those of the plain layer, or a rounding unit.

  They are taken over all cases, since the largest of few errors is a matter of
  luck.
  """
  runs = [
    (oracle(case), results_of(setting)(case), results_of_plain(case))
    for case in cases
  ]
  for expected, actual, _ in runs:
    np.testing.assert_array_equal(actual.active, expected.active)
    np.testing.assert_array_equal(actual.fired, expected.fired)
    assert actual.active.dtype == actual.fired.dtype == jnp.int32
    assert actual.y.shape == expected.y.shape
    assert (actual.l1.dtype, actual.l1.shape) == (jnp.float32, ())
  for name in FLOATING:
    triples = [[getattr(result, name) for result in run] for run in runs]
    if triples[0][0] is None:
      assert all(actual is None for _, actual, _ in triples)
      continue
    if name != "l1":
      assert triples[0][1].dtype == dtype
    assert_no_worse(name, triples, dtype)


def assert_close(
  actual: Results, expected: Results, *, tolerance: float = 1e-5
) -> None:
  """Equal up to the order of sums, relative to the largest; counts exactly."""
  for name, exact in expected._asdict().items():
    if exact is None:
      assert getattr(actual, name) is None
      continue
    exact = np.asarray(exact)
    within = 0.0 if name in ("active", "fired") else tolerance
    np.testing.assert_allclose(
      getattr(actual, name),
      exact,
      rtol=0,
      atol=within * np.abs(exact).max(),
      err_msg=name,
    )
