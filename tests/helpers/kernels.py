"""The three tiers of kernel tests: interpreted, lowered, compiled."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import aot


def interpret_params() -> plgpu.InterpretGPUParams:
  """Interpret, look for races, and go on where one is found."""
  options: dict[str, Any] = {"detect_races": True}
  # From jax 0.12 on a race raises by default, which would hide the others.
  fields = dataclasses.fields(plgpu.InterpretGPUParams)
  if "on_race" in {field.name for field in fields}:
    options["on_race"] = "warn"
  return plgpu.InterpretGPUParams(**options)


@contextlib.contextmanager
def no_races() -> Iterator[None]:
  """Asserts that no kernel interpreted inside has a race.

  Results must be waited for inside. The detector only prints what it finds and
  forgets all kernels but the last, so that its state of each one is kept here.
  """
  states = []
  create = gpu_callbacks.GPURaceDetectionState

  def remember(**kwargs):
    states.append(create(**kwargs))
    return states[-1]

  gpu_callbacks.reset_gpu_interpret_mode_state()
  try:
    with mock.patch.object(gpu_callbacks, "GPURaceDetectionState", remember):
      yield
  finally:
    # What an exception inside the interpreter leaves breaks its next use.
    gpu_callbacks.reset_gpu_interpret_mode_state()
  assert states, "nothing was interpreted"
  racy = [state.races_found for state in states]
  assert not any(racy), f"races, printed above; by kernel: {racy}"


def lower_for_cuda(function: Callable[..., Any], *arguments: Any) -> str:
  """The StableHLO of a function for a Hopper GPU, on a machine without one."""
  traced = jax.jit(function).trace(*arguments)
  return traced.lower(lowering_platforms=("cuda",)).as_text()


def compile_for_h200(
  function: Callable[..., Any], *arguments: Any
) -> aot.Compiled:
  """`aot.compile_for_h200`; without the compiler the test is skipped.

  Where CI is set, it fails instead.
  """
  with _skips_without(ValueError):
    aot.find_compiler()
  return aot.compile_for_h200(function, *arguments)


def h200_mesh_with_cudnn(**axes: int) -> jax.sharding.Mesh:
  """A mesh with axes of these sizes to compile programs for that call cuDNN.

  Without the compiler or cuDNN the test is skipped, or fails where CI is set.
  """
  with _skips_without(ValueError, RuntimeError):
    mesh = aot.h200_mesh(tuple(axes.values()), tuple(axes))
    fused_attention_stablehlo.check_cudnn_version()
  return mesh


@contextlib.contextmanager
def _skips_without(*errors: type[Exception]) -> Iterator[None]:
  try:
    yield
  except errors as error:
    if os.environ.get("CI"):
      raise
    pytest.skip(str(error))
