"""Checks of gate_pack: words and counts, bit for bit.

z is exact, so that there is one right answer: what packing it in XLA gives.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Int32

from experiments.on_gpu import inputs, plan
from experiments.on_gpu.compare import in_float32, outcome, run_twice
from experiments.on_gpu.worker import Stage
from pallas_kernels import gate_pack_config, target
from pallas_kernels.gate_pack_config import GatePackConfig
from twell_jax.formats import TwellMatrix
from twell_jax.formats.bits import to_bits
from twell_jax.ops.gate import pack_by_kernel
from twell_jax.ops.mosaic_sizes import default_ell_width


def default_stages(sizes: plan.Sizes, seed: int) -> Iterator[Stage]:
  """Checks of the configs that the op takes by default."""
  for shape in (sizes.pack, *sizes.pack_others):
    config = gate_pack_config.default_config(
      shape.tokens, shape.d_ff, shape.d_model
    )
    is_main = shape == sizes.pack
    for activity in sizes.activities if is_main else sizes.other_activities:
      yield _stage("default config", config, activity, shape, seed)


def packing_stages(sizes: plan.Sizes, seed: int) -> Iterator[Stage]:
  """Checks of other tiles, and of clusters."""
  for tile_width, slots, cluster in sizes.packings:
    config = gate_pack_config.default_config(
      sizes.pack.tokens,
      sizes.pack.d_ff,
      sizes.pack.d_model,
      tile_width=tile_width,
      slots=slots,
    )
    config = dataclasses.replace(config, cluster=cluster)
    name = f"{tile_width}/{slots}, cluster {cluster}"
    for activity in sizes.activities:
      yield _stage(name, config, activity, sizes.pack, seed)


def _stage(
  name: str,
  config: GatePackConfig,
  activity: str,
  shape: plan.Shape,
  seed: int,
) -> Stage:
  tokens, d_model, d_ff = shape
  return Stage(
    f"gate_pack, {name}, {tokens}x{d_model}x{d_ff}: {activity}",
    "check",
    functools.partial(_check, config, activity, shape, seed),
  )


def _check(
  config: GatePackConfig, activity: str, shape: plan.Shape, seed: int
) -> dict[str, Any]:
  edges = inputs.Edges(
    config.tile_width, config.slots, default_ell_width(shape.d_ff)
  )
  x, gate, z = inputs.gate_inputs(seed, activity, shape, edges)
  expected = _packed(
    _exact_z(x, gate) if z is None else z,
    tile_width=config.tile_width,
    slots=config.slots,
  )
  twice = run_twice(_pack(config), x, gate)
  wrong = {
    name: int(count)
    for name, count in _differing(twice.result, expected)._asdict().items()
  }
  return outcome(
    not any(wrong.values()),
    error=sum(wrong.values()),
    limit=0,
    twice=twice,
    wrong=wrong,
    active_of_a_token=float(jnp.mean(expected.active.astype(jnp.float32))),
    config=dataclasses.asdict(config),
  )


@functools.cache
def _pack(config: GatePackConfig) -> Callable[..., Any]:
  @jax.jit
  def pack(x, gate):
    return pack_by_kernel(x, gate, config=config, device=target.device_of(x))

  return pack


@jax.jit
def _exact_z(
  x: BFloat16[Array, "tokens d_model"], gate: BFloat16[Array, "d_ff d_model"]
) -> BFloat16[Array, "tokens d_ff"]:
  """z in float32, exact for small integers, rounded once."""
  return in_float32(x, gate.T).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("tile_width", "slots"))
def _packed(z, *, tile_width, slots):
  return TwellMatrix.pack(z, tile_width=tile_width, slots=slots)


class _Differing(NamedTuple):
  """How many numbers of each array differ."""

  counts: Int32[Array, ""]
  columns: Int32[Array, ""]
  values: Int32[Array, ""]


@jax.jit
def _differing(actual: TwellMatrix, expected: TwellMatrix) -> _Differing:
  # Which NaN it is does not matter.
  both_nan = jnp.isnan(actual.values) & jnp.isnan(expected.values)
  same = (to_bits(actual.values) == to_bits(expected.values)) | both_nan
  return _Differing(
    jnp.sum(actual.counts != expected.counts),
    jnp.sum(actual.columns != expected.columns),
    jnp.sum(~same),
  )
