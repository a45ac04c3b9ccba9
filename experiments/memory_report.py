"""Peak memory of a training step on H200s, dense against sparse, without one.

    python -m experiments.memory_report --size=1p5b --remat=attention

Compiles the real step (model, optimizer, one micro-batch, bfloat16 computation
with float32 parameters) for the devices of --mesh=DATAxFSDPxTENSOR and prints
what XLA's buffer assignment says of one device:

    arguments     what the step is given and gives back in the same memory:
                  parameters, the optimizer's moments, the batch
    temporaries   all else at the peak; of these, by the shapes in their slots,
      residuals     activations of all layers, kept from the forward to the
                    backward pass
      gradients     of the parameters of all layers

A slot holds several arrays, one after the other, and is counted with what it
keeps longest. "FFN residuals" are those of all FFNs besides their inputs and
parameters: what autodiff of the layer alone, under the policy of --remat, asks
to be kept.

The sparse side is --implementation. The dense side is --dense:

    silu            the baseline, by autodiff
    silu_recompute  the baseline, which keeps nothing but the FFN's input and
                    multiplies by gate and up again in the backward pass
    reference       the ReLU layer, whose own backward pass needs only z and u

Both have the same --remat, --attention and --cross_entropy.

Then come the collectives of each side, by kind and mesh axes: how many run in a
step, the bytes that a device sends for them (collectives.py), and whether the
peak fits the GPUs in DEVICES.

Only sizes are computed here, nothing is run, and nothing is said about time. It
needs the CUDA compiler (`make setup-aot`), but no GPU; cuDNN's and cuBLAS'
workspaces are not counted. The last line is JSON.
"""

import argparse
import collections
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from experiments import collectives, environment, memory_slots
from pallas_kernels import aot
from twell_jax import nn, training
from twell_jax.nn.config import ATTENTIONS, CROSS_ENTROPIES, REMAT_POLICIES
from twell_jax.nn.transformer import remat_policy
from twell_jax.ops import IMPLEMENTATIONS
from twell_jax.training.sharding import MESH_AXES, batch_sharding

# Fields of `TransformerConfig` by name of the dense layer.
DENSE: Mapping[str, dict[str, Any]] = MappingProxyType(
  {
    "silu": {"activation": "silu"},
    "silu_recompute": {"activation": "silu", "ffn_residuals": "recomputed"},
    "reference": {"implementation": "reference"},
  }
)
# Bytes of a device's memory, by name, as sold.
DEVICES = MappingProxyType({"H100, 80 GB": 80e9, "H200, 141 GB": 141e9})
# The share of it that a step may take: XLA_PYTHON_CLIENT_MEM_FRACTION=0.9. What
# remains is for CUDA, NCCL's buffers and the libraries' workspaces.
USABLE = 0.9
_GIBIBYTE = 2**30


class Memory(NamedTuple):
  """Bytes of one device.

  Attributes:
    peak: The most at any time.
    parameters: As stored.
    optimizer: The optimizer's state.
    temporaries: What the peak has beyond the arguments.
    residuals: Of the temporaries, activations of all layers.
    gradients: Of the temporaries, gradients of all layers' parameters.
    ffn_residuals: What the FFNs keep for their backward passes besides their
      inputs and parameters.
  """

  peak: int
  parameters: int
  optimizer: int
  temporaries: int
  residuals: int
  gradients: int
  ffn_residuals: int


class Step(NamedTuple):
  """What is known of a compiled training step.

  Attributes:
    memory: Of one device.
    collectives: What a device runs, in order.
  """

  memory: Memory
  collectives: list[collectives.Collective]


