"""Which collectives a compiled program runs, and how many bytes they move.

Read from the text of the optimised program (`compiled.as_text()`), in its
order. An asynchronous pair (all-gather-start, all-gather-done) is one. What
runs in the body of a loop runs as often as the loop's known trip count says.

Bytes are those that a device sends, and as many that it receives, by the
algorithms that move the least, with n devices in a group and R bytes in the
result on each:

    all-gather, all-to-all   R · (n − 1) / n
    reduce-scatter           R · (n − 1)
    all-reduce               R · (n − 1) / n, twice
    collective-permute       R
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

KINDS = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-broadcast",
  "collective-permute",
  "ragged-all-to-all",
  "reduce-scatter",
)
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_BITS |= {
  f"{kind}{bits}": bits for kind in "suf" for bits in (4, 8, 16, 32, 64)
}


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective of a program.

  Attributes:
    kind: One of `KINDS`.
    shapes: The results on one device, as "bf16[5632,2048]".
    axes: The mesh axes along which the devices of a group lie; "?" if groups
      are no slices of the mesh.
    group_size: Devices in a group.
    runs: How often it runs in an execution of the program; None if a loop
      around it decides that when it runs.
    result_bytes: Of the results of one run, on one device.
  """

  kind: str
  shapes: tuple[str, ...]
  axes: tuple[str, ...]
  group_size: int
  runs: int | None
  result_bytes: int

  @property
  def sent_bytes(self) -> int:
    """Bytes that a device sends in one run."""
    others = self.group_size - 1
    share = {
      "reduce-scatter": float(others),
      "all-reduce": 2 * others / self.group_size,
      "collective-permute": 1.0,
    }.get(self.kind, others / self.group_size)
    return round(share * self.result_bytes)


def read(text: str, *, mesh: Mapping[str, int]) -> list[Collective]:
  """The collectives that a device runs, in the order of the program.

  Args:
    text: Of a compiled program (`compiled.as_text()`).
    mesh: The sizes of the mesh's axes, in its order; devices are numbered with
      the last axis fastest.

  Raises:
    ValueError: Text of another form than the compiler of this jax writes.
  """
  computations, entry = _computations(text)
  return list(_walk(computations, entry, 1, mesh))


def total_bytes(found: Iterable[Collective]) -> dict[tuple[str, str], int]:
  """Bytes that a device sends, by kind and axes; the largest first.

  Raises:
    ValueError: It is not known how often one of them runs.
  """
  totals: collections.Counter[tuple[str, str]] = collections.Counter()
  for collective in found:
    if collective.runs is None:
      raise ValueError(
        f"{collective.kind} of {', '.join(collective.shapes)} runs in a loop of"
        " unknown length: its bytes cannot be summed"
      )
    key = collective.kind, "+".join(collective.axes)
    totals[key] += collective.runs * collective.sent_bytes
  return dict(totals.most_common())


# "%name = " type " " opcode "(": types hold spaces inside tuples only.
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
  r"(?:calls|to_apply|true_computation|false_computation)=%([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class _Instruction:
  name: str
  type: str
  opcode: str
  rest: str  # operands and attributes


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
  """Instructions by name of their computation, and the name of the first."""
  computations: dict[str, list[_Instruction]] = {}
  entry, current = None, None
  for line in text.splitlines():
    header = _COMPUTATION.fullmatch(line)
    if header:
      current = computations.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif current is not None and (found := _INSTRUCTION.match(line)):
      current.append(_instruction(found[1], found[2]))
  if entry is None:
    raise ValueError("the program has no ENTRY: it is no text of XLA's")
  return computations, entry


def _instruction(name: str, text: str) -> _Instruction:
  end = _end_of_group(text) if text.startswith("(") else text.index(" ")
  opcode, _, rest = text[end:].strip().partition("(")
  return _Instruction(name, text[:end], opcode, rest)


def _end_of_group(text: str) -> int:
  """Just behind the parenthesis that closes the first one."""
  depth = 0
  for position, character in enumerate(text):
    depth += {"(": 1, ")": -1}.get(character, 0)
    if not depth:
      return position + 1
  raise ValueError(f"a parenthesis is not closed in {text[:80]!r}")


