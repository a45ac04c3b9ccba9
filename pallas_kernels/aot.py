"""Compiles for an H200 on a machine without a GPU, and reads what came out.

XLA's CUDA compiler runs without a device when it is told what the device is.
What it needs is the `aot` extra: the CUDA plugin of the installed jax version,
ptxas, libdevice, and cuDNN for programs that call it. Interpreting a kernel
shows neither whether it compiles nor its registers and spills; this does.

The compiler writes what it made to files (MOSAIC_GPU_DUMP_TO), which are read
here: the PTX, ptxas' report, and the launch with its shared memory.
"""

import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import site
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Enough of an H200 SXM for XLA:GPU to compile for sm_90a.
_H200_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  device_address_bits: 64
  name: "NVIDIA H200"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""

# Where `make test` puts the compiler: inside the environment, but off its
# path: without a GPU the plugin greets every `import jax` with an error.
_APART = pathlib.Path(sys.prefix) / "aot"


class KernelStats(NamedTuple):
  """A compiled Mosaic kernel.

  Attributes:
    name: The kernel's.
    registers: Of a thread at launch; redistribution may change them.
    spill_bytes: Stored to and loaded from local memory by a thread.
    stack_bytes: Of a thread.
    barriers: Named barriers of a block.
    shared_memory_bytes: Dynamic and static, of a block.
    notes: What ptxas remarked beyond its statistics.
    ptx: The assembly.
  """

  name: str
  registers: int
  spill_bytes: int
  stack_bytes: int
  barriers: int
  shared_memory_bytes: int
  notes: tuple[str, ...]
  ptx: str


class Compiled(NamedTuple):
  """An executable for an H200, and its Mosaic kernels in order of lowering."""

  executable: jax.stages.Compiled
  kernels: tuple[KernelStats, ...]


def find_compiler() -> None:
  """Makes the CUDA compiler plugin importable, with the cuDNN beside it.

  To be called before JAX is first used.

  Raises:
    ValueError: It is not installed.
  """
  # Its start-up checks look for a driver that compiling does not need.
  os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  if not _has_plugin() and _APART.is_dir():
    site.addsitedir(str(_APART))
  if not _has_plugin():
    raise ValueError(
      "the CUDA compiler is not installed: `make setup-aot` puts it apart in"
      " .venv, `pip install '.[aot]'` into the environment"
    )
  # JAX looks for cuDNN's version in the plugin once, when it is imported, and
  # takes a plugin that is put on the path later for one without cuDNN.
  if fused_attention_stablehlo.cuda_versions is None:
    fused_attention_stablehlo.cuda_versions = importlib.import_module(
      "jax_cuda13_plugin._versions"
    )


def _has_plugin() -> bool:
  try:
    return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
  except ModuleNotFoundError:
    return False


def h200_mesh(
  axis_sizes: tuple[int, ...] = (1,), axis_names: tuple[str, ...] = ("data",)
) -> Mesh:
  """A mesh of H200s of which none need exist, to compile for.

  Raises:
    ValueError: The compiler is not installed.
  """
  find_compiler()
  devices = 1
  for size in axis_sizes:
    devices *= size
  topology = topologies.get_topology_desc(
    platform="cuda",
    topology_name="h200",
    target_config=_H200_TARGET,
    topology=f"1x1x{devices}",
  )
  return topologies.make_mesh(topology, axis_sizes, axis_names)


