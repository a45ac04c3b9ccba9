import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.target import H200, device_of, interpret_params
from tests.helpers.kernels import compile_for_h200


def test_cpu_is_refused_unless_interpreted():
  x = jnp.ones(3)
  with pytest.raises(NotImplementedError, match=r"'cpu' .*'xla'.*interpret"):
    device_of(x)
  assert interpret_params() is None
  with plgpu.force_gpu_interpret_mode():
    assert device_of(x) == H200
    assert interpret_params() == plgpu.InterpretGPUParams()


def test_the_interpret_mode_of_another_platform_is_refused():
  with (
    pltpu.force_tpu_interpret_mode(),
    pytest.raises(ValueError, match=r"InterpretParams.* is not that of GPUs"),
  ):
    interpret_params()


def test_the_device_that_is_compiled_for():
  devices = []

  def f(x):
    devices.append(device_of(x))
    return x + 1

  compile_for_h200(f, jax.ShapeDtypeStruct((4,), jnp.float32))
  # Inside shard_map only the mesh in context says what the device is.
  compile_for_h200(
    lambda x: jax.vmap(f)(x), jax.ShapeDtypeStruct((4, 4), jnp.float32)
  )
  assert devices == [H200, H200]


@pytest.mark.parametrize(
  ("kind", "sm_count", "supported"),
  [
    ("NVIDIA H100 PCIe", 114, True),
    ("NVIDIA H200", 132, True),
    ("NVIDIA A100-SXM4-80GB", 108, False),
    ("NVIDIA B200", 148, False),
    ("NVIDIA H200", None, False),
  ],
)
def test_only_hopper(kind, sm_count, supported):
  abstract = jax.sharding.AbstractMesh(
    (1,),
    ("data",),
    abstract_device=jax.sharding.AbstractDevice(
      device_kind=kind, num_cores=sm_count, platform="gpu"
    ),
  )
  x = jnp.ones(3)
  with jax.sharding.use_abstract_mesh(abstract):
    if supported:
      assert device_of(x) == (kind, sm_count)
    else:
      with pytest.raises(NotImplementedError, match=kind):
        device_of(x)
