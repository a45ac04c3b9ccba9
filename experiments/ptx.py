"""What can be read in a kernel's PTX: instructions, loops, warpgroups.

PTX is what LLVM emits and ptxas translates; the machine's instructions are
other ones. A copy between registers may cost nothing, an addition of 64 bits
two instructions. Loads, matrix products and bulk copies are the same in both.
"""

import re
from typing import NamedTuple

_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)\s*;")
# The opcode of a statement, after braces and a predicate such as "@!%p11". What
# begins otherwise is a directive (".loc"), or goes on from the line before.
_OPCODE = re.compile(r"[\s{}]*(?:@!?%?\w+\s+)?([a-z][\w.:]*)")


def opcodes(ptx: str) -> tuple[str, ...]:
  """The opcodes of all instructions, in order."""
  statements = (
    statement
    for line in ptx.splitlines()
    if not _LABEL.match(line)
    for statement in line.partition("//")[0].split(";")
  )
  found = map(_OPCODE.match, statements)
  return tuple(match[1] for match in found if match)


def count(ptx: str, prefix: str) -> int:
  """How many instructions have an opcode that begins so."""
  return sum(opcode.startswith(prefix) for opcode in opcodes(ptx))


def loops(ptx: str) -> tuple[tuple[str, ...], ...]:
  """The opcodes of every loop, in order of the branches back.

  A loop is taken to be what lies between a label and a branch back to it.
  """
  labels: dict[str, int] = {}
  found = []
  lines = ptx.splitlines()
  for number, line in enumerate(lines):
    if label := _LABEL.match(line):
      labels[label[1]] = number
    branch = _BRANCH.search(line)
    if branch and branch[1] in labels:
      begin = labels[branch[1]]
      found.append(opcodes("\n".join(lines[begin : number + 1])))
  return tuple(found)


def warpgroups(ptx: str) -> int:
  """Warpgroups of a block, from the size that the kernel is declared with."""
  declared = re.search(r"^\.(?:maxn|reqn)tid (\d+), 1, 1", ptx, re.MULTILINE)
  if declared is None:
    raise ValueError("the PTX declares no block of one dimension (.maxntid)")
  return int(declared[1]) // 128


class Redistribution(NamedTuple):
  """Registers per thread that warpgroups ask for, one giving back.

  Attributes:
    producer: Of the one that needs fewer than it was launched with.
    consumer: Of each of the others.
  """

  producer: int
  consumer: int


def redistribution(ptx: str) -> Redistribution | None:
  """What setmaxnreg asks for; None if the kernel has no such instruction.

  Raises:
    ValueError: It has others than one producer and alike consumers make.
  """
  released = set(re.findall(r"setmaxnreg\.dec\S* (\d+)", ptx))
  requested = set(re.findall(r"setmaxnreg\.inc\S* (\d+)", ptx))
  if not released and not requested:
    return None
  if len(released) != 1 or len(requested) != 1:
    raise ValueError(
      f"setmaxnreg asks for {sorted(released)} and {sorted(requested)}, not as"
      " one producer and consumers that are alike do"
    )
  return Redistribution(int(released.pop()), int(requested.pop()))
