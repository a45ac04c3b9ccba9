"""Numbers that the stages compute with: never zeros, different in every run."""

import functools
import statistics
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Float32, Int32, PRNGKeyArray

from experiments.on_gpu import plan


class Layer(NamedTuple):
  """A layer's matrices, a neuron being one row of each."""

  gate: BFloat16[Array, "d_ff d_model"]
  up: BFloat16[Array, "d_ff d_model"]
  down: BFloat16[Array, "d_ff d_model"]


def generator(seed: int, *what: object) -> np.random.Generator:
  """Numbers that depend on the seed and on what they are for."""
  return np.random.default_rng([seed, zlib.crc32(repr(what).encode())])


def key(seed: int, *what: object) -> PRNGKeyArray:
  """A key of jax.random that depends on the same."""
  return jax.random.key(int(generator(seed, *what).integers(2**31)))


def firing_rates(
  rng: np.random.Generator, distribution: str, *, d_ff: int, active: float
) -> Float[np.ndarray, "d_ff"]:
  """Rates p = min(1, c · w) with the mean active / d_ff.

  Args:
    rng: Where random weights w come from.
    distribution: A name in plan.RATES: the distribution of w.
    d_ff: Neurons.
    active: Sum of the rates, the mean number of active neurons.
  """
  shape = plan.RATES[distribution]
  weights = np.ones(d_ff) if shape is None else rng.gamma(shape, size=d_ff)

  def rates(log_scale: float) -> Float[np.ndarray, "d_ff"]:
    return np.minimum(1.0, np.exp(log_scale) * weights)

  low, high = -50.0, 50.0
  for _ in range(100):
    middle = (low + high) / 2
    low, high = (
      (middle, high) if rates(middle).sum() < active else (low, middle)
    )
  return rates(low)


def timed_layer(
  key: PRNGKeyArray, rates: Float[np.ndarray, "d_ff"], *, d_model: int
) -> Layer:
  """A random layer whose neurons fire at these rates for `timed_tokens`.

  z is normal with unit variance around minus the threshold that the rate asks
  for. The first feature of a token is 1 and carries the thresholds.
  """
  # Rates that bfloat16 and the normal distribution can tell from 0 and 1.
  quantile = statistics.NormalDist().inv_cdf
  thresholds = [-quantile(p) for p in np.clip(rates, 1e-12, 1 - 1e-6)]
  layer = _random_matrices(key, d_model=d_model, d_ff=len(rates))
  gate = layer.gate.at[:, 0].set(-jnp.array(thresholds, jnp.bfloat16))
  return layer._replace(gate=gate)


@functools.partial(jax.jit, static_argnames=("d_model", "d_ff"))
def _random_matrices(key, *, d_model, d_ff):
  gate, up, down = (
    jax.random.normal(part, (d_ff, d_model))
    for part in jax.random.split(key, 3)
  )
  # z has the same variance at all neurons, so that rates are as asked for.
  gate /= jnp.linalg.norm(gate[:, 1:], axis=1, keepdims=True)
  return Layer(
    gate.astype(jnp.bfloat16),
    (up / jnp.sqrt(d_model)).astype(jnp.bfloat16),
    (down / jnp.sqrt(d_ff)).astype(jnp.bfloat16),
  )


@functools.partial(jax.jit, static_argnames=("tokens", "d_model"))
def timed_tokens(
  key: PRNGKeyArray, *, tokens: int, d_model: int
) -> BFloat16[Array, "tokens d_model"]:
  """Normal tokens whose first feature is 1."""
  x = jax.random.normal(key, (tokens, d_model), jnp.bfloat16)
  return x.at[:, 0].set(1)


class GateInputs(NamedTuple):
  """Tokens and gates whose z is the same in any order of summation.

  x and gate are small integers, so that float32 sums of products are exact, and
  z rounded to bfloat16 has one right answer.

  Attributes:
    x: Tokens.
    gate: Gates.
    z: The rounded x gateᵀ, where XLA might not find it.
  """

  x: BFloat16[np.ndarray, "tokens d_model"]
  gate: BFloat16[np.ndarray, "d_ff d_model"]
  z: BFloat16[np.ndarray, "tokens d_ff"] | None = None


class Edges(NamedTuple):
  """Where something changes: the slots of a tile, and those of a row."""

  tile_width: int
  slots: int
  row_width: int


@functools.lru_cache(maxsize=32)
def gate_inputs(
  seed: int, activity: str, shape: plan.Shape, edges: Edges
) -> GateInputs:
  """Inputs of the named activity.

  Args:
    seed: Of the numbers.
    activity: "heavy tail", rates over three decades; "not finite", the same
      with a NaN, an infinity and its negative in three tokens; "edges", tokens
      with 0, 1, S, S + 1 and all neurons of a tile active, and with a row's
      width of neurons and one more; "subnormal", the edges with |z| so small
      that it is no normal number; "nothing"; "everything"; or "one token", all
      neurons at one token.
    shape: Tokens, d_model and d_ff.
    edges: What "edges" are.
  """
  rng = generator(seed, activity, shape, edges)
  if activity == "edges":
    return _rounded(*_edges(rng, shape, edges))
  if activity == "subnormal":
    x, gate = _edges(rng, shape, edges)
    # XLA may take such a z for 0.
    z = gate.T[np.argmax(x, axis=1)] * np.float32(2.0**-132)
    tiny = np.float32(2.0**-66)
    return _rounded(x * tiny, gate * tiny, z)
  if activity in ("heavy tail", "not finite"):
    x, gate = _heavy_tail(rng, shape)
    if activity == "not finite":
      feature = min(5, shape.d_model - 1)
      for token, bad in enumerate((np.nan, np.inf, -np.inf)):
        x[3 * token % shape.tokens, feature] = bad
    return _rounded(x, gate)
  x = _integers(rng, 1, 3, shape.tokens, shape.d_model)
  gate = _integers(rng, 1, 3, shape.d_ff, shape.d_model)
  if activity == "nothing":
    gate *= -1
  elif activity == "one token":
    x[np.arange(shape.tokens) != rng.integers(shape.tokens)] *= -1
  return _rounded(x, gate)


