"""Every way in which the op can be computed, compiled once for all tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from tests.ops.dense_layer import L1_WEIGHT, Case, Results, plain_results
from twell_jax.formats import Capacities
from twell_jax.ops import sparse_ffn


@dataclasses.dataclass(frozen=True)
class Setting:
  """An implementation, and the branch that it is made to take.

  `dense_above` and `capacities` are those of `sparse_ffn`; `hot_share` is the
  part of the neurons that are hot.
  """

  implementation: str
  dense_above: float | None = None
  hot_share: float = 0.0
  capacities: Capacities | None = None

  def __call__(self, x, gate, up, down):
    """The op, for a function that is compiled for this setting only."""
    return sparse_ffn(
      x,
      gate,
      up,
      down,
      implementation=self.implementation,
      hot_neurons=int(self.hot_share * gate.shape[0]),
      capacities=self.capacities,
      dense_above=self.dense_above,
    )


# "xla" alone takes the branch that the inputs ask for.
SETTINGS = {name: Setting(name) for name in ("reference", "xla")} | {
  "xla-sparse": Setting("xla", 1.0),
  "xla-dense": Setting("xla", 0.0),
  "xla-hot": Setting("xla", 1.0, hot_share=0.4),
}


def results(case: Case, op) -> Results:
  """Everything that is compared, by the op."""

  def differentiated(*inputs):
    y, activity = op(*inputs)
    return (y, activity.l1), activity

  inputs = (case.x, case.gate, case.up, case.down)
  (y, l1), vjp, activity = jax.vjp(differentiated, *inputs, has_aux=True)
  dx, dgate, dup, ddown = vjp((case.dy, jnp.full_like(l1, L1_WEIGHT)))
  return Results(y, l1, activity.active, activity.fired, dx, dgate, dup, ddown)


@functools.cache
def results_of(setting: Setting):
  """`results` compiled, by case."""
  return jax.jit(lambda case: results(case, setting))


results_of_plain = jax.jit(plain_results)
