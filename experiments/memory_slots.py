"""What the slots of a compiled training step's temporaries hold.

Read from the report of XLA's buffer assignment, which lists the slots of each
allocation with the shapes of the arrays that take turns in them.
"""

import collections
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# cumulative size; size; offset; number of values; count×dtype[shape], ...
_SLOT = re.compile(r"\s*[\d.]+\w+\(\s*\d+%\);\s*([\d.]+)(\w+);[^;]*;[^;]*;(.*)")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


class Slot(NamedTuple):
  """A piece of an allocation.

  Attributes:
    size: Bytes.
    shapes: The dtypes and shapes of all that it ever holds.
  """

  size: int
  shapes: tuple[tuple[str, tuple[int, ...]], ...]


def read(folder: pathlib.Path) -> list[Slot]:
  """The slots of the largest allocation in XLA's report, the temporaries'.

  Args:
    folder: Where the compiler of `training.make_train_step` wrote its report.

  Raises:
    ValueError: There is not one report.
  """
  reports = list(folder.glob("*jit_train_step*memory-usage-report.txt"))
  if len(reports) != 1:
    raise ValueError(
      f"the compiler wrote {len(reports)} memory reports of the step, not one:"
      " this jax writes them in another way"
    )
  allocations: list[list[Slot]] = []
  for line in reports[0].read_text(encoding="utf-8").splitlines():
    found = _SLOT.fullmatch(line)
    if found is None:
      if "cumulative_size" in line:
        allocations.append([])
      continue
    shapes = tuple(
      (dtype, tuple(int(size) for size in sizes.split(",") if size))
      for dtype, sizes in _SHAPE.findall(found[3])
    )
    size = float(found[1]) * _UNITS[found[2]]
    allocations[-1].append(Slot(round(size), shapes))
  return max(allocations, key=lambda slots: sum(slot.size for slot in slots))


def stacked(
  slots: Sequence[Slot], *, layers: int, tokens: tuple[int, int]
) -> collections.Counter[str]:
  """Bytes of slots that hold something of all layers.

  Args:
    slots: Of the temporaries.
    layers: How many there are.
    tokens: Second sizes by which activations are told: sequences, and tokens.
  """
  found: collections.Counter[str] = collections.Counter()
  for slot in slots:
    ranks = [shape for shape in slot.shapes if shape[1][:1] == (layers,)]
    if any(shape[1:2] and shape[1] in tokens for _, shape in ranks):
      found["residuals"] += slot.size
    elif any(dtype == "f32" and len(shape) > 2 for dtype, shape in ranks):
      found["gradients"] += slot.size
  return found
