"""The wheel, what it declares, and which of our folders need which extra."""

import ast
import configparser
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
OURS = {"configs", "experiments", "pallas_kernels", "tests", "twell_jax"}

# The extras that may be taken as installed in a folder; the first line that
# matches a file holds. The rest of twell_jax works without an extra.
EXTRAS_OF_FOLDER = (
  ("twell_jax/training", ("train",)),
  ("twell_jax/data", ("data", "hub")),
  ("twell_jax", ()),
  ("pallas_kernels", ()),
  ("experiments", ("train", "data", "hub", "experiments")),
  ("configs", ("experiments",)),
)


def canonical(requirement: str) -> str:
  """The distribution's normalised name of a requirement line."""
  name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
  assert name is not None, f"not a requirement: {requirement!r}"
  return re.sub(r"[-_.]+", "-", name.group()).lower()


def read_setup_cfg() -> configparser.ConfigParser:
  parser = configparser.ConfigParser(interpolation=None)
  parser.read(ROOT / "setup.cfg", encoding="utf-8")
  return parser


def declared(setup_cfg: configparser.ConfigParser, *extras: str) -> set[str]:
  """Distributions that an installation with these extras asks for."""
  lines = setup_cfg["options"]["install_requires"].splitlines()
  for extra in extras:
    lines += setup_cfg["options.extras_require"][extra].splitlines()
  return {canonical(line) for line in lines if line.strip()}


def imported_packages(path: pathlib.Path) -> set[str]:
  """Top-level packages a file imports that are neither Python's nor ours."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      names |= {alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and not node.level:
      assert node.module is not None
      names.add(node.module.split(".")[0])
  return names - sys.stdlib_module_names - OURS


def files_of(folder: str) -> list[pathlib.Path]:
  """A folder's files, except those under a folder with a line of its own."""
  return [
    path
    for path in sorted((ROOT / folder).rglob("*.py"))
    if folder
    == next(
      name for name, _ in EXTRAS_OF_FOLDER if path.is_relative_to(ROOT / name)
    )
  ]


def undeclared(
  paths: list[pathlib.Path], requirements: set[str]
) -> dict[str, set[str]]:
  """For each package without a requirement, the files that import it."""
  providers = importlib.metadata.packages_distributions()
  missing: dict[str, set[str]] = {}
  for path in paths:
    for package in imported_packages(path):
      names = {canonical(name) for name in providers.get(package, [])}
      if not names & requirements:
        missing.setdefault(package, set()).add(path.name)
  return missing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Iterator[zipfile.ZipFile]:
  """The wheel, built from a copy so that no build folder is left here."""
  source = tmp_path_factory.mktemp("source") / "twell_jax"
  shutil.copytree(
    ROOT,
    source,
    ignore=shutil.ignore_patterns(
      ".*", "__pycache__", "*.egg-info", "build", "dist", "workdir"
    ),
  )
  target = tmp_path_factory.mktemp("wheel")
  build = subprocess.run(
    [
      *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index"),
      *("--no-deps", "--no-build-isolation", "--wheel-dir", target, source),
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  assert build.returncode == 0, build.stderr
  (path,) = target.glob("*.whl")
  with zipfile.ZipFile(path) as archive:
    yield archive


def test_wheel_holds_the_library_only(wheel):
  folders = {name.split("/")[0] for name in wheel.namelist()}
  info = {name for name in folders if name.endswith(".dist-info")}
  assert len(info) == 1
  assert "twell_jax" in folders
  assert folders - info <= {"twell_jax", "pallas_kernels"}


def test_wheel_holds_every_module(wheel):
  modules = {
    path.relative_to(ROOT).as_posix()
    for package in ("twell_jax", "pallas_kernels")
    for path in (ROOT / package).rglob("*.py")
  }
  assert modules <= set(wheel.namelist())


def test_wheel_declares_its_terms(wheel):
  names = wheel.namelist()
  (path,) = (name for name in names if name.endswith("/METADATA"))
  metadata = wheel.read(path).decode()
  assert "Name: twell_jax\n" in metadata
  assert "License: Apache-2.0\n" in metadata
  assert "Requires-Python: >=3.12\n" in metadata
  assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_pyproject_holds_the_build_system_only():
  with (ROOT / "pyproject.toml").open("rb") as file:
    assert set(tomllib.load(file)) == {"build-system"}


@pytest.mark.parametrize(("folder", "extras"), EXTRAS_OF_FOLDER)
def test_every_import_is_declared(folder, extras):
  requirements = declared(read_setup_cfg(), *extras)
  assert undeclared(files_of(folder), requirements) == {}


def test_undeclared_import_is_found(tmp_path):
  bad = tmp_path / "bad.py"
  bad.write_text(
    "import os\nimport jax.numpy as jnp\nimport pytest\nimport no_such_thing\n",
    encoding="utf-8",
  )
  assert undeclared([bad], declared(read_setup_cfg())) == {
    "no_such_thing": {"bad.py"},
    "pytest": {"bad.py"},
  }


def test_constraints_pin_what_is_declared():
  setup_cfg = read_setup_cfg()
  extras = ("train", "data", "hub", "experiments", "test", "lint")
  lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
  pins = [line for line in lines if line and not line.startswith("#")]
  assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), pins
  wanted = declared(setup_cfg, *extras) - {"twell-jax"} | {"jaxlib"}
  assert wanted <= {canonical(pin) for pin in pins}
