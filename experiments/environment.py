"""Where a figure was measured: device, versions, date and revision."""

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax


def describe() -> dict[str, Any]:
  """What a reader needs to know beside a measured figure."""
  return {
    "device": _device(),
    "versions": {
      "python": platform.python_version(),
      **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax")},
    },
    "date": datetime.date.today().isoformat(),
    "revision": _revision(),
  }


def sentence(where: Mapping[str, Any]) -> str:
  """What `describe` returned, for the foot of a table."""
  versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
  return (
    f"{where['date']}, {where['device']}; {versions}; revision"
    f" {where['revision']}."
  )


def _device() -> str:
  device = jax.devices()[0]
  if device.platform != "cpu":
    return f"{jax.device_count()} × {device.device_kind}"
  return f"{_processor()}, {len(os.sched_getaffinity(0))} cores"


def _processor() -> str:
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
      for line in file:
        if line.startswith("model name"):
          return line.split(":", 1)[1].strip()
  except FileNotFoundError:
    pass  # not Linux
  return platform.processor() or platform.machine()


def _revision() -> str | None:
  """The commit of this checkout, "-dirty" with uncommitted changes."""
  try:
    result = subprocess.run(
      ["git", "describe", "--always", "--dirty"],
      cwd=os.path.dirname(__file__),
      capture_output=True,
      text=True,
      check=True,
    )
  except (OSError, subprocess.CalledProcessError):
    return None  # not a checkout
  return result.stdout.strip()
