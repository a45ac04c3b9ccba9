r"""Checks the kernels on an H200 and times the layer against the dense one.

    python -m experiments.gpu_check --output=FILE.json [--minutes=8]

It needs jax, flax, numpy and this checkout on PYTHONPATH, and one Hopper GPU.
`--dry` interprets the kernels on CPU, at tiny sizes, to show that the program
works; its times mean nothing, and it gives no ratios.

Checks come first: every kernel, and the whole layer with its gradients, on
fresh random and on adversarial inputs, against float32 XLA. Then medians: the
dense layer, rows gathered for all neurons, and hot/cold; for a forward pass,
for a forward and a backward pass ("training of"), and for decoding, by activity
and distribution of firing rates, and the parts of the passes. The most
important ones are made first; when the minutes are spent, what is left is
listed, and --only runs it. A stage that raises, hangs or takes its process with
it is recorded by name, and the others go on.

The file is written after each stage:

    dry         whether the times mean nothing
    seed        of all numbers
    command, minutes
    device      kind, multiprocessors, memory_bytes, driver, platform_version
                (CUDA's), versions, date, revision
    stages      in the order of running, each with name, status and seconds
      a check     status PASS or FAIL; error, its limit, same_bits_twice, and
                  what else the check found. For gate_pack the error is a number
                  of wrong numbers, for the gathered kernels the largest error
                  over what rounding explains, for the op the rms of the error
                  over that of y, for its gradients the largest ratio of an
                  array's error to its limit
      a timing    status DONE, or FAIL if the results of contenders differ;
                  tokens, active, rates (as asked for); active_of_a_token (as
                  measured); hot_neurons and hot_share (of activations);
                  gathered_of_a_token and overflowed tokens, of row-gathered
                  and of hot/cold; differences (rms from the dense y, and of
                  training by array); configs of kernels;
                  contenders, each by name with
                    median_ms and quartiles_ms of a call; layers of a call and
                    ms_per_layer; tflop_per_s of dense products; and
                    gathered_tb_per_s, the bytes of gathered rows over the time
                    of the whole call; ratio_to_dense, the time of the fastest
                    dense contender over its own (null in a dry run), in the
                    parts of training that of one dense product of nine;
                    kernels, instructions of the program that are launched;
                    temporary_bytes, what it needs beside its arguments and
                    results
      any         status ERROR (it raised), HUNG or DIED (its process did), and
                  a message
    targets     stage, contender, at_least; measured, and a verdict: met,
                missed, not measured
    left_out    names of stages without a result
    summary     what the last line says

The exit code is 0 if every check that ran passed, 1 if not, 2 if nothing ran.
"""

import argparse
import json
import pathlib
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.on_gpu import plan
from experiments.on_gpu.supervisor import (
  Budget,
  Record,
  RefusedError,
  supervise,
)

_WORKER = (sys.executable, "-m", "experiments.on_gpu.worker")
_GOOD = ("PASS", "DONE")


def main(
  arguments: Sequence[str] | None = None,
  *,
  worker: Sequence[str] = _WORKER,
) -> int:
  """Runs all stages and prints what came out.

  Args:
    arguments: Of the command line; sys.argv's by default.
    worker: The command that runs the stages.
  """
  options = _parser().parse_args(arguments)
  begins = time.time()
  record = Record(
    pathlib.Path(options.output),
    {
      "dry": options.dry,
      "seed": options.seed,
      "command": "python -m experiments.gpu_check "
      + " ".join(sys.argv[1:] if arguments is None else arguments),
      "minutes": options.minutes,
    },
  )

  def report(name: str, result: Mapping[str, Any]) -> None:
    print(_line(name, result, time.time() - begins), flush=True)

  try:
    record.write()
    supervise(
      worker,
      {"is_dry": options.dry, "seed": options.seed, "only": options.only},
      record=record,
      budget=Budget(begins, begins + 60 * options.minutes),
      on_result=report,
    )
  except RefusedError as error:
    return _report(f"{error}. --dry shows there that this program works")
  except (RuntimeError, OSError) as error:
    return _report(str(error))
  targets = [] if options.dry else plan.verdicts(record.stages)
  summary = _summary(record, targets, seconds=time.time() - begins)
  record.write({"targets": targets, "summary": summary})
  print()
  print(_tables(record, targets, is_dry=options.dry))
  print(json.dumps(summary))
  return 0 if summary["failed"] == [] and record.stages else 1


