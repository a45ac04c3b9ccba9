"""Dependencies between our packages point one way.

    configs                     nothing of ours
    pallas_kernels              nothing of ours, and of others only jax & co.
    twell_jax.formats  <- .ops  <- .nn  <- .training
    twell_jax.data              nothing of ours
    experiments                 all of them, tests excepted

Imports are read from the syntax tree, so that those inside functions and
under TYPE_CHECKING count too.
"""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# What each layer may import of ours, besides itself. "twell_jax" is the
# package's own __init__, where the public names are gathered.
ALLOWED: dict[str, set[str]] = {
  "configs": set(),
  "pallas_kernels": set(),
  "twell_jax.formats": set(),
  "twell_jax.ops": {"twell_jax.formats", "pallas_kernels"},
  "twell_jax.nn": {"twell_jax.formats", "twell_jax.ops"},
  "twell_jax.training": {
    "twell_jax.formats",
    "twell_jax.nn",
    "twell_jax.ops",
  },
  "twell_jax.data": set(),
  "twell_jax": {
    "twell_jax.data",
    "twell_jax.formats",
    "twell_jax.nn",
    "twell_jax.ops",
    "twell_jax.training",
  },
  "experiments": {
    "configs",
    "pallas_kernels",
    "twell_jax",
    "twell_jax.data",
    "twell_jax.formats",
    "twell_jax.nn",
    "twell_jax.ops",
    "twell_jax.training",
  },
}
PACKAGES = ("configs", "experiments", "pallas_kernels", "twell_jax")

# Kernels take and give arrays: no autodiff library, no Flax.
KERNEL_LIBRARIES = {"jax", "jaxlib", "jaxtyping", "numpy"}


def module_name(path: pathlib.Path, root: pathlib.Path) -> str:
  """The dotted name of a file, a package's being that of its folder."""
  parts = list(path.relative_to(root).with_suffix("").parts)
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: pathlib.Path, root: pathlib.Path) -> set[str]:
  """Absolute dotted names that a file imports.

  `from a import b` gives "a.b", which is a module or a name inside "a".
  """
  package = path.relative_to(root).parent.parts
  names = set()
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = package[: len(package) - node.level + 1] if node.level else ()
      prefix = ".".join((*base, *([node.module] if node.module else [])))
      names |= {f"{prefix}.{alias.name}" for alias in node.names}
  return names


def layer_of(name: str, root: pathlib.Path) -> str | None:
  """The layer a dotted name belongs to; None for what is not ours.

  A folder or file of twell_jax is a layer, whether ALLOWED knows it or not.
  """
  top, *rest = name.split(".")
  if top == "tests":
    return "tests"
  if top not in PACKAGES:
    return None
  if top == "twell_jax" and rest:
    inner = root / top / rest[0]
    if inner.is_dir() or inner.with_suffix(".py").is_file():
      return f"{top}.{rest[0]}"
  return top


def violations(root: pathlib.Path) -> list[str]:
  """One line for each import against the rule, in the packages under root."""
  found = []
  for package in PACKAGES:
    for path in sorted((root / package).rglob("*.py")):
      name = module_name(path, root)
      layer = layer_of(name, root)
      if layer not in ALLOWED:
        found.append(f"{name}: {layer} has no line in ALLOWED: give it one")
        continue
      for imported in sorted(imported_names(path, root)):
        target = layer_of(imported, root)
        if target not in {None, layer, *ALLOWED[layer]}:
          found.append(f"{name} imports {imported}: {layer} may not")
        is_foreign_to_kernels = (
          layer == "pallas_kernels"
          and target is None
          and not is_standard_library(imported)
          and imported.split(".")[0] not in KERNEL_LIBRARIES
        )
        if is_foreign_to_kernels:
          found.append(f"{name} imports {imported}: {layer} may not")
  return found


def is_standard_library(name: str) -> bool:
  """Whether a dotted name is of Python's own library."""
  return name.split(".")[0] in sys.stdlib_module_names