def compile_for_h200(
  function: Callable[..., Any], *arguments: Any, mesh: Mesh | None = None
) -> Compiled:
  """Compiles a function for H200s and reads the statistics of its kernels.

  Args:
    function: Any function of arrays that jax.jit takes.
    arguments: Pytrees of arrays or jax.ShapeDtypeStruct. Those without a
      sharding are replicated over the mesh.
    mesh: A mesh of `h200_mesh`; one device by default.
  """
  mesh = h200_mesh() if mesh is None else mesh
  replicated = NamedSharding(mesh, PartitionSpec())

  def placed(array):
    given = array.sharding if isinstance(array, jax.ShapeDtypeStruct) else None
    return jax.ShapeDtypeStruct(
      array.shape, array.dtype, sharding=given or replicated
    )

  arguments = jax.tree.map(placed, arguments)
  with tempfile.TemporaryDirectory() as folder:
    with _environment("MOSAIC_GPU_DUMP_TO", folder), _quiet():
      lowered = jax.jit(function).lower(*arguments)
      with no_persistent_cache():
        executable = lowered.compile()
    # Names end in the number of the lowering.
    reports = sorted(
      pathlib.Path(folder).glob("*.ptxas"),
      key=lambda path: int(path.stem.split("_")[-1]),
    )
    compiled = [_read_stats(path) for path in reports]
  hashes = list(dict.fromkeys(_KERNEL_HASH.findall(lowered.as_text())))
  new = [name for name in hashes if name not in _stats_by_hash]
  _stats_by_hash.update(zip(new, compiled, strict=True))
  return Compiled(executable, tuple(_stats_by_hash[name] for name in hashes))


# From jax 0.12 on a process compiles the same kernel once, and reports on it
# once, whatever program it is part of.
_stats_by_hash: dict[str, KernelStats] = {}
_KERNEL_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')


@contextlib.contextmanager
def no_persistent_cache() -> Iterator[None]:
  """Compiles without jax_compilation_cache_dir, if it is set.

  JAX cannot read an executable for a device that is not there, and says so with
  a warning for each.
  """
  directory = jax.config.jax_compilation_cache_dir
  if directory is None:
    yield
    return
  jax.config.update("jax_compilation_cache_dir", None)
  # It remembers whether there is one.
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
  before = os.environ.get(name)
  os.environ[name] = value
  try:
    yield
  finally:
    if before is None:
      del os.environ[name]
    else:
      os.environ[name] = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Keeps what the compiler prints, unless it fails.

  It complains about each dump that it cannot make, such as machine code where
  there is no disassembler. It writes past sys.stderr, hence the descriptors.
  """
  sys.stderr.flush()
  stderr = os.dup(2)
  with tempfile.TemporaryFile() as printed:
    os.dup2(printed.fileno(), 2)
    try:
      yield
    except BaseException:
      printed.seek(0)
      os.write(stderr, printed.read())
      raise
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)


_STATISTICS = re.compile(
  r"bytes (gmem|stack frame)|Compiling entry|Function properties|"
  r"Used \d+ registers|Compile time"
)


def _read_stats(report_path: pathlib.Path) -> KernelStats:
  report = report_path.read_text(encoding="utf-8")
  ptx = report_path.with_suffix(".ptx").read_text(encoding="utf-8")
  passes = report_path.with_suffix(".mlir-passes.log").read_text(
    encoding="utf-8"
  )
  return KernelStats(
    name=report_path.stem.rsplit("_", 1)[0],
    registers=_number(r"Used (\d+) registers", report),
    spill_bytes=_number(r"(\d+) bytes spill stores", report)
    + _number(r"(\d+) bytes spill loads", report),
    stack_bytes=_number(r"(\d+) bytes stack frame", report),
    barriers=_number(r"used (\d+) barriers", report),
    shared_memory_bytes=_dynamic_shared_memory(passes)
    + _number(r"(\d+) bytes smem", report),
    notes=tuple(
      line.strip()
      for line in report.splitlines()
      if line.strip() and not _STATISTICS.search(line)
    ),
    ptx=ptx,
  )


def _dynamic_shared_memory(passes: str) -> int:
  """Bytes that the launch in a log of compiler passes asks for."""
  launch = re.search(r"dynamic_shared_memory_size (%[\w.]+)", passes)
  if launch is None:
    return 0
  return _number(rf"{re.escape(launch[1])} = arith.constant (\d+)", passes)


def _number(pattern: str, text: str) -> int:
  """The number that a pattern captures, 0 if the text has none."""
  found = re.search(pattern, text)
  return int(found[1]) if found else 0
