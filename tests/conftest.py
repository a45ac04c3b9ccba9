"""What holds for every test: devices, strict JAX, how hypothesis searches.

The environment is set before jax is imported, since jax reads it then; a
caller's own choice of JAX_PLATFORMS or MPLBACKEND stands. Programs that tests
start inherit the environment, four devices included, but not jax.config.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# No test may depend on a network: a hub is reached in none of them.
os.environ["HF_HUB_OFFLINE"] = "1"
# Enough devices for a mesh with two axes.
os.environ["XLA_FLAGS"] = " ".join(
  [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=4",
  ]
).strip()

import contextlib

import hypothesis
import jax
import pytest

from pallas_kernels import aot

# The compiler must be found before JAX looks for its plugins. Tests that need
# it say so if it is not there.
with contextlib.suppress(ValueError):
  aot.find_compiler()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Fresh inputs in every run, reproducible from the printed blob. The first
# example of a test compiles, which would break any deadline and looks like
# slow generation of data.
hypothesis.settings.register_profile(
  "twell_jax",
  deadline=None,
  derandomize=False,
  max_examples=25,
  print_blob=True,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("twell_jax")


@pytest.fixture(scope="module")
def quick_compilation():
  """Spends little on making fast what runs once or twice.

  Not for tests of an op's exactness, which are about the code that users run.
  """
  name = "jax_disable_most_optimizations"
  previous = jax.config.read(name)
  jax.config.update(name, True)
  yield
  jax.config.update(name, previous)
