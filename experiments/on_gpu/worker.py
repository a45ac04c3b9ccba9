"""The process that runs the stages; supervisor.py starts it.

    python -m experiments.on_gpu.worker REQUEST

It takes its request as JSON, runs the stages, and tells of them on the
descriptor `events`, one JSON object a line:

    {"event": "refused", "why": ...}
    {"event": "device", "device": {...}}     {"event": "plan", "stages": [...]}
    {"event": "begin", "name": ..., "limit_s": ...}
    {"event": "end", "result": {"status": ..., ...}}

A stage that raises is a stage with status ERROR, and the next one follows. But
after an error of the device, or of the interpreter, later ones could not be
trusted, so the process ends with BROKEN and another one goes on.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.on_gpu import plan

BROKEN = 9

# Checks come first, but leave at least this share of the time to timings.
_SHARE_OF_TIMINGS = 0.5


class Stage(NamedTuple):
  """A check or a measurement.

  Attributes:
    name: What it is; unique.
    kind: "check" or "timing".
    run: Does it and returns its result, JSON with a "status".
  """

  name: str
  kind: str
  run: Callable[[], dict[str, Any]]


Emit = Callable[..., None]


def run_stages(
  stages: Sequence[Stage],
  *,
  skip: Iterable[str],
  begins: float,
  ends: float,
  limit_s: float,
  emit: Emit,
) -> bool:
  """Runs stages while there is time; False if the process should end now.

  Checks that would take more than their share of the time are put off until
  after the timings. None is begun that could not end in time, if it took as
  long as the longest so far.
  """
  skip = set(skip)
  checks_end = ends - _SHARE_OF_TIMINGS * (ends - begins)
  waiting = [stage for stage in stages if stage.name not in skip]
  put_off: list[Stage] = []
  longest = 0.0
  while waiting or put_off:
    if not waiting:
      waiting, put_off, checks_end = put_off, [], ends
    now = time.time()
    if now + longest > ends:
      return True
    stage = waiting.pop(0)
    if stage.kind == "check" and now > checks_end:
      put_off.append(stage)
      continue
    emit(event="begin", name=stage.name, limit_s=limit_s)
    is_broken = False
    try:
      result = stage.run()
    except Exception as error:
      result = {"status": "ERROR", "message": _last_line(error)}
      is_broken = is_of_device(error)
    emit(event="end", result=result)
    if is_broken:
      return False
    longest = max(longest, time.time() - now)
  return True


def is_of_device(error: Exception) -> bool:
  """Whether an error may have left the device, or interpreter, unusable."""
  import jax

  # What JAX raises while it executes, errors of callbacks included.
  return isinstance(error, jax.errors.JaxRuntimeError)


def _last_line(error: Exception) -> str:
  text = "".join(traceback.format_exception_only(error)).strip()
  lines = [line for line in text.splitlines() if line.strip()]
  frames = traceback.extract_tb(error.__traceback__)
  ours = [frame for frame in frames if "site-packages" not in frame.filename]
  where = f"{pathlib.Path(ours[-1].filename).name}:{ours[-1].lineno}"
  return f"{lines[0]} ({where})"[:500]


def provide_jaxtyping() -> None:
  """Puts the stand-in on the path if there is no jaxtyping."""
  if importlib.util.find_spec("jaxtyping") is None:
    sys.path.append(str(pathlib.Path(__file__).parent / "stand_ins"))


def _device_facts() -> dict[str, Any]:
  """What can be read of the device, and of the software on it."""
  import jax

  from experiments import environment

  device = jax.devices()[0]
  memory = device.memory_stats() or {}
  return {
    **environment.describe(),
    "kind": device.device_kind,
    "multiprocessors": getattr(device, "core_count", None),
    "memory_bytes": memory.get("bytes_limit"),
    "platform_version": device.client.platform_version,
    "driver": _driver(),
    "has_jaxtyping": "on_gpu" not in (_path_of("jaxtyping") or ""),
  }


def _path_of(module: str) -> str | None:
  spec = importlib.util.find_spec(module)
  return None if spec is None else spec.origin


def _driver() -> str | None:
  """The version of NVIDIA's driver, from the kernel's file."""
  try:
    text = pathlib.Path("/proc/driver/nvidia/version").read_text()
  except OSError:
    return None
  return text.splitlines()[0]


def _prefer_quick_compilation() -> None:
  """For interpreted kernels; before JAX is imported."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  flags = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"


@contextlib.contextmanager
def _interpreted(is_dry: bool) -> Iterator[None]:
  if not is_dry:
    yield
    return
  import jax.experimental.pallas.mosaic_gpu as plgpu

  with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
    yield


def _make_stages(request: Mapping[str, Any], sizes: plan.Sizes) -> list[Stage]:
  from experiments.on_gpu import (
    gather_checks,
    gradient_checks,
    op_checks,
    pack_checks,
    timings,
    training_checks,
  )

  seed = request["seed"]
  checks = [
    *pack_checks.default_stages(sizes, seed),
    *gather_checks.stages(sizes, seed),
    *op_checks.stages(sizes, seed),
    *gradient_checks.stages(sizes, seed),
    *training_checks.stages(sizes, seed),
    *pack_checks.packing_stages(sizes, seed),
  ]
  # Of everything the ordinary inputs, should the time not suffice for the rest.
  checks.sort(key=lambda stage: not stage.name.endswith(": heavy tail"))
  stages = [
    *checks,
    *timings.stages(sizes, seed=seed, is_dry=request["is_dry"]),
  ]
  wanted = request["only"]
  return [
    stage
    for stage in stages
    if not wanted or any(part in stage.name for part in wanted)
  ]


def main() -> int:
  """Answers the request of the command line."""
  request = json.loads(sys.argv[1])
  with os.fdopen(request["events"], "w", encoding="utf-8") as events:

    def emit(**event: Any) -> None:
      print(json.dumps(event), file=events, flush=True)

    provide_jaxtyping()
    if request["is_dry"]:
      _prefer_quick_compilation()
    import jax.numpy as jnp

    from pallas_kernels import target

    with _interpreted(request["is_dry"]):
      try:
        target.device_of(jnp.zeros(()))
      except NotImplementedError as error:
        emit(event="refused", why=str(error))
        return 0
      emit(event="device", device=_device_facts())
      sizes = plan.DRY if request["is_dry"] else plan.FULL
      stages = _make_stages(request, sizes)
      emit(event="plan", stages=[stage.name for stage in stages])
      is_usable = run_stages(
        stages,
        skip=request["skip"],
        begins=request["begins"],
        ends=request["ends"],
        limit_s=sizes.stage_limit_s,
        emit=emit,
      )
    return 0 if is_usable else BROKEN


if __name__ == "__main__":
  sys.exit(main())
