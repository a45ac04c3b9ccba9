r"""Peak memory of a training step on H200s, dense against sparse, without one.

    python -m experiments.memory_report --size=1p5b --devices=8 \
        --remat=attention --cross_entropy=chunked

Compiles the real step (model, optimizer, one micro-batch, bfloat16 computation
with float32 parameters, FSDP over the devices) and prints what XLA's buffer
assignment says of one device:

    arguments     what the step is given and gives back in the same memory:
                  parameters, the optimizer's moments, the batch
    temporaries   all else at the peak; of these, by the shapes in their slots,
      kept          activations of all layers, from the forward to the backward
                    pass
      gradients     of the parameters of all layers

A slot holds several arrays, one after the other, and is counted with what it
keeps longest. "FFN keeps" is what the layer's own backward pass asks for, from
its shapes: the dense baseline keeps what autodiff asks for and has no figure.

The dense side is --dense: "silu", the baseline by autodiff, or "reference", the
ReLU layer that keeps nothing but z and u. The sparse side is --implementation.

Only sizes are computed here, nothing is run, and nothing is said about time. It
needs the CUDA compiler (`make setup-aot`), but no GPU; cuDNN's and cuBLAS'
workspaces are not counted. The last line is JSON.
"""

import argparse
import collections
import json
import math
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from experiments import environment
from pallas_kernels import aot
from twell_jax import nn, training
from twell_jax.nn.config import CROSS_ENTROPIES, REMAT_POLICIES
from twell_jax.ops import IMPLEMENTATIONS
from twell_jax.training.sharding import MESH_AXES, batch_sharding

DENSE = ("silu", "reference")
_GIBIBYTE = 2**30


class Memory(NamedTuple):
  """Bytes of one device.

  Attributes:
    peak: The most at any time.
    parameters: As stored.
    optimizer: The optimizer's state.
    temporaries: What the peak has beyond the arguments.
    kept: Of the temporaries, activations of all layers.
    gradients: Of the temporaries, gradients of all layers' parameters.
    ffn_keeps: What the FFNs keep for their backward passes.
  """

  peak: int
  parameters: int
  optimizer: int
  temporaries: int
  kept: int
  gradients: int
  ffn_keeps: int | None


def measure(
  config: nn.TransformerConfig,
  *,
  devices: int,
  tokens_per_device: int,
  seq_len: int,
) -> Memory:
  """Compiles the training step of a model and reads its memory.

  Args:
    config: The model.
    devices: H200s over which parameters and sequences are cut.
    tokens_per_device: Of a step.
    seq_len: Tokens of a sequence.

  Raises:
    ValueError: A number below 1, sequences that do not fill tokens_per_device,
      a size that the devices do not divide, or the compiler is not installed.
  """
  for name, value in (
    ("devices", devices),
    ("tokens_per_device", tokens_per_device),
    ("seq_len", seq_len),
  ):
    if value < 1:
      raise ValueError(f"{name} = {value} must be at least 1")
  if tokens_per_device % seq_len:
    raise ValueError(
      f"tokens_per_device = {tokens_per_device} is no multiple of seq_len ="
      f" {seq_len}: change one of them"
    )
  mesh = aot.h200_mesh((1, devices, 1), MESH_AXES)
  model = training.abstract_model(config, nn.Partitioning(mesh))
  # The schedule's lengths are part of the program, but not of its memory.
  options = training.OptimizerOptions()
  steps = options.warmup_steps + 1
  optimizer = training.make_optimizer(options, steps=steps)
  step = training.make_train_step(
    model,
    optimizer,
    learning_rate=training.learning_rate_schedule(options, steps=steps),
    l1_coefficient=training.l1_schedule(training.L1Options(coefficient=1.0)),
  )
  state = training.abstract_state(model, optimizer)
  sequences = tokens_per_device // seq_len
  shape = (devices * sequences, seq_len)
  sharding = batch_sharding(model.partitioning)
  batch = {
    name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    for name, dtype in (
      ("inputs", jnp.int32),
      ("targets", jnp.int32),
      ("weights", jnp.float32),
    )
  }
  with tempfile.TemporaryDirectory() as folder, aot.no_persistent_cache():
    # Its declared type is that of what it computes.
    compiled = (
      cast(jax.stages.Wrapped, step)
      .lower(state, batch)
      .compile(
        compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
      )
    )
    slots = _read_slots(pathlib.Path(folder))
  analysis = compiled.memory_analysis()
  assert analysis is not None  # XLA:GPU has one
  stacked = _stacked(slots, config.num_layers, (sequences, tokens_per_device))
  return Memory(
    peak=analysis.peak_memory_in_bytes,
    parameters=_bytes_of_device(state.params),
    optimizer=_bytes_of_device(state.opt_state),
    temporaries=(
      analysis.peak_memory_in_bytes - analysis.argument_size_in_bytes
    ),
    kept=stacked["kept"],
    gradients=stacked["gradients"],
    ffn_keeps=_ffn_keeps(config, tokens_per_device, mesh),
  )


class _Slot(NamedTuple):
  """A piece of the temporaries: its bytes, and all that it ever holds."""

  size: int
  shapes: tuple[tuple[str, tuple[int, ...]], ...]


_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# cumulative size; size; offset; number of values; count×dtype[shape], ...
_SLOT = re.compile(r"\s*[\d.]+\w+\(\s*\d+%\);\s*([\d.]+)(\w+);[^;]*;[^;]*;(.*)")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def _read_slots(folder: pathlib.Path) -> list[_Slot]:
  """The slots of the largest allocation in XLA's report, the temporaries'."""
  reports = list(folder.glob("*jit_train_step*memory-usage-report.txt"))
  if len(reports) != 1:
    raise ValueError(
      f"the compiler wrote {len(reports)} memory reports of the step, not one:"
      " this jax writes them in another way"
    )
  allocations: list[list[_Slot]] = []
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
    allocations[-1].append(_Slot(round(size), shapes))
  return max(allocations, key=lambda slots: sum(slot.size for slot in slots))


