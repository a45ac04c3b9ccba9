"""Tuned configs: what was measured to be fastest, by device and shape.

A table is one JSON file for a kind of device, tuned/nvidia_h200.json for an
"NVIDIA H200", which experiments/autotune.py writes:

    {
     "device": "NVIDIA H200",
     "kernels": {
      "gate_pack": [
       {
        "config": {"cluster": 2, "tile_n": 256, ...},
        "measured": {"date": "2027-01-31", "median_ms": ..., ...},
        "shape": {"k": 2048, "m": 16384, "n": 5632}
       }
      ]
     }
    }

A shape is that of the layer, m tokens and n neurons, before padding; only the k
of the gathered kernels, which cannot do without, is the padded one. It is the
same for kernels that go through the entries of tokens and for those that go
through the entries of neurons. The config of a call is

 1. that of the entry with its shape; or else
 2. that of the entry with the smallest m above the call's, at most four times
    as large, that has the same n, k and width; or else
 3. the kernel's `default_config`, also on a device without a table.

A table never changes what a kernel writes: an entry of gate_pack counts only if
its tile_width and slots are those asked for, or else those of the default.

A table is validated as a whole when it is first read, and then kept. None comes
with this package: no kernel has been timed on a GPU yet.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from pallas_kernels import gate_pack_config, gather_config, gradient_config
from pallas_kernels.gate_pack_config import GatePackConfig
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.gradient_config import Product
from pallas_kernels.target import Device

TABLES = pathlib.Path(__file__).parent / "tuned"

Config = GatePackConfig | GatherConfig

# How many times a call's m an entry's may be. With a few times as many tokens
# the tiles, or blocks, of a kernel share the device in much the same way.
_M_REACH = 4


class Kernel(NamedTuple):
  """What a table may say of a kernel.

  Attributes:
    config: The class of its configs.
    sizes: The names that make up a shape.
    format_fields: Fields of a config that decide what the kernel writes.
  """

  config: type[Config]
  sizes: tuple[str, ...]
  format_fields: tuple[str, ...] = ()


_GATHERED = Kernel(GatherConfig, ("m", "n", "k", "width"))

KERNELS: Mapping[str, Kernel] = {
  "gate_pack": Kernel(GatePackConfig, ("m", "n", "k"), ("tile_width", "slots")),
  "gathered_down": _GATHERED,
  "gathered_up_down": _GATHERED,
  **{product.value: _GATHERED for product in Product},
}


class Measured(NamedTuple):
  """How an entry came about.

  Attributes:
    date: Day of the measurement, ISO 8601.
    jax: Version of JAX.
    revision: The commit that was measured; None outside of a checkout.
    active_share: Active neurons of all, on average over tokens.
    median_ms: Of a call with the entry's config.
    default_median_ms: Of one with the default config, measured in turn.
  """

  date: str
  jax: str
  revision: str | None
  active_share: float
  median_ms: float
  default_median_ms: float


class Entry(NamedTuple):
  """The fastest config of a kernel for a shape.

  Attributes:
    kernel: A name in KERNELS.
    shape: Its sizes by name.
    config: The kernel's config.
    measured: Where it comes from.
  """

  kernel: str
  shape: Mapping[str, int]
  config: Config
  measured: Measured


def for_gate_pack(
  device: Device,
  m: int,
  n: int,
  k: int,
  *,
  tile_width: int | None = None,
  slots: int | None = None,
) -> GatePackConfig:
  """The config of gate_pack for x [m, k] and gate [n, k], before padding.

  Args:
    device: What it runs on.
    m: Tokens.
    n: Neurons.
    k: Columns of both.
    tile_width: Of a TwELL tile, if given.
    slots: Of a TwELL tile, if given.

  Raises:
    ValueError: As `gate_pack_config.default_config`; or a malformed table.
  """
  default = gate_pack_config.default_config(
    m, n, k, sm_count=device.sm_count, tile_width=tile_width, slots=slots
  )
  config = _tuned("gate_pack", device, {"m": m, "n": n, "k": k}, default)
  assert isinstance(config, GatePackConfig)
  return config


def for_gathered(
  device: Device, m: int, n: int, k: int, width: int, *, matrices: int
) -> GatherConfig:
  """The config of a gathered kernel.

  Args:
    device: What it runs on.
    m: Rows of the result, tokens.
    n: Rows of a matrix, neurons.
    k: Their width, padded.
    width: Entries that a row has at most, such as the ELL width.
    matrices: 1 for gathered_down, 2 for gathered_up_down.

  Raises:
    ValueError: As `gather_config.default_config`; or a malformed table.
  """
  default = gather_config.default_config(
    m, k, width, matrices=matrices, sm_count=device.sm_count
  )
  kernel = "gathered_down" if matrices == 1 else "gathered_up_down"
  shape = {"m": m, "n": n, "k": k, "width": width}
  config = _tuned(kernel, device, shape, default)
  assert isinstance(config, GatherConfig)
  return config


def for_gradient(
  device: Device,
  product: Product,
  m: int,
  n: int,
  k: int,
  width: int,
  *,
  active: float | None = None,
) -> GatherConfig:
  """The config of a gathered kernel of training.

  Args:
    device: What it runs on.
    product: The kernel; it says itself whether its rows are tokens or neurons.
    m: Tokens.
    n: Neurons.
    k: Width of a matrix row, padded.
    width: Entries that a token has at most, such as the ELL width.
    active: Entries that a token has on average, if known.

  Raises:
    ValueError: As `gradient_config.layer_config`; or a malformed table.
  """
  default = gradient_config.layer_config(
    product,
    tokens=m,
    neurons=n,
    k=k,
    width=width,
    active=active,
    sm_count=device.sm_count,
  )
  shape = {"m": m, "n": n, "k": k, "width": width}
  config = _tuned(product.value, device, shape, default)
  assert isinstance(config, GatherConfig)
  return config


def table_path(kind: str) -> pathlib.Path:
  """The table's file for a device kind, whether there is one or not."""
  name = re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")
  return TABLES / f"{name}.json"