def _rounded(*arrays: np.ndarray) -> GateInputs:
  return GateInputs(*(array.astype(jnp.bfloat16) for array in arrays))


def _integers(
  rng: np.random.Generator, low: int, high: int, *shape: int
) -> Float[np.ndarray, "..."]:
  return rng.integers(low, high, shape, dtype=np.int8).astype(np.float32)


def _heavy_tail(rng, shape):
  x = _integers(rng, -2, 3, shape.tokens, shape.d_model)
  gate = _integers(rng, -2, 3, shape.d_ff, shape.d_model)
  x[:, 0] = 1
  # x and gate have a variance of 2 each; 1 to 4 standard deviations of z.
  deviations = rng.uniform(1.0, 4.0, shape.d_ff)
  thresholds = np.round(2 * np.sqrt(shape.d_model) * deviations)
  gate[:, 0] = -thresholds.astype(jnp.bfloat16).astype(np.float32)
  return x, gate


def _edges(rng, shape, edges):
  """One-hot tokens: token t has the pattern t mod their number."""
  patterns = min(shape.d_model, shape.tokens)
  active = edge_pattern(rng, patterns, shape.d_ff, edges).T
  x = np.zeros((shape.tokens, shape.d_model), np.float32)
  tokens = np.arange(shape.tokens)
  x[tokens, tokens % patterns] = 1
  gate = np.zeros((shape.d_ff, shape.d_model), np.float32)
  sizes = _integers(rng, 1, 5, shape.d_ff, patterns)
  gate[:, :patterns] = np.where(active, sizes, -sizes)
  return x, gate


def edge_pattern(
  rng: np.random.Generator, tokens: int, d_ff: int, edges: Edges
) -> np.ndarray:
  """Which neurons are active, bool [tokens, d_ff], seven edges in turn."""
  width = min(edges.tile_width, d_ff)
  tiles = d_ff // width
  pattern = np.zeros((tokens, d_ff), bool)
  for token in range(tokens):
    edge, tile = token % 8, width * (token // 8 % tiles)
    in_tile = tile + rng.permutation(width)
    match edge:
      case 1 | 2 | 3 | 4:
        count = (1, edges.slots, edges.slots + 1, width)[edge - 1]
        pattern[token, in_tile[:count]] = True
      case 5 | 6:
        count = edges.row_width + (edge == 6)
        pattern[token, rng.permutation(d_ff)[:count]] = True
      case 7:
        pattern[token] = rng.random(d_ff) < 0.01
  return pattern


class Entries(NamedTuple):
  """A sparse matrix of `width` slots a row, with poison where it has none.

  Attributes:
    columns: Different ones in a row; far out of range past the count.
    values: NaN past the count.
    counts: Entries of each row.
  """

  columns: Int32[Array, "rows width"]
  values: Float32[Array, "rows width"]
  counts: Int32[Array, "rows"]


def entries(
  rng: np.random.Generator, kind: str, shape: plan.Shape, width: int
) -> Entries:
  """Entries of rows.

  Args:
    rng: Where the numbers come from.
    kind: Of the counts: "heavy tail", few and many; "nothing"; "full rows";
      "one row", full, all others empty; or "not finite", the heavy tail with a
      NaN among the values of the first row.
    shape: Rows are its tokens, and columns below its d_ff.
    width: Slots of a row.
  """
  rows = shape.tokens
  width = min(width, shape.d_ff)
  counts = {
    "nothing": np.zeros(rows),
    "full rows": np.full(rows, width),
    "one row": width * (np.arange(rows) == rng.integers(rows)),
  }.get(kind)
  if counts is None:
    # Half of the rows have less than a quarter of the width; some are full.
    counts = np.minimum(rng.pareto(1.1, rows) * width / 4, width)
  counts = counts.astype(np.int32)
  columns = np.argsort(rng.random((rows, shape.d_ff)), axis=1)[:, :width]
  values = rng.normal(size=(rows, width))
  if kind == "not finite":
    values[0, 0] = np.nan
    counts[0] = max(counts[0], 1)
  used = np.arange(width) < counts[:, None]
  return Entries(
    jnp.asarray(np.where(used, columns, -(2**31)), jnp.int32),
    jnp.asarray(np.where(used, values, np.nan), jnp.float32),
    jnp.asarray(counts),
  )


@functools.lru_cache(maxsize=16)
def normal_matrix(
  seed: int, name: str, rows: int, columns: int
) -> BFloat16[Array, "rows columns"]:
  """Normal numbers, which depend on the seed and the name."""
  rng = generator(seed, name, rows, columns)
  numbers = rng.standard_normal((rows, columns), dtype=np.float32)
  return jnp.asarray(numbers, jnp.bfloat16)
