import types

import pytest
from absl import flags

from tests.experiments import programs


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
  """A folder of text."""
  folder = tmp_path_factory.mktemp("text") / "corpus"
  programs.write_corpus(folder)
  return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
  """The environment of the programs that tests start."""
  return programs.make_environment(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def give_flags(monkeypatch):
  """Sets the flags that a script's main() reads, by their names."""

  def give(**values):
    monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(**values))

  return give
