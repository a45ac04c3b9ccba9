r"""Compiles every kernel for an H200, without one, and says how it came out.

    python -m experiments.kernel_report \
        --output=experiments/results/kernel_report

Prints registers, spills, shared memory and ptxas' notes of each kernel at the
shapes of a layer, whether it has the instructions that it is made of, and what
gate_pack's epilogue costs; then the limits, and what misses them. The kernels
of training are compiled at as many tokens as a step has. With --output it
writes the same to OUTPUT.md and OUTPUT.json. The last line is JSON.

The exit status is 1 if a limit is missed. One miss is reported without it: the
epilogue's share at a small K, where the main loop is short and packing is not.

Nothing here is a measurement of time. It needs the CUDA compiler (`make
setup-aot`), but no GPU.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax

from experiments import environment
from experiments.compiled_kernels import (
  GatePackRow,
  GatheredRow,
  Row,
  compile_kernels,
)
from experiments.kernel_shapes import (
  ACTIVE_SHARE,
  MIN_TRAINING_TOKENS,
  SHAPES,
  Shape,
  parse_shapes,
)
from pallas_kernels import aot, rows
from pallas_kernels.target import SHARED_MEMORY_BYTES

MAX_EPILOGUE_SHARE = 0.06
# The K from which the epilogue's limit decides the exit status: that of the
# published layer.
EPILOGUE_LIMIT_FROM_K = 2048
# With as many, four blocks of a warpgroup share a multiprocessor.
MAX_GATHERED_REGISTERS = 128

LIMITS = {
  "spills": "no register is spilled",
  "shared_memory": f"at most {SHARED_MEMORY_BYTES // 1024} KiB",
  "wgmma_notes": "ptxas does not remark that wgmma is serialised",
  "instructions": "gate_pack has wgmma and TMA instructions, and gathered rows"
  " are loaded 16 bytes at a time where K is a multiple of 1024",
  "gathered_registers": f"at most {MAX_GATHERED_REGISTERS}",
  "redistribution": "warpgroups ask for no more registers than they were"
  " launched with",
  "epilogue": f"at most {MAX_EPILOGUE_SHARE:.0%} of the main loop; decides the"
  f" exit status from K = {EPILOGUE_LIMIT_FROM_K}",
}

_EXPLANATION = f"""\
KiB: shared memory of a block. Redistribution: registers per thread of each
warpgroup, and their sum against that at launch. Epilogue: instructions that a
thread of a consumer warpgroup issues to pack a CTA tile, counted in what the
lane program emits, at an active share of {ACTIVE_SHARE:.2%} (30 of 5632). Main
loop: clocks of the tensor cores for the tile, tile_m · tile_n · K / 2048, at
4096 dense bfloat16 FLOP a clock. Share: consumers · epilogue / main loop, the
issue slots of a scheduler that packing takes, if nothing overlapped. Per row:
PTX instructions that a thread issues in a step, over the rows gathered in it.
In flight: bytes of the rows that the blocks of a multiprocessor load in a step.
"""

_LAYER = f"""\
## What a gated layer runs

| pass | kernels |
|---|---|
| inference | gate_pack; gathered_up_down: u and Y of one sweep over a token |
| training, forward | gate_pack: P; sddmm: R, kept with P; gathered_down: Y |
| training, backward, by neuron | sddmm_spmm: dT and dWd, of one gather of dY;\
 spmm_two_values: dWu and dWg, of one gather of x |
| training, backward, by token | spmm_two_matrices: dX |

