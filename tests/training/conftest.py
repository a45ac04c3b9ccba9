"""A run small enough to train in a test."""

import dataclasses
import os
import types

import grain
import jax
import numpy as np
import pytest

from tests.training.runs import OPTIONS
from twell_jax import training
from twell_jax.nn import TransformerConfig

VOCABULARY = 12
SEQ = 6


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(tmp_path_factory):
  """Compiles each program once in a session, not once in every test."""
  folder = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    folder = folder.parent  # of all workers
  options = {
    "jax_compilation_cache_dir": str(folder / "compiled"),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
  }
  previous = {name: getattr(jax.config, name) for name in options}
  for name, value in options.items():
    jax.config.update(name, value)
  yield
  for name, value in previous.items():
    jax.config.update(name, value)


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compilation):
  """For all tests of this folder."""


@pytest.fixture(scope="session")
def config():
  # The reference implementation compiles in a fraction of the time.
  return TransformerConfig(
    vocab_size=VOCABULARY,
    d_model=16,
    d_ff=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    implementation="reference",
  )


@pytest.fixture
def single_mesh():
  return training.make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="session")
def corpus():
  """Input and held-out batches of 8 sequences, without threads."""
  rng = np.random.default_rng(0)
  # Counting with skips: something to learn.
  text = np.cumsum(rng.integers(1, 3, (80, SEQ + 1)), 1) % VOCABULARY
  examples = [
    {
      "inputs": row[:-1].astype(np.int32),
      "targets": row[1:].astype(np.int32),
      "weights": np.ones(SEQ, np.float32),
    }
    for row in text
  ]

  def batches(on_batch=lambda batch: batch):
    dataset = grain.MapDataset.source(examples[16:]).seed(0).shuffle().repeat()
    dataset = dataset.batch(8).map(on_batch)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))

  held_out = (
    grain.MapDataset.source(examples[:16])
    .batch(8)
    .to_iter_dataset(grain.ReadOptions(num_threads=0))
  )
  return types.SimpleNamespace(batches=batches, held_out=held_out)


@pytest.fixture(scope="session")
def batch():
  rng = np.random.default_rng(0)
  shape = (8, 6)
  kept = rng.random(shape) > 0.3
  return {
    "inputs": rng.integers(0, 12, shape).astype(np.int32),
    "targets": rng.integers(0, 12, shape).astype(np.int32),
    # Unequal between sequences, so that a mean of means is another number.
    "weights": (rng.random(shape) * kept).astype(np.float32),
  }


@pytest.fixture
def run(tmp_path, config, corpus, single_mesh):
  """Trains the tiny model in a folder of the test's own, by its name."""

  def start(name, *, batches=None, **changes):
    options = {
      field.name: changes.pop(field.name)
      for field in dataclasses.fields(OPTIONS)
      if field.name in changes
    }
    arguments = {"held_out": corpus.held_out, "mesh": single_mesh} | changes
    return training.train(
      arguments.pop("config", config),
      dataclasses.replace(OPTIONS, **options),
      batches=corpus.batches() if batches is None else batches,
      workdir=tmp_path / name,
      **arguments,
    )

  return start
