"""What the kernels run on: Hopper GPUs, or the GPU interpreter on CPU."""

from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src import config as jax_config
from jaxtyping import Array

# Compute capability 9.0, the only one with wgmma. Device kinds are those that
# JAX reports; a kind is matched by prefix, so that variants (PCIe, NVL) count.
_HOPPER = ("NVIDIA H100", "NVIDIA H200", "NVIDIA H800", "NVIDIA GH200")

# Of every Hopper GPU: what a block may ask for at most, in bytes.
SHARED_MEMORY_BYTES = 227 * 1024


class Device(NamedTuple):
  """A GPU as far as the kernels care.

  Attributes:
    kind: JAX's device kind, such as "NVIDIA H200".
    sm_count: Streaming multiprocessors, to size persistent grids.
  """

  kind: str
  sm_count: int


H200 = Device("NVIDIA H200", 132)


def interpret_params() -> plgpu.InterpretGPUParams | None:
  """How kernels are interpreted, if they are.

  Set by `plgpu.force_gpu_interpret_mode`, Pallas' way of running kernels
  without a GPU; None where they are compiled.
  """
  # JAX has no public way to read what the public functions set.
  params = jax_config.pallas_tpu_interpret_mode_context_manager.value
  if params is not None and not isinstance(params, plgpu.InterpretGPUParams):
    raise ValueError(
      f"the interpret mode in force, {type(params).__name__}, is not that of"
      " GPUs: use plgpu.force_gpu_interpret_mode()"
    )
  return params


def device_of(x: Array) -> Device:
  """The Hopper GPU that a computation on x is traced for.

  It is the device of x's mesh or of the mesh in context, which may be a target
  without hardware (aot.h200_mesh), otherwise JAX's default device. Interpreted
  kernels stand for an H200.

  Raises:
    NotImplementedError: The device is none that the kernels run on.
  """
  if interpret_params() is not None:
    return H200
  for mesh in (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()):
    abstract = mesh.abstract_device
    if abstract is not None:
      return _checked(
        abstract.platform, abstract.device_kind, abstract.num_cores
      )
  default = jax.config.jax_default_device or jax.devices()[0]
  if isinstance(default, str):
    default = jax.devices(default)[0]
  sm_count = getattr(default, "core_count", None)
  return _checked(default.platform, default.device_kind, sm_count)


def _checked(platform: str, kind: str, sm_count: int | None) -> Device:
  if platform != "gpu" or not kind.startswith(_HOPPER) or not sm_count:
    raise NotImplementedError(
      f"the Mosaic kernels need a Hopper GPU ({', '.join(_HOPPER)}) but this"
      f" device is {kind!r} ({platform}): use implementation='xla', or"
      " plgpu.force_gpu_interpret_mode() to interpret them, slowly, on CPU"
    )
  return Device(kind, sm_count)