Six gathered rows an entry in training: forward one of Wu and one of Wd,
backward one of dY, one of x, one of Wu and one of Wg. Each kernel that makes a
sum can add to one it is given (+ y0), as that of hot neurons. Kernels of
training are compiled from {MIN_TRAINING_TOKENS} tokens on.
"""


class Miss(NamedTuple):
  """A kernel that does not meet a limit."""

  limit: str
  row: Row
  what: str

  @property
  def is_excused(self) -> bool:
    """Whether it does not decide the exit status."""
    return self.limit == "epilogue" and self.row.shape.k < EPILOGUE_LIMIT_FROM_K

  def __str__(self) -> str:
    """One line."""
    return f"{self.limit}: {self.row.kernel} at {self.row.shape}: {self.what}"


def find_misses(row: Row) -> Iterator[Miss]:
  """The limits that a kernel does not meet."""
  stats = row.stats
  if stats.spill_bytes:
    yield Miss("spills", row, f"{stats.spill_bytes} bytes")
  if stats.shared_memory_bytes > SHARED_MEMORY_BYTES:
    yield Miss("shared_memory", row, f"{stats.shared_memory_bytes} bytes")
  for note in stats.notes:
    if re.search("wgmma.*serializ", note):
      yield Miss("wgmma_notes", row, note)
  if isinstance(row, GatePackRow):
    if not row.wgmma or not row.tma:
      yield Miss("instructions", row, f"{row.wgmma} wgmma, {row.tma} TMA")
    if sum(row.registers_of_warpgroups) > row.registers_launched:
      yield Miss("redistribution", row, _redistribution(row))
    if row.epilogue_share > MAX_EPILOGUE_SHARE:
      yield Miss("epilogue", row, f"{row.epilogue_share:.1%}")
  if isinstance(row, GatheredRow):
    if row.padded_k % (4 * rows.WIDTH_MULTIPLE) == 0 and row.load_bytes < 16:
      yield Miss("instructions", row, f"loads of {row.load_bytes} bytes")
    if stats.registers > MAX_GATHERED_REGISTERS:
      yield Miss("gathered_registers", row, f"{stats.registers}")


def _redistribution(row: GatePackRow) -> str:
  registers = row.registers_of_warpgroups
  terms = " + ".join(map(str, registers))
  return f"{terms} = {sum(registers)} of {row.registers_launched}"


def summary(report: Sequence[Row]) -> dict[str, Any]:
  """The report in a few figures: the worst of all kernels and shapes."""
  misses = [miss for row in report for miss in find_misses(row)]
  packs = [row for row in report if isinstance(row, GatePackRow)]
  shares: dict[int, float] = {}
  for row in packs:
    shares[row.shape.k] = max(
      shares.get(row.shape.k, 0.0), round(row.epilogue_share, 4)
    )
  missed = {miss.limit for miss in misses}
  return {
    "spills_total": sum(row.stats.spill_bytes for row in report),
    "epilogue_share": max(shares.values()),
    "epilogue_share_at_k": {str(k): shares[k] for k in sorted(shares)},
    "max_registers": {
      "gate_pack": max(row.stats.registers for row in packs),
      "gathered": _max_registers(report, of_training=False),
      "of_training": _max_registers(report, of_training=True),
    },
    "max_shared_memory_bytes": max(
      row.stats.shared_memory_bytes for row in report
    ),
    "within_limits": {limit: limit not in missed for limit in LIMITS},
    "misses": [str(miss) for miss in misses],
    "shapes": len({row.shape for row in report}),
    "kernels": len(report),
  }


def _max_registers(report: Sequence[Row], *, of_training: bool) -> int | None:
  """Of the gathered kernels of either kind; None if there are none."""
  return max(
    (
      row.stats.registers
      for row in report
      if isinstance(row, GatheredRow) and row.of_training == of_training
    ),
    default=None,
  )


def markdown(report: Sequence[Row]) -> list[str]:
  """Tables, what is in them, and the limits."""
  misses = [miss for row in report for miss in find_misses(row)]
  return [
    "# Every kernel, compiled for an H200",
    "",
    "## gate_pack",
    "",
    "| tokens x d_model x d_ff | tile, TwELL, stages, cluster | registers |"
    " spills | KiB | wgmma | TMA | redistribution | epilogue | main loop |"
    " share |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
    *(_gate_pack_line(row) for row in report if isinstance(row, GatePackRow)),
    "",
    "## Gathered products",
    "",
    *_gathered_table(report, of_training=False),
    "",
    "## Gathered products of training",
    "",
    *_gathered_table(report, of_training=True),
    "",
    _EXPLANATION,
    _LAYER,
    "## Limits",
    "",
    "| limit | | missed by |",
    "|---|---|---|",
    *(
      f"| {limit} | {what} |"
      f" {sum(miss.limit == limit for miss in misses) or 'none'} |"
      for limit, what in LIMITS.items()
    ),
    "",
    *(f"- {miss}" for miss in misses),
    *([""] if misses else []),
    "## Notes of ptxas",
    "",
    *(_notes(report) or ["None."]),
    "",
  ]


def _gate_pack_line(row: GatePackRow) -> str:
  config = row.config
  tile = f"{row.rows_of_tile}x{config.tile_n}x{config.tile_k}"
  return (
    f"| {row.shape} | {tile}, {config.tile_width}/{config.slots},"
    f" {config.stages}, {config.cluster} | {_resources(row)} | {row.wgmma} |"
    f" {row.tma} | {_redistribution(row)} | {row.epilogue_instructions:.0f} |"
    f" {row.main_loop_clocks:.0f} | {row.epilogue_share:.1%} |"
  )


def _gathered_table(
  report: Sequence[Row], *, of_training: bool
) -> Iterator[str]:
  lines = [
    _gathered_line(row)
    for row in report
    if row.of_training == of_training and not isinstance(row, GatePackRow)
  ]
  if not lines:
    yield "None at these shapes."
    return
  yield (
    "| tokens x d_model x d_ff | kernel | rows a step, segment | registers |"
    " spills | KiB | load | per row | blocks per SM | in flight |"
  )
  yield "|---|---|---|---|---|---|---|---|---|---|"
  yield from lines


def _gathered_line(row: Row) -> str:
  begin = f"| {row.shape} | {row.kernel} |"
  if not isinstance(row, GatheredRow):
    return f"{begin} | {_resources(row)} | | | | |"
  config = row.config
  return (
    f"{begin} {config.rows_per_step}, {config.segment_length} |"
    f" {_resources(row)} | {row.load_bytes} B |"
    f" {row.instructions_per_row:.0f} | {row.blocks_per_sm} |"
    f" {row.bytes_in_flight // 1024} KiB |"
  )


def _resources(row: Row) -> str:
  stats = row.stats
  kibibytes = stats.shared_memory_bytes / 1024
  return f"{stats.registers} | {stats.spill_bytes} | {kibibytes:.1f}"


def _notes(report: Sequence[Row]) -> list[str]:
  """Each kind of note once, with how many kernels have it."""
  kinds: dict[str, set[str]] = {}
  for row in report:
    for note in row.stats.notes:
      # Lines and names of functions differ.
      kind = re.sub(
        r"line \d+", "line ...", note.removeprefix("ptxas info    : ")
      )
      kinds.setdefault(kind, set()).add(f"{row.kernel} at {row.shape}")
  return [f"- {kind} ({len(where)} times)" for kind, where in kinds.items()]


def _describe() -> dict[str, Any]:
  """Where it was compiled, and by what."""
  where = environment.describe()
  compiler = "jax-cuda13-plugin"
  where["versions"][compiler] = metadata.version(compiler)
  return where


def run(shapes: Sequence[Shape], output: str | None) -> int:
  """Compiles, prints and writes; returns the exit status."""
  report: list[Row] = []
  for shape in shapes:
    print(f"compiling at {shape}", file=sys.stderr, flush=True)
    report += compile_kernels(shape)
  where, figures = _describe(), summary(report)
  command = "python -m experiments.kernel_report"
  if shapes != SHAPES:
    command += f" --shapes={','.join(map(str, shapes))}"
  if output:
    command += f" --output={output}"
  lines = [
    *markdown(report),
    f"Compiled only, nothing was run: {environment.sentence(where)}",
    "",
    f"    {command}",
    "",
  ]
  print("\n".join(lines))
  if output:
    path = pathlib.Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    kernels = [row.as_json() for row in report]
    whole = {**figures, "kernels": kernels, "command": command, **where}
    path.with_suffix(".json").write_text(
      json.dumps(whole, indent=1) + "\n", encoding="utf-8"
    )
  print(json.dumps({**figures, **where}))
  misses = [miss for row in report for miss in find_misses(row)]
  return 0 if all(miss.is_excused for miss in misses) else 1


def main(arguments: Sequence[str] | None = None) -> int:
  """Reads the command line and runs."""
  parser = argparse.ArgumentParser(
    "kernel_report", description=__doc__.splitlines()[0], allow_abbrev=False
  )
  parser.add_argument("--output", help="Where to write, without suffix.")
  parser.add_argument(
    "--shapes",
    type=parse_shapes,
    default=SHAPES,
    help="tokens x d_model x d_ff, such as 16384x2048x5632,1x2048x5632;"
    " by default six of a published layer and others.",
  )
  options = parser.parse_args(arguments)
  # Nothing runs, and the plugin complains where there is no GPU.
  jax.config.update("jax_platforms", "cpu")
  try:
    aot.find_compiler()
    return run(options.shapes, options.output)
  except (ValueError, OSError) as error:
    parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
  sys.exit(main())
