"""What the timings of layers share: points, tokens, what is compared."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32

from experiments.on_gpu import inputs, plan
from experiments.on_gpu.layers import Layers
from experiments.on_gpu.measure import Timed, measure
from experiments.on_gpu.parts import Parts
from pallas_kernels import target, tuning
from twell_jax.formats.bits import is_active
from twell_jax.ops import reference, sparse_ffn
from twell_jax.ops.mosaic_sizes import default_ell_width

BY_INPUT, BY_OUTPUT = "dense [in, out]", "dense [out, in]"
ROW, HOT_COLD = "row-gathered", "hot/cold"
# The rms difference of two layers in bfloat16, over the rms of y or of a
# gradient. Each rounds z, u, h and what it returns; sparse ones keep more
# digits of u and h.
_LARGEST_DIFFERENCE = 2**-6
# Different tokens, taken in turn.
_INPUTS = 2


class Bench(NamedTuple):
  """What all measurements share."""

  sizes: plan.Sizes
  seed: int
  is_dry: bool


class Point(NamedTuple):
  """Tokens of a call, active neurons per token, firing rates."""

  tokens: int
  active: int
  rates: str


def tokens_of_calls(
  bench: Bench, tokens: int, *, layers: int, calls: int
) -> list[tuple[BFloat16[Array, "tokens d_model"], ...]]:
  """The tokens of each layer, for a few calls that are taken in turn."""
  return [
    tuple(
      inputs.timed_tokens(
        inputs.key(bench.seed, "x", call, layer),
        tokens=tokens,
        d_model=bench.sizes.layer[0],
      )
      for layer in range(layers)
    )
    for call in range(min(calls, _INPUTS))
  ]


def sparse_layer(hot_neurons: int) -> Callable[..., Array]:
  """y by kernels, as a function of tokens and weights."""

  def layer(x, weights):
    output = sparse_ffn(
      x,
      *weights,
      implementation="mosaic",
      hot_neurons=hot_neurons,
      # What is timed is gathering, also where the op would not choose it.
      dense_above=1.0,
    )
    return output.y

  return layer


@jax.jit
def difference(
  a: Float[Array, "*shape"], b: Float[Array, "*shape"]
) -> Float32[Array, ""]:
  """The rms difference over the rms."""
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  return jnp.sqrt(jnp.mean((a - b) ** 2) / (jnp.mean(b**2) + 1e-30))


class ColdActivity(NamedTuple):
  """Mean active neurons of a token, and tokens that overflow the packing."""

  mean: float
  overflowed: int


def cold_activity(
  x: BFloat16[Array, "tokens d_model"], gate: BFloat16[Array, "cold d_model"]
) -> ColdActivity:
  """Of the neurons that are not hot, found from a dense gate product."""
  if gate.shape[0] == 0:
    return ColdActivity(0.0, 0)
  config = tuning.for_gate_pack(
    target.device_of(x), x.shape[0], gate.shape[0], x.shape[1]
  )
  counts = _counts(x, gate, tile_width=config.tile_width)
  total = jnp.sum(counts, axis=1)
  overflow = jnp.any(counts > config.slots, axis=1)
  overflow |= total > default_ell_width(gate.shape[0])
  return ColdActivity(
    jnp.mean(total.astype(jnp.float32)).item(), jnp.sum(overflow).item()
  )


@functools.partial(jax.jit, static_argnames="tile_width")
def _counts(x, gate, *, tile_width):
  """Active neurons of each token and tile."""
  active = is_active(reference.per_neuron(x, gate))
  active = jnp.pad(active, ((0, 0), (0, -gate.shape[0] % tile_width)))
  tiles = active.reshape(x.shape[0], -1, tile_width)
  return jnp.sum(tiles, axis=2, dtype=jnp.int32)


def cold_activities(
  x: BFloat16[Array, "tokens d_model"], made: Layers
) -> dict[str, ColdActivity]:
  """Of each sparse contender, in the first layer."""
  return {
    ROW: cold_activity(x, made.mixed[0].gate),
    HOT_COLD: cold_activity(x, made.by_rate[0].gate[made.hot_neurons :]),
  }


def timed_layers(
  point: Point,
  made: Layers,
  cold: Mapping[str, ColdActivity],
  figures: Mapping[str, Any],
  differences: Mapping[str, Any],
) -> dict[str, Any]:
  """What a timing of layers says.

  Args:
    point: What was timed.
    made: The layers.
    cold: Their activity.
    figures: Of each contender; of hot/cold only if there are hot neurons.
    differences: Of each contender from the first one, at any depth.
  """
  largest = max(jax.tree.leaves(differences))
  contenders = dict(figures)
  # Without hot neurons it is the same.
  contenders.setdefault(HOT_COLD, figures[ROW])
  return {
    "status": "DONE" if largest <= _LARGEST_DIFFERENCE else "FAIL",
    **point._asdict(),
    "contenders": contenders,
    "differences": differences,
    "hot_neurons": made.hot_neurons,
    "hot_share": made.hot_share,
    "active_of_a_token": cold[ROW].mean,
    "gathered_of_a_token": {name: each.mean for name, each in cold.items()},
    "overflowed": {name: each.overflowed for name, each in cold.items()},
  }


def timed_parts(
  bench: Bench, point: Point, parts: Parts, contenders: Mapping[str, Timed]
) -> dict[str, Any]:
  """Times the steps of a pass; what that says."""
  return {
    "status": "DONE",
    **point._asdict(),
    "contenders": measure(contenders, bench.sizes, is_dry=bench.is_dry),
    "active_of_a_token": parts.active_of_a_token,
    "configs": parts.configs,
  }
