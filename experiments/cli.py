"""Entry of the experiment scripts: a mistake of the caller is one line."""

import sys
from collections.abc import Callable

from absl import app, flags

_TRACEBACK = flags.DEFINE_bool(
  "traceback", False, "Show where an error comes from, not only what it says."
)


def run(main: Callable[[list[str]], int | None]) -> None:
  """`absl.app.run`, with a ValueError reported as one line and exit code 2."""

  def reported(argv: list[str]) -> int | None:
    try:
      return main(argv)
    except (ValueError, FloatingPointError) as error:
      if _TRACEBACK.value:
        raise
      return _report(error)

  app.run(reported, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except (AttributeError, KeyError) as error:
    # What ml_collections raises for a field that the config does not have.
    sys.exit(_report(f"no such config field: {error.args[0]}"))
  except (OSError, flags.Error) as error:
    sys.exit(_report(error))


def _report(error: Exception | str) -> int:
  print("error:", " ".join(str(error).split()), file=sys.stderr)
  return 2
