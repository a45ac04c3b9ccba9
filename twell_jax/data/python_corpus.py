"""The default corpus: what the running Python interpreter brings along.

Real text that is there on every machine, offline: the sources of the standard
library (English prose in docstrings and comments, and code) and the language
reference that `help()` shows, one document per topic.
"""

import dataclasses
import importlib
import pathlib
import sysconfig
from collections.abc import Callable, Iterator

from twell_jax.data import sources

# Tests, other people's packages, and tables that a program wrote.
_EXCLUDED_FOLDERS = frozenset(
  {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "encodings",
    "__pycache__",
  }
)
_EXCLUDED_PREFIXES = ("_sysconfigdata",)
_TOPICS_MODULE = "pydoc_data.topics"
_TOPICS_FILE = pathlib.Path("pydoc_data", "topics.py")


@dataclasses.dataclass(frozen=True)
class PydocTopics:
  """The topics of the language reference; a `sources.Source`."""

  location: str
  version: str

  def documents(
    self,
    *,
    name: str,
    text_field: str,
    report_undecodable: Callable[[str], None],
  ) -> Iterator[sources.Document]:
    """Yields one document per topic (see `sources.Source.documents`)."""
    del text_field, report_undecodable  # Topics are plain text already.
    topics = importlib.import_module(_TOPICS_MODULE).topics
    for topic, text in sorted(topics.items()):
      yield sources.Document(f"{name}#{topic}", text)


def python_sources() -> list[sources.Source]:
  """Returns the sources of the interpreter's library and its reference.

  Raises:
    ValueError: this interpreter was installed without its library's sources.
  """
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  found: list[sources.Source] = []
  for folder, subfolders, files in root.walk():
    subfolders[:] = sorted(set(subfolders) - _EXCLUDED_FOLDERS)
    for file in sorted(files):
      if not file.endswith(".py") or file.startswith(_EXCLUDED_PREFIXES):
        continue
      source = sources.local_file(folder / file)
      if folder / file == root / _TOPICS_FILE:
        found.append(PydocTopics(source.location, source.version))
      else:
        found.append(source)
  if not found:
    raise ValueError(
      f"corpus='python': {root} holds no *.py file; name a folder of text"
      " instead"
    )
  return found
