"""What README.md shows works, and what it names exists."""

import importlib.util
import pathlib
import re
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"\bpython -m (\w+(?:\.\w+)*)")
_TARGET = re.compile(r"`make ((?:[a-z-]+ ?)+)|^make ((?:[a-z-]+ ?)+)", re.M)
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
# A path that begins with a folder of ours, wherever it stands.
_PATH = re.compile(
  r"(?<![\w./])((?:configs|experiments|pallas_kernels|tests|twell_jax)"
  r"(?:/[\w.-]*\w)+)"
)
# Not written before the program is run.
_MADE_LATER = ("workdir/",)


def blocks(text: str, language: str) -> list[str]:
  """The fenced blocks of a language."""
  return [code for name, code in _FENCE.findall(text) if name == language]


def missing_modules(text: str) -> list[str]:
  """What `python -m` is told to run and cannot be found."""
  return [m for m in _MODULE.findall(text) if not _is_importable(m)]


def missing_targets(text: str) -> list[str]:
  """What `make` is told to make and has no rule for."""
  named = " ".join(a or b for a, b in _TARGET.findall(text)).split()
  return [
    target
    for target in named
    if not re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE)
  ]


def missing_paths(text: str) -> list[str]:
  """Linked files and paths into our folders that are not there."""
  named = [
    link
    for link in _LINK.findall(text)
    if "://" not in link and not link.startswith(_MADE_LATER)
  ]
  named += _PATH.findall(text)
  return [path for path in named if not (ROOT / path).exists()]


def _is_importable(name: str) -> bool:
  try:
    return importlib.util.find_spec(name) is not None
  except ModuleNotFoundError:  # one of the packages it is said to be in
    return False


def test_there_is_code():
  assert len(blocks(README, "python")) >= 1


@pytest.mark.parametrize("index", range(len(blocks(README, "python"))))
def test_code_runs(index, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  code = blocks(README, "python")[index]
  exec(compile(code, f"README.md, block {index}", "exec"), {})
  assert capsys.readouterr().out.strip()  # each block prints what it shows


@pytest.mark.parametrize(
  ("missing", "pattern"),
  [
    pytest.param(missing_modules, _MODULE, id="modules"),
    pytest.param(missing_targets, _TARGET, id="targets"),
    pytest.param(missing_paths, _LINK, id="paths"),
  ],
)
def test_what_is_named_exists(
  missing: Callable[[str], list[str]], pattern: re.Pattern[str]
):
  assert pattern.search(README) is not None
  assert missing(README) == []


@pytest.mark.parametrize(
  ("missing", "text", "expected"),
  [
    (missing_modules, "`python -m experiments.trian`", ["experiments.trian"]),
    (missing_modules, "    python -m absent.train --x=1", ["absent.train"]),
    (missing_targets, "with `make qickstart`", ["qickstart"]),
    (missing_targets, "```sh\nmake setup tset\n```", ["tset"]),
    (missing_targets, "`make test JAX=latest` may make sense", []),
    (missing_paths, "[it](docs/absent.md)", ["docs/absent.md"]),
    (missing_paths, "see twell_jax/absent.", ["twell_jax/absent"]),
    (missing_paths, "[a](https://absent.org/configs/b) `configs`", []),
  ],
)
def test_what_is_missing_is_found(
  missing: Callable[[str], list[str]], text: str, expected: list[str]
):
  assert missing(text) == expected