def _report(message: str) -> int:
  print("error:", " ".join(message.split()), file=sys.stderr)
  return 2


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="gpu_check", description=(__doc__ or "").splitlines()[0]
  )
  parser.add_argument(
    "--output", required=True, metavar="FILE", help="where results go, as JSON"
  )
  parser.add_argument(
    "--minutes", type=_positive, default=8.0, help="when to stop; 8 by default"
  )
  parser.add_argument(
    "--dry", action="store_true", help="interpret tiny kernels, on CPU"
  )
  parser.add_argument(
    "--only",
    action="append",
    default=[],
    metavar="PART",
    help="run stages whose name contains PART; may be given several times",
  )
  parser.add_argument(
    "--seed",
    type=int,
    default=secrets.randbelow(2**31),
    help="of the numbers; a new one in each run by default",
  )
  return parser


def _positive(text: str) -> float:
  value = float(text)
  if not value > 0:
    raise argparse.ArgumentTypeError(f"{text} must be above 0")
  return value


def _line(name: str, result: Mapping[str, Any], seconds: float) -> str:
  """A stage's result as it is printed when it ends."""
  status = result["status"]
  if "message" in result:
    detail = result["message"]
  elif "contenders" in result:
    detail = ", ".join(
      f"{contender} {figures['median_ms']:.4g} ms"
      for contender, figures in result["contenders"].items()
    )
  else:
    detail = f"error {result['error']:.3g}, limit {result['limit']:.3g}"
    if not result["same_bits_twice"]:
      detail += ", other bits the second time"
  return f"{seconds:6.1f} s  {status:5} {name}: {detail}"


def _summary(
  record: Record, targets: Sequence[Mapping[str, Any]], *, seconds: float
) -> dict[str, Any]:
  statuses = Counter(result["status"] for result in record.stages.values())
  return {
    "device": record.device.get("device"),
    "seconds": round(seconds, 1),
    "statuses": dict(statuses),
    "failed": [
      name
      for name, result in record.stages.items()
      if result["status"] not in _GOOD
    ],
    "left_out": len(record.left_out),
    "targets": {
      f"{target['contender']}, {target['stage']}": target["measured"]
      and round(target["measured"], 3)
      for target in targets
    },
    "targets_missed": sum(target["verdict"] == "missed" for target in targets),
  }


def _tables(
  record: Record, targets: Sequence[Mapping[str, Any]], *, is_dry: bool
) -> str:
  """Times, what went wrong, what was left out, and the targets."""
  lines = [
    f"{'ms per layer':54}{'median':>10} {'quartiles':>22}{'TFLOP/s':>9}"
    f"{'TB/s':>7}{'ratio':>7}"
  ]
  for name, result in record.stages.items():
    if "contenders" not in result:
      continue
    lines.append(
      f"{name} ({result['active_of_a_token']:.1f} measured"
      + (f", {result['hot_neurons']} hot" if "hot_neurons" in result else "")
      + ")"
    )
    for contender, figures in result["contenders"].items():
      lines.append(_row(contender, figures))
  if is_dry:
    lines.append("These times are an interpreter's and mean nothing.")
  wrong = {
    name: result
    for name, result in record.stages.items()
    if result["status"] not in _GOOD
  }
  lines += ["", f"Not as it should be: {len(wrong)}"]
  lines += [
    _line(name, result, result["seconds"]) for name, result in wrong.items()
  ]
  lines += ["", f"Left out: {len(record.left_out)}", *record.left_out]
  if targets:
    lines += ["", f"{'target':70}{'at least':>9}{'measured':>10}"]
  for target in targets:
    measured = target["measured"]
    value = "" if measured is None else f"{measured:.2f}"
    lines.append(
      f"{target['contender'] + ', ' + target['stage']:70}"
      f"{target['at_least']:>9}{value:>10}  {target['verdict']}"
    )
  return "\n".join(lines)


def _row(contender: str, figures: Mapping[str, Any]) -> str:
  layers = figures["layers"]
  lower, upper = (value / layers for value in figures["quartiles_ms"])

  def optional(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"

  return (
    f"  {contender:52}{figures['ms_per_layer']:>10.4f}"
    f" {f'{lower:.4f} – {upper:.4f}':>22}"
    f"{optional(figures['tflop_per_s'], 0):>9}"
    f"{optional(figures['gathered_tb_per_s'], 2):>7}"
    f"{optional(figures['ratio_to_dense'], 2):>7}"
  )


if __name__ == "__main__":
  sys.exit(main())
