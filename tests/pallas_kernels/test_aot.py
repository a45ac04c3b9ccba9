"""What the compiler says of a kernel that is written to say it."""

import functools
import os

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from pallas_kernels import aot
from tests.helpers.kernels import (
  compile_for_h200,
  h200_mesh_with_cudnn,
  interpret_params,
  lower_for_cuda,
  no_races,
)

SHAPE = jax.ShapeDtypeStruct((8, 256), jnp.float32)


def double_rows(x_gmem, y_gmem, x_smem, barrier, *, commits):
  """Through shared memory; without the commit, its reads race."""
  row = jax.lax.axis_index("row")
  plgpu.copy_gmem_to_smem(x_gmem.at[row], x_smem, barrier)
  plgpu.barrier_wait(barrier)
  x_smem[...] = x_smem[...] * 2
  if commits:
    plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(x_smem, y_gmem.at[row])
  plgpu.wait_smem_to_gmem(0)


def double(*, commits=True, interpret=None):
  return plgpu.kernel(
    functools.partial(double_rows, commits=commits),
    out_type=SHAPE,
    scratch_types=[plgpu.SMEM((256,), jnp.float32), plgpu.Barrier()],
    grid=(8,),
    grid_names=("row",),
    kernel_name="double",
    interpret=interpret,
  )


def test_statistics_of_each_kernel():
  # Two of the same would be compiled once.
  compiled = compile_for_h200(
    lambda x: double()(double(commits=False)(x)), SHAPE
  )
  assert len(compiled.kernels) == 2
  for kernel in compiled.kernels:
    assert kernel.name == "double"
    assert 0 < kernel.registers <= 32
    assert kernel.spill_bytes == kernel.stack_bytes == 0
    # A row, and the barrier.
    assert 1024 < kernel.shared_memory_bytes < 2048
    assert "cp.async.bulk" in kernel.ptx
    assert "sm_90a" in kernel.ptx
    assert kernel.notes == ()
  memory = compiled.executable.memory_analysis()
  assert memory is not None
  assert memory.output_size_in_bytes == 8192


def test_reads_spills_and_notes(tmp_path):
  path = tmp_path / "name_with_underscores_3.ptxas"
  path.write_text(
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async"
    " instructions are serialized due to something in function 'f'\n"
    "ptxas info    : 0 bytes gmem\n"
    "ptxas info    : Compiling entry function 'f' for 'sm_90a'\n"
    "ptxas info    : Function properties for f\n"
    "    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 5 barriers, 1 bytes smem\n"
    "ptxas info    : Compile time = 18.6 ms\n"
  )
  path.with_suffix(".ptx").write_text("// ptx")
  path.with_suffix(".mlir-passes.log").write_text(
    "%size_1 = arith.constant 1032 : i32\n"
    "gpu.launch ... dynamic_shared_memory_size %size_1 {"
  )
  (note,) = aot._read_stats(path).notes
  assert "C7510" in note
  assert aot._read_stats(path)._replace(notes=()) == aot.KernelStats(
    name="name_with_underscores",
    registers=168,
    spill_bytes=64,
    stack_bytes=16,
    barriers=5,
    shared_memory_bytes=1033,
    notes=(),
    ptx="// ptx",
  )


def test_the_persistent_cache_is_left_out(tmp_path):
  """A second compilation would read what JAX cannot read."""
  options = {
    "jax_compilation_cache_dir": str(tmp_path),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
  }
  previous = {name: getattr(jax.config, name) for name in options}
  for name, value in options.items():
    jax.config.update(name, value)
  try:
    for _ in range(2):
      compile_for_h200(lambda x: double()(x) + 3, SHAPE)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
  finally:
    for name, value in previous.items():
      jax.config.update(name, value)


def fails_loudly(x):
  os.write(2, b"what went wrong")
  raise TypeError(x)


def test_the_compiler_is_quiet_unless_it_fails(capfd):
  compile_for_h200(double(), SHAPE)
  assert capfd.readouterr() == ("", "")
  with pytest.raises(TypeError):
    compile_for_h200(fails_loudly, SHAPE)
  assert capfd.readouterr().err == "what went wrong"


def test_without_the_compiler(monkeypatch, tmp_path):
  monkeypatch.setattr(aot, "_has_plugin", lambda: False)
  monkeypatch.setattr(aot, "_APART", tmp_path)
  with pytest.raises(ValueError, match="make setup-aot"):
    aot.h200_mesh()
  monkeypatch.setenv("CI", "1")
  with pytest.raises(ValueError, match="make setup-aot"):
    compile_for_h200(double(), SHAPE)
  monkeypatch.delenv("CI")
  with pytest.raises(pytest.skip.Exception, match="make setup-aot"):
    compile_for_h200(double(), SHAPE)


def test_jax_is_told_of_a_cudnn_that_it_did_not_find(monkeypatch):
  h200_mesh_with_cudnn(data=1)
  monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", None)
  with pytest.raises(RuntimeError, match="not detected"):
    fused_attention_stablehlo.check_cudnn_version()
  aot.find_compiler()
  assert fused_attention_stablehlo.check_cudnn_version() > 90000


def test_lowering_needs_no_compiler():
  assert "mosaic_gpu" in lower_for_cuda(double(), SHAPE)


def test_races_of_any_kernel_are_found():
  x = jnp.ones(SHAPE.shape)
  racy = double(commits=False, interpret=interpret_params())
  clean = double(interpret=interpret_params())
  with no_races():
    assert (jax.jit(clean)(x) == 2).all()
  # The detector remembers the last kernel only, which is clean here.
  with pytest.raises(AssertionError, match=r"\[True, False\]"), no_races():
    jax.block_until_ready(jax.jit(lambda x: clean(racy(x)))(x))
  with pytest.raises(AssertionError, match="nothing was"), no_races():
    pass
