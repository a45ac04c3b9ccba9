"""Entry of the experiment scripts: a mistake of the caller is one line."""

import os
import sys
from collections.abc import Callable

import jax
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

  A mistake of the caller, in the flags or found by `main` (a ValueError), what
  is not supported here (a NotImplementedError) and what the file system refuses
  are one line on stderr and exit code 2. So is the loss of another process.
  """
  app.run(lambda argv: _reported(main, argv), flags_parser=_parse_flags)


def _reported(main: Callable[[], int], argv: list[str]) -> int:
  if len(argv) > 1:
    return _report(f"unexpected argument {argv[1]!r}: flags begin with --")
  try:
    return main()
  except (
    ValueError,
    NotImplementedError,
    FloatingPointError,
    OSError,
  ) as error:
    if _TRACEBACK.value:
      raise
    return _end(_report(error))
  except jax.errors.JaxRuntimeError as error:
    if _TRACEBACK.value or not jax.distributed.is_initialized():
      raise
    return _end(
      _report(
        "another process was lost, or this one failed on its device, and all"
        f" end: resume from the last checkpoint ({error})"
      )
    )
  except KeyboardInterrupt:
    # While a model trains, the loop takes Ctrl-C and saves; this is any other
    # moment, with nothing of its own to save.
    print("interrupted", file=sys.stderr)
    return _end(130)


def _end(exit_code: int) -> int:
  """The exit code; one of several processes ends here.

  A usual exit would wait for the others, which cannot go on without it.
  """
  if jax.distributed.is_initialized():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
  return exit_code


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    arguments = flags.FLAGS(argv)
  except SyntaxError as error:
    sys.exit(_report(f"{error.filename} is not Python: {error}"))
  except (AttributeError, KeyError) as error:
    # What ml_collections raises for a field that the config does not have, its
    # message quoted once more for each level of the field.
    message = str(error).replace("\\n", ". ").replace("\\", "")
    sys.exit(_report(f"no such config field: {message.replace("'", '')}"))
  except flags.Error as error:
    sys.exit(_report(_without_traceback(str(error))))
  if "config" in flags.FLAGS:
    try:
      # A missing file is told of only when something is read from it.
      dict(flags.FLAGS.config)
    except OSError:
      path = config_flags.get_config_filename(flags.FLAGS["config"])
      sys.exit(_report(f"--config={path}: no such file; see configs/"))
  if flags.FLAGS["verbosity"].using_default_value:
    # The libraries below tell much at the level of absl's scripts, INFO.
    # absl types all flags with one variable.
    flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
  return arguments


def _without_traceback(message: str) -> str:
  """What a config file raised, which comes in one text with its traceback."""
  _, found, traceback = message.partition("Traceback (most recent call last)")
  if not found:
    return message
  return f"--config: {traceback.strip().splitlines()[-1].partition(': ')[2]}"


def _report(error: Exception | str) -> int:
  print("error:", " ".join(str(error).split()), file=sys.stderr)
  return 2