@functools.cache
def load(path: pathlib.Path, kind: str) -> tuple[Entry, ...]:
  """The entries of a table; none if there is no such file.

  Args:
    path: A file that `merge` wrote.
    kind: The device kind that it must be for.

  Raises:
    ValueError: The table is malformed, or for another device.
  """
  try:
    text = path.read_text(encoding="utf-8")
  except FileNotFoundError:
    return ()
  except (OSError, UnicodeDecodeError) as error:
    raise _malformed(path, f"it cannot be read: {error}") from error
  try:
    table = json.loads(text)
  except (json.JSONDecodeError, RecursionError) as error:
    raise _malformed(path, f"it is not JSON: {error}") from error
  _check_keys(path, "the table", table, {"device", "kernels"})
  if table["device"] != kind:
    raise _malformed(path, f"it is for {table['device']!r}, not for {kind!r}")
  _check_keys(
    path, "'kernels'", table["kernels"], KERNELS.keys(), required=set()
  )
  entries: dict[Any, Entry] = {}
  for kernel, rows in table["kernels"].items():
    if not isinstance(rows, list):
      raise _malformed(path, f"{kernel!r} is not a list")
    for index, row in enumerate(rows):
      entry = _read_entry(path, f"{kernel}[{index}]", kernel, row)
      if _key(entry) in entries:
        raise _malformed(path, f"{kernel}[{index}] repeats a shape")
      entries[_key(entry)] = entry
  return tuple(entries.values())


