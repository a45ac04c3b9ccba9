"""Fresh random numbers, and every way in which the op can be computed."""

import dataclasses
import os

import jax
import numpy as np
import pytest

from twell_jax.ops import IMPLEMENTATIONS, xla


@pytest.fixture
def rng():
  """Fresh numbers in every run; a failure prints how to draw them again."""
  seed = int(
    os.environ.get("TWELL_JAX_TEST_SEED", np.random.SeedSequence().entropy)
  )
  print(f"inputs: TWELL_JAX_TEST_SEED={seed}")
  return np.random.default_rng(seed)


@dataclasses.dataclass(frozen=True)
class Setting:
  """An implementation, and the branch that it is made to take.

  `sparse_share` is the share of dense work up to which the xla implementation
  takes its sparse branch; None leaves it as it is.
  """

  implementation: str
  sparse_share: float | None = None


# "xla" alone takes the branch that the inputs ask for. 128 times the dense work
# is more than a tile of one token and one neuron makes of a step.
SETTINGS = {name: Setting(name) for name in IMPLEMENTATIONS} | {
  "xla, always sparse": Setting("xla", 128.0),
  "xla, always dense": Setting("xla", 0.0),
}


def use(monkeypatch, setting: Setting) -> str:
  """Puts a setting in force for a test, and names its implementation."""
  if setting.sparse_share is not None:
    shares = dict.fromkeys((2, 4, 8), setting.sparse_share)
    monkeypatch.setattr(xla, "_SPARSE_LIMIT", shares)
  return setting.implementation


@pytest.fixture(params=SETTINGS)
def implementation(request, monkeypatch):
  """Each implementation, with each of its branches forced in turn.

  What was compiled with another branch is forgotten before and after.
  """
  jax.clear_caches()
  yield use(monkeypatch, SETTINGS[request.param])
  jax.clear_caches()
