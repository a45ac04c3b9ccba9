"""Modules are compiled for a call or two."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compilation):
  """For all tests of this folder."""
