import pytest

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
