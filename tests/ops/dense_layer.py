"""The dense layer twice more, and inputs for which its kinks are exact.

`oracle` is float64 numpy with gradients written out; `plain` is an ordinary jnp
layer in the dtype of its inputs, differentiated by jax.

The layer has kinks at z = 0 and, in the L1 term, at u = 0, where any rounding
decides between two gradients. `make_case` keeps x and gate integers, and up
multiples of a power of two, such that every implementation finds the same
signs, and u is never 0, where jax takes 1 for the derivative of |u|. Down and
the cotangent of y are any numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ACTIVITIES = ("mixed", "nothing", "everything", "one token", "heavy tail")
GRADIENTS = ("dx", "dgate", "dup", "ddown")

# The weight of l1 in the losses here.
L1_WEIGHT = 0.75


# What the op and the layers here take and give.
Array = np.ndarray | jax.Array


class Case(NamedTuple):
  """Inputs of the layer, and a cotangent of y. `up` is None if not gated."""

  x: np.ndarray
  gate: np.ndarray
  up: np.ndarray | None
  down: np.ndarray
  dy: np.ndarray

  def without_up(self) -> "Case":
    return self._replace(up=None)

  def as_dtype(self, dtype) -> "Case":
    return jax.tree.map(lambda array: array.astype(dtype), self)


class Results(NamedTuple):
  """What is compared: the output, the activity and all gradients."""

  y: Array
  l1: Array
  active: Array
  fired: Array
  dx: Array
  dgate: Array
  dup: Array | None
  ddown: Array


def make_case(rng, activity, *, tokens, d_model, d_ff) -> Case:
  """Inputs of the named activity, with entries of one size throughout.

  Args:
    rng: Where the numbers come from.
    activity: "mixed", half of the neurons at random; "nothing"; "everything";
      "one token", all neurons at one token and none elsewhere; or "heavy tail",
      firing rates over about three decades.
    tokens: The leading shape of x.
    d_model: Features.
    d_ff: Neurons.
  """
  x = rng.integers(1, 3, (*tokens, d_model))
  gate = rng.integers(1, 3, (d_ff, d_model))
  if activity == "mixed":
    x = rng.integers(-2, 3, x.shape)
    gate = rng.integers(-2, 3, gate.shape)
  elif activity == "nothing":
    gate = -gate
  elif activity == "one token":
    flat = -x.reshape(-1, d_model)
    flat[rng.integers(flat.shape[0])] *= -1
    x = flat.reshape(x.shape)
  elif activity == "heavy tail":
    mean = -rng.uniform(0, 4, (d_ff, 1)) / np.sqrt(d_model)
    gate = np.round(rng.normal(mean, 1.2, gate.shape))
  # 128 u is odd: 128 up is, in the first column only, and so is x there.
  x[..., 0] = np.where(x[..., 0] < 0, -1, 1)
  up = rng.integers(-8, 9, (d_ff, d_model)) / 64
  up[:, 0] += 1 / 128
  return Case(
    x=x.astype(np.float64),
    gate=gate.astype(np.float64),
    up=up,
    down=rng.normal(size=(d_ff, d_model)) / 16,
    dy=rng.normal(size=x.shape) / 16,
  )


def oracle(case: Case) -> Results:
  """Everything in float64, for the loss sum(dy · y) + L1_WEIGHT · l1."""
  case = case.as_dtype(np.float64)
  d_model = case.x.shape[-1]
  x, dy = case.x.reshape(-1, d_model), case.dy.reshape(-1, d_model)
  z = x @ case.gate.T
  u = np.ones_like(z) if case.up is None else x @ case.up.T
  relu = np.where(z > 0, z, 0)
  h = relu * u
  dh = dy @ case.down.T + L1_WEIGHT * np.sign(h) / max(1, x.shape[0])
  dz = np.where(z > 0, dh * u, 0)
  du = dh * relu
  leading = case.x.shape[:-1]
  dx = dz @ case.gate
  if case.up is not None:
    dx = dx + du @ case.up
  return Results(
    y=(h @ case.down).reshape(case.x.shape),
    l1=np.abs(h).sum() / max(1, x.shape[0]),
    active=(z > 0).sum(1).reshape(leading),
    fired=(z > 0).sum(0),
    dx=dx.reshape(case.x.shape),
    dgate=dz.T @ x,
    dup=None if case.up is None else du.T @ x,
    ddown=h.T @ dy,
  )


def plain(x, gate, up, down):
  """y and l1 of an ordinary dense layer."""
  z = x @ gate.T
  h = jax.nn.relu(z)
  if up is not None:
    h = h * (x @ up.T)
  sums = jnp.sum(jnp.abs(h.astype(jnp.float32)), axis=-1)
  return h @ down, jnp.mean(sums)


def plain_results(case: Case) -> Results:
  """Of `plain`, with z counted as it was rounded."""
  inputs = (case.x, case.gate, case.up, case.down)
  (y, l1), vjp = jax.vjp(plain, *inputs)
  dx, dgate, dup, ddown = vjp((case.dy, jnp.full_like(l1, L1_WEIGHT)))
  z = case.x @ case.gate.T
  fired = jnp.sum(z > 0, axis=tuple(range(z.ndim - 1)))
  return Results(y, l1, jnp.sum(z > 0, axis=-1), fired, dx, dgate, dup, ddown)