def measure(
  config: nn.TransformerConfig,
  *,
  mesh_shape: tuple[int, int, int],
  tokens_per_device: int,
  seq_len: int,
) -> Step:
  """Compiles the training step of a model; reads memory and collectives.

  Args:
    config: The model.
    mesh_shape: H200s along data, fsdp and tensor.
    tokens_per_device: Of a step. The devices along tensor have the same ones.
    seq_len: Tokens of a sequence.

  Raises:
    ValueError: A number below 1, sequences that do not fill tokens_per_device,
      a size that the devices do not divide, or the compiler is not installed.
  """
  for name, value in (
    *zip(MESH_AXES, mesh_shape, strict=True),
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
  mesh = aot.h200_mesh(mesh_shape, MESH_AXES)
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
  data, fsdp, _ = mesh_shape
  shape = (data * fsdp * sequences, seq_len)
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
    slots = memory_slots.read(pathlib.Path(folder))
  analysis = compiled.memory_analysis()
  assert analysis is not None  # XLA:GPU has one
  stacked = memory_slots.stacked(
    slots, layers=config.num_layers, tokens=(sequences, tokens_per_device)
  )
  memory = Memory(
    peak=analysis.peak_memory_in_bytes,
    parameters=_bytes_of_device(state.params),
    optimizer=_bytes_of_device(state.opt_state),
    temporaries=(
      analysis.peak_memory_in_bytes - analysis.argument_size_in_bytes
    ),
    residuals=stacked["residuals"],
    gradients=stacked["gradients"],
    ffn_residuals=config.num_layers
    * _ffn_residuals(config, tokens_per_device, mesh),
  )
  text = compiled.as_text()
  assert text is not None  # XLA:GPU has one
  return Step(memory, collectives.read(text, mesh=dict(mesh.shape)))


def _bytes_of_device(tree: PyTree[jax.ShapeDtypeStruct]) -> int:
  """Bytes of one device's shards."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def _ffn_residuals(
  config: nn.TransformerConfig, tokens: int, mesh: jax.sharding.Mesh
) -> int:
  """Bytes that a device keeps of one FFN, for its tokens and neurons."""

  def layer() -> nn.SparseFFN:
    return nn.SparseFFN(
      config.d_model,
      config.d_ff // mesh.shape["tensor"],
      gated=config.gated,
      activation=config.activation,
      implementation=config.implementation,
      **config.choices._asdict(),
      dtype=jnp.dtype(config.dtype),
      param_dtype=jnp.dtype(config.dtype),
      rngs=nnx.Rngs(0),
    )

  graphdef, params = nnx.split(nnx.eval_shape(layer))

  def run(params, x):
    return nnx.merge(graphdef, params)(x)

  if config.remat != "none" or config.ffn_residuals == "recomputed":
    run = jax.checkpoint(run, policy=remat_policy(config))
  # On the mesh, for which the kernels are chosen.
  everywhere = jax.NamedSharding(mesh, jax.P())
  inputs = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, jnp.dtype(config.dtype), sharding=everywhere
    ),
    (params, jax.ShapeDtypeStruct((tokens, config.d_model), jnp.float32)),
  )
  kept = jax.eval_shape(lambda *inputs: jax.vjp(run, *inputs)[1], *inputs)
  shapes_of_inputs = {leaf.shape for leaf in jax.tree.leaves(inputs)}
  return sum(
    leaf.size * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(kept)
    if leaf.shape not in shapes_of_inputs
  )


def table(sides: dict[str, Memory]) -> list[str]:
  """A line for each figure, a column for each side."""
  names = {
    "peak": "peak",
    "parameters": "parameters",
    "optimizer": "optimizer",
    "temporaries": "temporaries",
    "residuals": "  residuals",
    "gradients": "  gradients",
    "ffn_residuals": "FFN residuals",
  }
  rows = [["GiB per device", *sides]]
  for field, name in names.items():
    cells = [
      f"{getattr(memory, field) / _GIBIBYTE:.2f}" for memory in sides.values()
    ]
    rows.append([name, *cells])
  width = max(len(cell) for row in rows for cell in row[1:])
  return [
    row[0].ljust(14) + "".join(cell.rjust(width + 2) for cell in row[1:])
    for row in rows
  ]


def fits(peak_bytes: int) -> dict[str, bool]:
  """Whether a step with this peak runs on each of `DEVICES`."""
  return {name: peak_bytes <= USABLE * size for name, size in DEVICES.items()}


def _traffic(step: Step) -> list[str]:
  """A line for each kind and axes, and one for the devices that it fits."""
  runs: collections.Counter[tuple[str, str]] = collections.Counter()
  for found in step.collectives:
    runs[found.kind, "+".join(found.axes)] += found.runs or 0
  lines = [
    f"  {kind} over {axes}: {runs[kind, axes]} runs,"
    f" {sent / _GIBIBYTE:.3f} GiB sent"
    for (kind, axes), sent in collectives.total_bytes(step.collectives).items()
  ]
  fitting = [name for name, fit in fits(step.memory.peak).items() if fit]
  return [
    *(lines or ["  no collectives"]),
    f"  fits: {'; '.join(fitting) or 'none'}",
  ]


def parse_mesh(text: str) -> tuple[int, int, int]:
  """(data, fsdp, tensor) of a text such as "1x8x1"."""
  sizes = text.split("x")
  if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
    raise ValueError(
      f"mesh {text!r} must be three numbers, DATAxFSDPxTENSOR, such as 1x8x1"
    )
  data, fsdp, tensor = map(int, sizes)
  return data, fsdp, tensor


def run(options: argparse.Namespace) -> int:
  """Compiles both sides and prints; returns the exit status."""
  overrides: dict[str, Any] = {
    "remat": options.remat,
    "attention": options.attention,
    "cross_entropy": options.cross_entropy,
    "cross_entropy_chunk": options.cross_entropy_chunk,
  }
  if options.layers is not None:
    overrides["num_layers"] = options.layers
  sparse = {"implementation": options.implementation}
  sides = {}
  for name, choice in (
    (f"dense ({options.dense})", DENSE[options.dense]),
    (f"sparse ({options.implementation})", sparse),
  ):
    config = nn.paper_config(options.size, **(overrides | choice))
    print(f"compiling {name}", file=sys.stderr, flush=True)
    sides[name] = measure(
      config,
      mesh_shape=parse_mesh(options.mesh),
      tokens_per_device=options.tokens_per_device,
      seq_len=options.seq_len,
    )
  memories = {name: step.memory for name, step in sides.items()}
  print("\n".join(table(memories)))
  for name, step in sides.items():
    print("\n".join([name, *_traffic(step)]))
  dense_memory, sparse_memory = memories.values()
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
  parser.add_argument(
    "--mesh", default="1x8x1", help="Devices, as DATAxFSDPxTENSOR."
  )
  parser.add_argument("--tokens_per_device", type=int, default=16384)
  parser.add_argument("--seq_len", type=int, default=2048)
  parser.add_argument("--remat", choices=REMAT_POLICIES, default="none")
  parser.add_argument("--attention", choices=ATTENTIONS, default="cudnn")
  parser.add_argument(
    "--cross_entropy", choices=CROSS_ENTROPIES, default="chunked"
  )
  parser.add_argument("--cross_entropy_chunk", type=int, default=2048)
  parser.add_argument("--dense", choices=tuple(DENSE), default="silu")
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
