"""The steps of the mosaic implementation's forward pass, each by itself.

    gate_pack ─► TwELL ─► ELL and work list ─► gathered_up_down

The padding of odd shapes, the dense products of tokens that overflow and the
counts of who fired are in the op (twell_jax/ops/mosaic.py), not here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.on_gpu import inputs
from pallas_kernels import gate_pack, gathered, target, tuning, work_list
from twell_jax.formats import EllMatrix
from twell_jax.ops.gate import pack_by_kernel, pad_to_multiples
from twell_jax.ops.mosaic_sizes import default_ell_width


class Step(NamedTuple):
  """A jitted function, and its arguments.

  Attributes:
    function: Jitted.
    arguments: Of a call.
    gathers: Rows that it gathers for an entry.
  """

  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  gathers: int = 0


class Parts(NamedTuple):
  """The steps of a pass.

  Attributes:
    steps: By name.
    active_of_a_token: Mean entries of a token, those that are gathered.
    configs: Of the kernels.
  """

  steps: Mapping[str, Step]
  active_of_a_token: float
  configs: Mapping[str, Any]


def parts_of_forward(x: jax.Array, layer: inputs.Layer) -> Parts:
  """The steps for a gated layer of sizes that need no padding.

  Only x is padded for gate_pack where it has to be, before what is timed.
  """
  device = target.device_of(x)
  interpret = target.interpret_params()
  (tokens, d_model), d_ff = x.shape, layer.gate.shape[0]
  width = default_ell_width(d_ff)
  pack_config = tuning.for_gate_pack(device, tokens, d_ff, d_model)
  gather_config = tuning.for_gathered(
    device, tokens, d_ff, d_model, width, matrices=2
  )
  length = gather_config.segment_length

  @jax.jit
  def pack(x, gate):
    return gate_pack.gate_pack(
      x,
      gate,
      config=pack_config,
      sm_count=device.sm_count,
      interpret=interpret,
    )

  @jax.jit
  def pack_to_twell(x, gate):
    return pack_by_kernel(x, gate, config=pack_config, device=device)

  @jax.jit
  def compact(twell):
    ell = EllMatrix.from_twell(twell, width=width)
    work = work_list.of_ell(ell.stored, width=width, length=length)
    values = ell.values.astype(jnp.float32).reshape(-1)
    return ell.columns.reshape(-1), values, work, jnp.mean(ell.stored)

  @jax.jit
  def gather(x, up, down, columns, values, work):
    return gathered.gathered_up_down(
      x,
      up,
      down,
      columns=columns,
      values=values,
      work=work,
      config=gather_config,
      interpret=interpret,
    )

  padded_x = pad_to_multiples(x, (pack_config.padded_rows(tokens), 1))
  twell = pack_to_twell(x, layer.gate)
  columns, values, work, active = compact(twell)
  return Parts(
    steps={
      "gate_pack": Step(pack, (padded_x, layer.gate)),
      "gate_pack to TwELL": Step(pack_to_twell, (x, layer.gate)),
      "ELL and work list": Step(compact, (twell,)),
      "gathered_up_down": Step(
        gather, (x, layer.up, layer.down, columns, values, work), gathers=2
      ),
    },
    active_of_a_token=float(active),
    configs={
      "gate_pack": dataclasses.asdict(pack_config),
      "gathered_up_down": dataclasses.asdict(gather_config),
    },
  )
