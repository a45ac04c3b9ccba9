"""The steps of the mosaic implementation's training step, each by itself.

    forward    P in ELL ─► sddmm: U ─► gathered_down: y
    backward   P ─► lists of neurons ─► sddmm_spmm: dT, dWd
                                    └─► spmm_two_values: dWu, dWg
               P ─► spmm_two_matrices: dx

parts.py has the steps before P. What is elementwise between these, and values
moved between the two orders of entries, are in the op only
(twell_jax/ops/packed_products.py); so are dense tokens and hot neurons. A value
is as good as another where only time counts: those of P stand for all.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16

from experiments import gradient_kernels
from experiments.gradient_kernels import Operands
from experiments.on_gpu import inputs
from experiments.on_gpu.parts import Parts, Step
from pallas_kernels import gathered, target, tuning, work_list
from pallas_kernels.gather_config import GatherConfig
from pallas_kernels.gradient_config import Product
from twell_jax.formats import EllMatrix
from twell_jax.formats.transpose import NeuronLists, transpose_ell
from twell_jax.ops.gate import pack_by_kernel
from twell_jax.ops.mosaic_sizes import default_ell_width


def parts_of_training(
  x: BFloat16[Array, "tokens d_model"],
  layer: inputs.Layer,
  dy: BFloat16[Array, "tokens d_model"],
) -> Parts:
  """The steps for a gated layer of sizes that need no padding."""
  device = target.device_of(x)
  (tokens, d_model), d_ff = x.shape, layer.gate.shape[0]
  sizes = tokens, d_ff, d_model, default_ell_width(d_ff)
  configs = {
    product.value: tuning.for_gradient(device, product, *sizes)
    for product in Product
  }
  configs["gathered_down"] = tuning.for_gathered(device, *sizes, matrices=1)
  entries = _entries(x, layer.gate)
  by_token = _work_step(entries, Product.SDDMM, configs["sddmm"])
  by_neuron = _work_step(entries, Product.SDDMM_SPMM, configs["sddmm_spmm"])
  steps = {
    "work list of tokens": by_token,
    "lists of neurons": Step(_transpose, (entries.ell,)),
    "work list of neurons": by_neuron,
    "gathered_down": _down_step(entries, layer.down, configs["gathered_down"]),
  }
  matrices = {
    Product.SDDMM: (x, layer.up),
    Product.SDDMM_SPMM: (layer.down, dy),
    Product.SPMM_TWO_MATRICES: (layer.up, layer.gate),
    Product.SPMM_TWO_VALUES: (x,),
  }
  for product, operands in matrices.items():
    name = product.value
    steps[name] = _product_step(entries, product, operands, configs[name])
  return Parts(
    steps=steps,
    active_of_a_token=jnp.mean(entries.ell.stored).item(),
    configs={
      name: dataclasses.asdict(config) for name, config in configs.items()
    },
  )


class _Entries(NamedTuple):
  """P by token and by neuron."""

  ell: EllMatrix
  lists: NeuronLists


_transpose = jax.jit(transpose_ell)


@jax.jit
def _entries(x, gate):
  d_ff, d_model = gate.shape
  device = target.device_of(x)
  config = tuning.for_gate_pack(device, x.shape[0], d_ff, d_model)
  twell = pack_by_kernel(x, gate, config=config, device=device)
  ell = EllMatrix.from_twell(twell, width=default_ell_width(d_ff))
  return _Entries(ell, transpose_ell(ell))


def _work_step(
  entries: _Entries, product: Product, config: GatherConfig
) -> Step:
  """Makes the work list of a kernel."""
  tokens, width = entries.ell.columns.shape
  length = config.segment_length
  if not product.is_by_neuron:
    by_token = functools.partial(work_list.of_ell, width=width, length=length)
    return Step(jax.jit(by_token), (entries.ell.stored,))
  lists = gradient_kernels.lists_of(
    product, tokens=tokens, neurons=entries.ell.d_ff, width=width
  )
  by_neuron = functools.partial(gradient_kernels.work_of, lists, length=length)
  return Step(jax.jit(by_neuron), (entries.lists.starts, entries.lists.counts))


def _down_step(
  entries: _Entries,
  down: BFloat16[Array, "d_ff d_model"],
  config: GatherConfig,
) -> Step:
  ell = entries.ell
  tokens, width = ell.columns.shape

  @jax.jit
  def gather(down, columns, values, work):
    return gathered.gathered_down(
      down,
      m=tokens,
      columns=columns,
      values=values,
      work=work,
      config=config,
      interpret=target.interpret_params(),
    )

  work = work_list.of_ell(ell.stored, width=width, length=config.segment_length)
  values = ell.values.astype(jnp.float32).reshape(-1)
  arguments = (down, ell.columns.reshape(-1), values, work)
  return Step(gather, arguments, gathers=1)


def _product_step(
  entries: _Entries,
  product: Product,
  matrices: tuple[BFloat16[Array, "_ d_model"], ...],
  config: GatherConfig,
) -> Step:
  """A kernel of training, on its own kind of lists."""
  ell, lists = entries
  values = ell.values.astype(jnp.float32)
  if product.is_by_neuron:
    columns, values = lists.tokens, lists.from_ell(values)
  else:
    columns, values = ell.columns.reshape(-1), values.reshape(-1)
  make_work, counts = _work_step(entries, product, config)[:2]
  kind = gradient_kernels.KINDS[product]
  operands = Operands(
    matrices, columns, (values,) * kind.values, make_work(*counts)
  )
  call = functools.partial(
    gradient_kernels.call,
    product,
    rows=ell.d_ff if product.is_by_neuron else ell.columns.shape[0],
    config=config,
    dtype=jnp.float32,
  )
  return Step(jax.jit(call), (operands,), gathers=kind.gathered)