def merge(path: pathlib.Path, kind: str, entries: Iterable[Entry]) -> None:
  """Writes entries into a table, in the place of those of the same shape.

  What it writes depends only on the entries that are then in the table, not on
  the order in which they came.

  Args:
    path: The file, `table_path(kind)` for it to be found; created if missing.
    kind: The device that they were measured on.
    entries: What to write.

  Raises:
    ValueError: The file is there and malformed, or for another device.
  """
  load.cache_clear()
  merged = {_key(entry): entry for entry in (*load(path, kind), *entries)}
  kernels: dict[str, list[dict[str, Any]]] = {}
  for _, entry in sorted(merged.items()):
    kernels.setdefault(entry.kernel, []).append(
      {
        "config": dataclasses.asdict(entry.config),
        "measured": entry.measured._asdict(),
        "shape": dict(entry.shape),
      }
    )
  table = {"device": kind, "kernels": kernels}
  path.parent.mkdir(parents=True, exist_ok=True)
  # Renamed into place, so that no reader meets half a table.
  partial = path.with_suffix(".partial")
  partial.write_text(
    json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8"
  )
  os.replace(partial, path)
  load.cache_clear()


def _tuned(
  kernel: str, device: Device, shape: Mapping[str, int], default: Config
) -> Config:
  """The config by the rule of the module's docstring."""
  rest = {name: size for name, size in shape.items() if name != "m"}
  written = _format(kernel, default)
  nearest = min(
    (
      entry
      for entry in load(table_path(device.kind), device.kind)
      if entry.kernel == kernel
      and rest == {name: entry.shape[name] for name in rest}
      and shape["m"] <= entry.shape["m"] <= _M_REACH * shape["m"]
      and _format(kernel, entry.config) == written
    ),
    key=lambda entry: entry.shape["m"],
    default=None,
  )
  return default if nearest is None else nearest.config


def _format(kernel: str, config: Config) -> tuple[int, ...]:
  return tuple(getattr(config, f) for f in KERNELS[kernel].format_fields)


def _key(entry: Entry) -> tuple[Any, ...]:
  """What only one entry of a table may have; also their order."""
  sizes = tuple(entry.shape[name] for name in KERNELS[entry.kernel].sizes)
  return entry.kernel, sizes, _format(entry.kernel, entry.config)


def _read_entry(path: pathlib.Path, name: str, kernel: str, row: Any) -> Entry:
  config_class, sizes, _ = KERNELS[kernel]
  fields = {field.name for field in dataclasses.fields(config_class)}
  _check_keys(path, name, row, {"config", "measured", "shape"})
  for part, keys in (("shape", set(sizes)), ("config", fields)):
    _check_keys(path, f"{part} of {name}", row[part], keys)
    for key, value in row[part].items():
      # A bool is an int to Python, not to a config.
      if type(value) is not int:
        raise _malformed(path, f"{key}={value!r} of {name} is not an integer")
  for key, size in row["shape"].items():
    if size < 1:
      raise _malformed(path, f"{key}={size} of {name} is not at least 1")
  measured = row["measured"]
  _check_keys(path, f"measured of {name}", measured, set(Measured._fields))
  for key in ("active_share", "median_ms", "default_median_ms"):
    is_number = type(measured[key]) in (int, float)
    if not is_number or not 0 <= measured[key] < math.inf:
      raise _malformed(
        path, f"{key}={measured[key]!r} of {name} is not a number of at least 0"
      )
  try:
    config = config_class(**row["config"])
  except ValueError as error:
    raise _malformed(path, f"config of {name}: {error}") from error
  return Entry(kernel, row["shape"], config, Measured(**measured))


def _check_keys(
  path: pathlib.Path,
  name: str,
  value: Any,
  keys: Set[str],
  *,
  required: Set[str] | None = None,
) -> None:
  """Checks that it is a dict with these keys; by default all are required."""
  if not isinstance(value, dict):
    raise _malformed(path, f"{name} is not an object")
  required = keys if required is None else required
  if missing := sorted(required - value.keys()):
    raise _malformed(path, f"{name} lacks {', '.join(missing)}")
  if unknown := sorted(value.keys() - keys):
    raise _malformed(path, f"{name} has {', '.join(unknown)}, which is unknown")


def _malformed(path: pathlib.Path, what: str) -> ValueError:
  return ValueError(
    f"tuned table {path}: {what}; correct that, or delete the file for the"
    " default configs and to tune again with python -m experiments.autotune"
  )
