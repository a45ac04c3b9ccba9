"""Fresh random numbers, and every way in which the op can be computed."""

import os

import numpy as np
import pytest

from tests.ops.settings import SETTINGS
from twell_jax.ops import xla


@pytest.fixture
def rng():
  """Fresh numbers in every run; a failure prints how to draw them again."""
  entropy = np.random.SeedSequence().entropy
  seed = int(os.environ.get("TWELL_JAX_TEST_SEED", str(entropy)))
  print(f"inputs: TWELL_JAX_TEST_SEED={seed}")
  return np.random.default_rng(seed)


@pytest.fixture(params=SETTINGS)
def setting(request, monkeypatch):
  """Each implementation, with each of its branches forced in turn."""
  chosen = SETTINGS[request.param]
  if chosen.sparse_share is not None:
    monkeypatch.setattr(xla, "sparse_share", lambda *_: chosen.sparse_share)
  return chosen