def _walk(
  computations: Mapping[str, Sequence[_Instruction]],
  name: str,
  runs: int | None,
  mesh: Mapping[str, int],
) -> Iterator[Collective]:
  instructions = computations[name]
  for instruction in instructions:
    opcode = instruction.opcode
    kind = opcode.removesuffix("-start")
    if kind in KINDS:
      type_ = instruction.type
      if kind != opcode:  # Its type holds operands too; that of its end not.
        type_ = _done(instructions, instruction).type
      yield _collective(kind, type_, instruction.rest, runs, mesh)
    elif opcode == "while":
      trips = _TRIP_COUNT.search(instruction.rest)
      times = runs * int(trips[1]) if runs is not None and trips else None
      body = re.search(r"body=%([\w.\-]+)", instruction.rest)
      if body is None:
        raise ValueError(f"loop {instruction.name} has no body")
      yield from _walk(computations, body[1], times, mesh)
    elif opcode in ("call", "conditional", "async-start"):
      called = _CALLED.findall(instruction.rest)
      for branches in _BRANCHES.findall(instruction.rest):
        called += [branch.strip(" %") for branch in branches.split(",")]
      for computation in called:
        yield from _walk(computations, computation, runs, mesh)


def _done(
  instructions: Sequence[_Instruction], start: _Instruction
) -> _Instruction:
  opcode = start.opcode.removesuffix("-start") + "-done"
  for instruction in instructions:
    operand = instruction.rest.partition(")")[0].split("%")[-1]
    if instruction.opcode == opcode and operand == start.name:
      return instruction
  raise ValueError(f"{start.name} is not waited for where it is started")


def _collective(
  kind: str,
  type_: str,
  rest: str,
  runs: int | None,
  mesh: Mapping[str, int],
) -> Collective:
  shapes = _SHAPE.findall(type_)
  groups = _groups(rest, mesh)
  return Collective(
    kind=kind,
    shapes=tuple(f"{dtype}[{sizes}]" for dtype, sizes in shapes),
    axes=_axes(groups, mesh),
    group_size=len(groups[0]),
    runs=runs,
    result_bytes=sum(
      math.prod(int(size) for size in sizes.split(",") if size)
      * _bits(dtype)
      // 8
      for dtype, sizes in shapes
    ),
  )


def _bits(dtype: str) -> int:
  # float8 types have names such as f8e4m3fn.
  bits = 8 if dtype.startswith("f8") else _BITS.get(dtype)
  if bits is None:
    raise ValueError(f"dtype {dtype} of a collective is unknown")
  return bits


_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=(.*)")
_LISTED = re.compile(r"\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_ON_MESH = re.compile(r"mesh\[([^\]]*)\] \{([^}]*)\}")


def _groups(rest: str, mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
  """The devices of each group, in the three forms that XLA writes."""
  written = _GROUPS.search(rest)
  if written is None:
    raise ValueError(f"a collective has no groups: {rest[:80]!r}")
  if found := _ON_MESH.match(written[1]):
    sizes = {
      name.strip("' "): int(size)
      for name, size in (axis.split("=") for axis in found[1].split(","))
    }
    return _slices(sizes, tuple(re.findall(r"'(\w+)'", found[2])))
  if found := _IOTA.match(written[1]):
    devices = np.arange(int(found[1]) * int(found[2]))
    devices = devices.reshape([int(size) for size in found[3].split(",")])
    if found[4]:
      devices = devices.transpose([int(axis) for axis in found[4].split(",")])
    return [tuple(row) for row in devices.reshape(int(found[1]), -1).tolist()]
  if found := _LISTED.match(written[1]):
    groups = [
      tuple(int(device) for device in group.split(","))
      for group in re.findall(r"\{([\d,]+)\}", found[1])
    ]
    return groups or [tuple(range(math.prod(mesh.values())))]
  raise ValueError(f"groups of an unknown form: {written[1][:80]!r}")


def _slices(
  mesh: Mapping[str, int], axes: tuple[str, ...]
) -> list[tuple[int, ...]]:
  """The devices that differ in their places along some axes only."""
  devices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
  order = [name for name in mesh if name not in axes] + list(axes)
  moved = devices.transpose([list(mesh).index(name) for name in order])
  size = math.prod(mesh[name] for name in axes)
  return [tuple(row) for row in moved.reshape(-1, size).tolist()]


def _axes(
  groups: Sequence[tuple[int, ...]], mesh: Mapping[str, int]
) -> tuple[str, ...]:
  wanted = {frozenset(group) for group in groups}
  cut = [name for name, size in mesh.items() if size > 1]
  for count in range(len(cut) + 1):
    for axes in itertools.combinations(cut, count):
      if {frozenset(group) for group in _slices(mesh, axes)} == wanted:
        return axes
  return ("?",)