def test_dependencies_point_one_way():
  assert any((ROOT / package).is_dir() for package in PACKAGES)
  assert violations(ROOT) == []


@pytest.mark.parametrize(
  ("path", "source", "line"),
  [
    (
      "twell_jax/formats/bad.py",
      "from twell_jax.ops import ffn",
      "twell_jax.formats.bad imports twell_jax.ops.ffn: "
      "twell_jax.formats may not",
    ),
    (
      "twell_jax/ops/bad.py",
      "def f():\n  from ..nn.layers import SparseFFN",
      "twell_jax.ops.bad imports twell_jax.nn.layers.SparseFFN: "
      "twell_jax.ops may not",
    ),
    (
      "twell_jax/nn/bad.py",
      "import pallas_kernels.gate_pack",
      "twell_jax.nn.bad imports pallas_kernels.gate_pack: twell_jax.nn may not",
    ),
    (
      "twell_jax/nn/bad.py",
      "from twell_jax import sparse_ffn",
      "twell_jax.nn.bad imports twell_jax.sparse_ffn: twell_jax.nn may not",
    ),
    (
      "twell_jax/nn/__init__.py",
      "from .. import data",
      "twell_jax.nn imports twell_jax.data: twell_jax.nn may not",
    ),
    (
      "twell_jax/data/bad.py",
      "import twell_jax.training",
      "twell_jax.data.bad imports twell_jax.training: twell_jax.data may not",
    ),
    (
      "twell_jax/training/bad.py",
      "from experiments import train",
      "twell_jax.training.bad imports experiments.train: "
      "twell_jax.training may not",
    ),
    (
      "twell_jax/novel/bad.py",
      "",
      "twell_jax.novel.bad: twell_jax.novel has no line in ALLOWED: "
      "give it one",
    ),
    (
      "configs/bad.py",
      "import twell_jax",
      "configs.bad imports twell_jax: configs may not",
    ),
    (
      "experiments/bad.py",
      "from tests.helpers import oracle",
      "experiments.bad imports tests.helpers.oracle: experiments may not",
    ),
    (
      "pallas_kernels/bad.py",
      "import json\nimport flax.nnx",
      "pallas_kernels.bad imports flax.nnx: pallas_kernels may not",
    ),
    (
      "pallas_kernels/bad.py",
      "from twell_jax.formats import TwellMatrix",
      "pallas_kernels.bad imports twell_jax.formats.TwellMatrix: "
      "pallas_kernels may not",
    ),
  ],
)
def test_violation_is_found(tmp_path, path, source, line):
  for layer in ("data", "formats", "nn", "ops", "training"):
    (tmp_path / "twell_jax" / layer).mkdir(parents=True)
  bad = tmp_path / path
  bad.parent.mkdir(parents=True, exist_ok=True)
  bad.write_text(source, encoding="utf-8")
  assert violations(tmp_path) == [line]


@pytest.mark.parametrize(
  ("path", "source"),
  [
    ("twell_jax/ops/good.py", "from pallas_kernels import gate_pack"),
    ("twell_jax/ops/good.py", "from . import reference"),
    ("twell_jax/training/good.py", "from ..nn.config import Config"),
    ("twell_jax/__init__.py", "from .ops import sparse_ffn"),
    ("twell_jax/data/good.py", "import grain"),
    ("pallas_kernels/good.py", "import functools\nimport jax.numpy as jnp"),
    ("experiments/good.py", "import configs.quickstart\nimport twell_jax.nn"),
  ],
)
def test_permitted_import_passes(tmp_path, path, source):
  for layer in ("data", "formats", "nn", "ops", "training"):
    (tmp_path / "twell_jax" / layer).mkdir(parents=True)
  good = tmp_path / path
  good.parent.mkdir(parents=True, exist_ok=True)
  good.write_text(source, encoding="utf-8")
  assert violations(tmp_path) == []
