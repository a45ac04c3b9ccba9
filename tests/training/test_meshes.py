"""A training step on every kind of mesh is that of one device.

Parameters lie in slices along fsdp and tensor, sequences along data and fsdp,
neurons, heads and vocabulary along tensor. Losses, gradients and the counts of
the neurons must not depend on it, for every implementation of the layer.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.gather_config import GatherConfig
from tests.helpers.kernels import interpret_params, no_races
from tests.training.one_step import (
  assert_same,
  assert_same_step,
  gradient,
  one_step,
)
from twell_jax import training

MESHES = {
  "1x1x1": (1, 1, 1),
  "4x1x1": (4, 1, 1),
  "1x4x1": (1, 4, 1),
  "1x1x4": (1, 1, 4),
  "2x1x2": (2, 1, 2),
}
# Each with what the others have not.
LAYERS: dict[str, dict[str, Any]] = {
  "reference": {"gated": False, "tie_embeddings": False},
  "xla": {"cross_entropy": "chunked", "cross_entropy_chunk": 5},
}

# Few segments, since the interpreter runs every block, with or without work;
# and some rows in two, for without any jaxlib 0.11.2 does not survive compiling
# their empty list for several CPU devices.
GATHER = GatherConfig(rows_per_step=4, segment_length=4)


def mesh_of(shape):
  data, fsdp, tensor = shape
  return training.make_mesh(
    data=data,
    fsdp=fsdp,
    tensor=tensor,
    devices=jax.devices()[: data * fsdp * tensor],
  )


@pytest.fixture(scope="module")
def config(config):
  # Divisible by every axis.
  return dataclasses.replace(config, num_kv_heads=4)


@pytest.fixture(scope="module")
def step_of(config, batch):
  """The step of a layer on a mesh, made once."""

  @functools.cache
  def step(layer, mesh):
    changed = dataclasses.replace(config, implementation=layer, **LAYERS[layer])
    _, before, result = one_step(changed, batch, mesh=mesh_of(MESHES[mesh]))
    return before, result

  return step


@pytest.mark.parametrize(
  ("layer", "mesh"),
  [
    ("xla", "1x1x4"),
    ("xla", "2x1x2"),
    ("reference", "2x1x2"),
    *(
      pytest.param(layer, mesh, marks=pytest.mark.slow)
      for layer, mesh in (
        ("xla", "4x1x1"),
        ("xla", "1x4x1"),
        ("reference", "4x1x1"),
        ("reference", "1x4x1"),
        ("reference", "1x1x4"),
      )
    ),
  ],
)
def test_same_as_on_one_device(layer, mesh, step_of):
  assert_same_step(step_of(layer, "1x1x1"), step_of(layer, mesh))


def test_micro_batches_on_a_mesh(config, batch, step_of):
  fields = {"implementation": "xla"} | LAYERS["xla"]
  _, before, split = one_step(
    dataclasses.replace(config, **fields),
    batch,
    mesh=mesh_of((1, 2, 2)),
    accumulation_steps=2,
  )
  assert_same_step(step_of("xla", "1x1x1"), (before, split))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_interpreted_kernels(mesh, config, batch, monkeypatch):
  """In bfloat16, as the kernels compute; the exact step is in float32.

  On a mesh parts of sums are rounded to bfloat16 before they are added, by the
  dense layer as well, whose distance from the exact step is the measure.
  """
  monkeypatch.setattr(tuning, "for_gathered", lambda *_, **__: GATHER)
  monkeypatch.setattr(tuning, "for_gradient", lambda *_, **__: GATHER)
  small = {name: value[:4, :3] for name, value in batch.items()}
  half = dataclasses.replace(
    config, num_layers=1, dtype="bfloat16", dense_above=1.0
  )
  single = mesh_of(MESHES["1x1x1"])

  def step(mesh, **changes):
    _, before, result = one_step(
      dataclasses.replace(half, **changes), small, mesh=mesh
    )
    return before, result

  with plgpu.force_gpu_interpret_mode(interpret_params()), no_races():
    before, sparse = step(mesh_of(MESHES[mesh]), implementation="mosaic")
  _, exact = step(single, dtype="float32")
  _, dense = step(mesh_of(MESHES[mesh]))
  expected = gradient(before, exact)
  distance = max(
    np.abs(a - b).max()
    for a, b in zip(
      jax.tree.leaves(expected), jax.tree.leaves(gradient(before, dense))
    )
  )
  scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
  assert 0 < distance < 2**-5 * scale
  assert_same(expected, gradient(before, sparse), 1.5 * distance / scale)
  np.testing.assert_array_equal(sparse.statistics.fired, dense.statistics.fired)
  assert sparse.statistics.dense_tokens.sum() < small["inputs"].size
  np.testing.assert_allclose(
    sparse.statistics.loss, exact.statistics.loss, rtol=2**-8
  )
