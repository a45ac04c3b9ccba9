"""Entry of the experiment scripts: a mistake of the caller is one line."""

import pathlib
import sys
from collections.abc import Callable

from absl import app, flags, logging
from ml_collections import config_flags

_TRACEBACK = flags.DEFINE_bool(
  "traceback", False, "Show where an error comes from, not only what it says."
)


def define_config(default: str | None, help_text: str) -> None:
  """Defines --config, a file with get_config(), and --config.FIELD=VALUE."""
  config_flags.DEFINE_config_file("config", default, help_text)


def run(main: Callable[[], int]) -> None:
  """Parses the flags and exits with what `main` returns.

  A mistake of the caller, in the flags or found by `main` (a ValueError), is
  one line on stderr and exit code 2.
  """
  app.run(lambda argv: _reported(main, argv), flags_parser=_parse_flags)


def _reported(main: Callable[[], int], argv: list[str]) -> int:
  if len(argv) > 1:
    return _report(f"unexpected argument {argv[1]!r}: flags begin with --")
  if flags.FLAGS["verbosity"].using_default_value:
    # The libraries below tell much at the level of absl's scripts, INFO.
    logging.set_verbosity(logging.WARNING)
  try:
    return main()
  except (ValueError, FloatingPointError) as error:
    if _TRACEBACK.value:
      raise
    return _report(error)


def _parse_flags(argv: list[str]) -> list[str]:
  for path in _config_paths(argv):
    if not pathlib.Path(path).is_file():
      sys.exit(_report(f"--config={path}: no such file; see configs/"))
  try:
    return flags.FLAGS(argv)
  except SyntaxError as error:
    sys.exit(_report(f"{error.filename} is not Python: {error}"))
  except (AttributeError, KeyError) as error:
    # What ml_collections raises for a field that the config does not have, its
    # message quoted once more for each level of the field.
    message = str(error).replace("\\n", ". ").replace("\\", "").replace("'", "")
    sys.exit(_report(f"no such config field: {message}"))
  except (OSError, flags.Error) as error:
    sys.exit(_report(error))


def _config_paths(argv: list[str]) -> list[str]:
  """What --config names; ml_collections reads "path:argument"."""
  return [
    argument.partition("=")[2].partition(":")[0]
    for argument in argv
    if argument.startswith(("--config=", "-config="))
  ]


def _report(error: Exception | str) -> int:
  print("error:", " ".join(str(error).split()), file=sys.stderr)
  return 2