def _stacked(
  slots: Sequence[_Slot], layers: int, tokens: tuple[int, int]
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
      found["kept"] += slot.size
    elif any(dtype == "f32" and len(shape) > 2 for dtype, shape in ranks):
      found["gradients"] += slot.size
  return found


def _bytes_of_device(tree: PyTree[jax.ShapeDtypeStruct]) -> int:
  """Bytes of one device's shards."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def _ffn_keeps(
  config: nn.TransformerConfig, tokens: int, mesh: jax.sharding.Mesh
) -> int | None:
  """What the layer's implementation asks to be kept, for all layers."""
  if config.activation != "relu" or config.implementation is None:
    return None
  if config.remat == "layer":
    return 0
  implementation = IMPLEMENTATIONS[config.implementation]

  def kept(x, gate, up, down):
    return implementation.forward_with_residuals(
      x, gate, up, down, hot_neurons=config.hot_neurons
    ).kept

  dtype = jnp.dtype(config.dtype)
  everywhere = jax.NamedSharding(mesh, jax.P())
  x = jax.ShapeDtypeStruct((tokens, config.d_model), dtype, sharding=everywhere)
  matrix = jax.ShapeDtypeStruct(
    (config.d_ff, config.d_model), dtype, sharding=everywhere
  )
  up = matrix if config.gated else None
  leaves = jax.tree.leaves(jax.eval_shape(kept, x, matrix, up, matrix))
  return config.num_layers * sum(
    leaf.size * leaf.dtype.itemsize for leaf in leaves
  )


def table(sides: dict[str, Memory]) -> list[str]:
  """A line for each figure, a column for each side."""

  def cell(value: int | None) -> str:
    return "" if value is None else f"{value / _GIBIBYTE:.2f}"

  names = {
    "peak": "peak",
    "parameters": "parameters",
    "optimizer": "optimizer",
    "temporaries": "temporaries",
    "kept": "  kept",
    "gradients": "  gradients",
    "ffn_keeps": "FFN keeps",
  }
  rows = [["GiB per device", *sides]]
  for field, name in names.items():
    cells = [cell(getattr(memory, field)) for memory in sides.values()]
    rows.append([name, *cells])
  width = max(len(cell) for row in rows for cell in row[1:])
  return [
    row[0].ljust(14) + "".join(cell.rjust(width + 2) for cell in row[1:])
    for row in rows
  ]


def run(options: argparse.Namespace) -> int:
  """Compiles both sides and prints; returns the exit status."""
  overrides: dict[str, Any] = {
    "remat": options.remat,
    "cross_entropy": options.cross_entropy,
    "cross_entropy_chunk": options.cross_entropy_chunk,
  }
  if options.layers is not None:
    overrides["num_layers"] = options.layers
  dense: dict[str, Any] = (
    {"activation": "silu"}
    if options.dense == "silu"
    else {"implementation": options.dense}
  )
  sparse = {"implementation": options.implementation}
  sides = {}
  for name, choice in (
    (f"dense ({options.dense})", dense),
    (f"sparse ({options.implementation})", sparse),
  ):
    config = nn.paper_config(options.size, **overrides, **choice)
    print(f"compiling {name}", file=sys.stderr, flush=True)
    sides[name] = measure(
      config,
      devices=options.devices,
      tokens_per_device=options.tokens_per_device,
      seq_len=options.seq_len,
    )
  print("\n".join(table(sides)))
  dense_memory, sparse_memory = sides.values()
  compiler = "jax-cuda13-plugin"
  where = environment.describe()
  where["versions"][compiler] = metadata.version(compiler)
  figures = {
    "dense_peak_bytes": dense_memory.peak,
    "sparse_peak_bytes": sparse_memory.peak,
    "ratio": round(sparse_memory.peak / dense_memory.peak, 4),
    "dense": dense_memory._asdict(),
    "sparse": sparse_memory._asdict(),
    "options": vars(options),
    **where,
  }
  print(json.dumps(figures))
  return 0


def main(arguments: Sequence[str] | None = None) -> int:
  """Reads the command line and runs."""
  parser = argparse.ArgumentParser(
    "memory_report", description=__doc__.splitlines()[0], allow_abbrev=False
  )
  parser.add_argument("--size", choices=tuple(nn.PAPER_SIZES), required=True)
  parser.add_argument("--devices", type=int, default=8)
  parser.add_argument("--tokens_per_device", type=int, default=16384)
  parser.add_argument("--seq_len", type=int, default=2048)
  parser.add_argument("--remat", choices=REMAT_POLICIES, default="none")
  parser.add_argument(
    "--cross_entropy", choices=CROSS_ENTROPIES, default="full"
  )
  parser.add_argument("--cross_entropy_chunk", type=int, default=2048)
  parser.add_argument("--dense", choices=DENSE, default="silu")
  parser.add_argument(
    "--implementation", choices=tuple(IMPLEMENTATIONS), default="mosaic"
  )
  parser.add_argument(
    "--layers", type=int, help="Instead of the size's own, for a quick look."
  )
  options = parser.parse_args(arguments)
  # Nothing runs, and the plugin complains where there is no GPU.
  jax.config.update("jax_platforms", "cpu")
  try:
    aot.find_compiler()
    return run(options)
  except ValueError as error:
    parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
  sys.exit(main())
