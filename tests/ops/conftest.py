"""Fresh random numbers, and every way in which the op can be computed."""

import os

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.gather_config import GatherConfig
from tests.helpers.kernels import interpret_params, no_races
from tests.ops.settings import SETTINGS


@pytest.fixture
def rng():
  """Fresh numbers in every run; a failure prints how to draw them again."""
  entropy = np.random.SeedSequence().entropy
  seed = int(os.environ.get("TWELL_JAX_TEST_SEED", str(entropy)))
  print(f"inputs: TWELL_JAX_TEST_SEED={seed}")
  return np.random.default_rng(seed)


@pytest.fixture(params=SETTINGS)
def setting(request):
  """Each implementation, with each of its branches forced in turn."""
  return SETTINGS[request.param]


@pytest.fixture
def interpreted():
  """Kernels are interpreted, and have no races."""
  with plgpu.force_gpu_interpret_mode(interpret_params()), no_races():
    yield


@pytest.fixture
def whole_rows(monkeypatch, interpreted):
  """One segment per row, as with thousands of tokens.

  A few tokens are cut into segments of a few slots, and every block is
  interpreted, whether there is work for it or not.
  """
  del interpreted
  config = GatherConfig(rows_per_step=4, segment_length=1024)
  for name in ("for_gathered", "for_gradient"):
    monkeypatch.setattr(tuning, name, lambda *_, **__: config)
