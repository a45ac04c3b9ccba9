"""Compiles many steps, one after the other, and goes on where it was."""

import concurrent.futures
import json
import multiprocessing
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from absl import flags


class Markdown(Protocol):
  """Makes a report of rows; `name` is that of its files, without suffix."""

  def __call__(self, rows: Sequence[Mapping[str, Any]], *, name: str) -> str:
    """Returns the text."""
    ...


def define_flags() -> None:
  """Defines --output, which must be given, and --workers."""
  flags.DEFINE_string("output", None, "Where to write, without suffix.")
  flags.DEFINE_integer(
    "workers", 1, "How many steps to compile at a time.", lower_bound=1
  )
  flags.mark_flag_as_required("output")


def publish[Case: NamedTuple](
  cases: Sequence[Case],
  measure: Callable[[Case], dict[str, Any]],
  markdown: Markdown,
) -> list[dict[str, Any]]:
  """Measures what OUTPUT.json lacks (`run`), and writes OUTPUT.md.

  Returns:
    The rows of all cases, in their order.
  """
  output = pathlib.Path(flags.FLAGS.output)
  output.parent.mkdir(parents=True, exist_ok=True)
  rows = run(
    cases,
    measure,
    path=output.with_suffix(".json"),
    workers=flags.FLAGS.workers,
  )
  output.with_suffix(".md").write_text(
    markdown(rows, name=output.name), encoding="utf-8"
  )
  return rows


def case_of[Case: NamedTuple](kind: type[Case], row: Mapping[str, Any]) -> Case:
  """The case, of this kind, that a row of the results is of."""
  return kind(*(row[name] for name in kind._fields))


def run[Case: NamedTuple](
  cases: Sequence[Case],
  measure: Callable[[Case], dict[str, Any]],
  *,
  path: pathlib.Path,
  workers: int,
) -> list[dict[str, Any]]:
  """Measures the cases that are not in the file yet, and adds them to it.

  Args:
    cases: What to measure, of one kind.
    measure: Makes a row, which holds the fields of its case, in a process of
      its own.
    path: The JSON file of rows, written after each.
    workers: How many to measure at a time.

  Returns:
    The rows of all cases, in their order.

  Raises:
    RuntimeError: Some could not be measured; it is raised when all others are.
  """
  rows = {}
  if path.exists():
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = {case_of(type(cases[0]), row): row for row in found}
  missing = [case for case in cases if case not in rows]
  failed: list[tuple[Case, BaseException]] = []
  with _processes(workers) as executor:
    futures = {executor.submit(measure, case): case for case in missing}
    try:
      for done in concurrent.futures.as_completed(futures):
        case = futures[done]
        error = done.exception()
        print(*case, "" if error is None else repr(error), flush=True)
        if error is not None:
          failed.append((case, error))
          continue
        rows[case] = done.result()
        ordered = [rows[case] for case in cases if case in rows]
        text = json.dumps(ordered, indent=1) + "\n"
        # Whole or not at all, if this process is killed.
        partial = path.with_name(f"incomplete-{path.name}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
      executor.shutdown(cancel_futures=True)
      raise
  if failed:
    case, error = failed[0]
    raise RuntimeError(
      f"{len(failed)} of {len(missing)} steps did not compile, one of them"
      f" {case}; the others are in {path}"
    ) from error
  return [rows[case] for case in cases]


def _processes(workers: int) -> concurrent.futures.Executor:
  """Each case in a new process: a compiler's crash or leak ends with it."""
  return concurrent.futures.ProcessPoolExecutor(
    workers,
    mp_context=multiprocessing.get_context("spawn"),
    max_tasks_per_child=1,
  )
