"""Times the layer against the dense one, and its parts, on random data.

The dense layer is the best of two layouts, bfloat16, jitted. All contenders of
a stage take turns in one process, and what they return is compared.

A decoding step is a jitted chain of several layers, each with weights of its
own, since those of one layer would partly stay in the cache between calls; its
time is also given per layer. Launch gaps between a step's kernels are in it, as
they are in use.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32

from experiments.dense_layer import dense_ffn, dense_ffn_by_neuron
from experiments.on_gpu import inputs, plan
from experiments.on_gpu.layers import make_layers
from experiments.on_gpu.measure import Timed, calls_for, compiled, measure
from experiments.on_gpu.parts import parts_of_forward
from experiments.on_gpu.worker import Stage
from pallas_kernels import target, tuning
from twell_jax.formats.bits import is_active
from twell_jax.ops import reference, sparse_ffn
from twell_jax.ops.mosaic import ell_width

_BY_INPUT, _BY_OUTPUT = "dense [in, out]", "dense [out, in]"
_ROW, _HOT_COLD = "row-gathered", "hot/cold"
# Different tokens, taken in turn.
_INPUTS = 2
# The rms difference of two layers in bfloat16, over the rms of y. Each rounds
# z, u, h and y; sparse ones keep more digits of u and h.
_LARGEST_DIFFERENCE = 2**-6

_FIRST = (
  plan.forward_name(16384, 30, plan.HEAVY_TAIL),
  plan.forward_name(16384, 30, plan.UNIFORM),
  plan.decode_name(1, 30, plan.UNIFORM),
  plan.gate_name(16384),
  plan.parts_name(16384, 30, plan.UNIFORM),
  plan.decode_name(8, 30, plan.UNIFORM),
  plan.forward_name(131072, 30, plan.HEAVY_TAIL),
  plan.gate_name(131072),
  plan.parts_name(16384, 30, plan.HEAVY_TAIL),
)


def stages(sizes: plan.Sizes, *, seed: int, is_dry: bool) -> list[Stage]:
  """All measurements, most important first."""
  named = dict(_stages(_Bench(sizes, seed, is_dry)))
  first = [name for name in _FIRST if name in named]
  rest = [name for name in named if name not in first]
  return [Stage(name, "timing", named[name]) for name in (*first, *rest)]


class _Bench(NamedTuple):
  """What all measurements share."""

  sizes: plan.Sizes
  seed: int
  is_dry: bool


class _Point(NamedTuple):
  """Tokens of a call, active neurons per token, firing rates."""

  tokens: int
  active: int
  rates: str


def _stages(bench: _Bench) -> Iterator[tuple[str, Callable[[], Any]]]:
  """Names and functions; by activity, the targets' one first."""
  sizes = bench.sizes
  for tokens in sizes.prefill_tokens:
    yield plan.gate_name(tokens), functools.partial(_time_gate, bench, tokens)
  for active in sizes.active:
    for rates in sizes.rates:
      for tokens in sizes.decode_tokens:
        point = _Point(tokens, active, rates)
        yield (
          plan.decode_name(*point),
          functools.partial(
            _time_layers, bench, point, layers=sizes.decode_layers
          ),
        )
      for tokens in sizes.prefill_tokens:
        point = _Point(tokens, active, rates)
        yield (
          plan.forward_name(*point),
          functools.partial(_time_layers, bench, point, layers=1),
        )
  for rates in sizes.rates[:2]:
    point = _Point(sizes.prefill_tokens[0], sizes.active[0], rates)
    yield plan.parts_name(*point), functools.partial(_time_parts, bench, point)


def _sparse(hot_neurons: int) -> Callable[..., Any]:
  @jax.jit
  def layer(x, weights):
    output = sparse_ffn(
      x, *weights, implementation="mosaic", hot_neurons=hot_neurons
    )
    return output.y

  return layer


@functools.cache
def _chain(contender: str, hot_neurons: int) -> Any:
  """A step through layers, jitted: y of each is added up.

  Every layer has an x of its own, which in a trained model the layers before
  would make; a barrier makes it wait for them.
  """
  layer = {
    _BY_INPUT: dense_ffn,
    _BY_OUTPUT: dense_ffn_by_neuron,
    _ROW: _sparse(0),
    _HOT_COLD: _sparse(hot_neurons),
  }[contender]

  @jax.jit
  def step(xs, all_weights):
    total = jnp.zeros_like(xs[0])
    for x, weights in zip(xs, all_weights, strict=True):
      x, total = lax.optimization_barrier((x, total))
      total = total + layer(x, weights)
    return total

  return step


def _time_layers(
  bench: _Bench, point: _Point, *, layers: int
) -> dict[str, Any]:
  """The dense layer, all neurons gathered, and hot/cold."""
  sizes = bench.sizes
  d_model, d_ff = sizes.layer
  made = make_layers(sizes, bench.seed, point.active, point.rates, layers)
  calls = calls_for(sizes, point.tokens)
  xs = [
    tuple(
      inputs.timed_tokens(
        inputs.key(bench.seed, "x", call, layer),
        tokens=point.tokens,
        d_model=d_model,
      )
      for layer in range(layers)
    )
    for call in range(min(calls, _INPUTS))
  ]
  cold_gates = {
    _ROW: made.mixed[0].gate,
    _HOT_COLD: made.by_rate[0].gate[made.hot_neurons :],
  }
  cold = {
    name: _cold_activity(xs[0][0], gate) for name, gate in cold_gates.items()
  }
  numbers = layers * point.tokens * d_model

  def timed(name: str, weights: Sequence[Any]) -> Timed:
    is_dense = name not in cold
    return Timed(
      _chain(name, made.hot_neurons if name == _HOT_COLD else 0),
      [(xs[call % len(xs)], weights) for call in range(calls)],
      flops=2.0 * 3 * numbers * d_ff if is_dense else None,
      # Rows of up and of down, in bfloat16.
      gathered_bytes=None if is_dense else 2.0 * 2 * numbers * cold[name].mean,
      layers=layers,
    )

  contenders = {
    _BY_INPUT: timed(_BY_INPUT, made.by_input),
    _BY_OUTPUT: timed(_BY_OUTPUT, made.by_output),
    _ROW: timed(_ROW, made.mixed),
  }
  if made.hot_neurons:
    contenders[_HOT_COLD] = timed(_HOT_COLD, made.by_rate)
  y = {
    name: compiled(contender)(*contender.calls[0])
    for name, contender in contenders.items()
  }
  differences = {
    name: _difference(y[name], y[_BY_INPUT]).item() for name in contenders
  }
  figures = measure(contenders, sizes, is_dry=bench.is_dry)
  # Without hot neurons it is the same.
  figures.setdefault(_HOT_COLD, figures[_ROW])
  is_same = max(differences.values()) <= _LARGEST_DIFFERENCE
  return {
    "status": "DONE" if is_same else "FAIL",
    **point._asdict(),
    "contenders": figures,
    "differences": differences,
    "hot_neurons": made.hot_neurons,
    "hot_share": made.hot_share,
    "active_of_a_token": cold[_ROW].mean,
    "gathered_of_a_token": {name: found.mean for name, found in cold.items()},
    "overflowed": {name: found.overflowed for name, found in cold.items()},
  }


@jax.jit
def _difference(
  a: BFloat16[Array, "tokens d_model"], b: BFloat16[Array, "tokens d_model"]
) -> Float32[Array, ""]:
  """The rms difference over the rms."""
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  return jnp.sqrt(jnp.mean((a - b) ** 2) / (jnp.mean(b**2) + 1e-30))


class _ColdActivity(NamedTuple):
  """Mean active neurons of a token, and tokens that overflow the packing."""

  mean: float
  overflowed: int


def _cold_activity(
  x: BFloat16[Array, "tokens d_model"], gate: BFloat16[Array, "cold d_model"]
) -> _ColdActivity:
  """Of the neurons that are not hot, found from a dense gate product."""
  if gate.shape[0] == 0:
    return _ColdActivity(0.0, 0)
  config = tuning.for_gate_pack(
    target.device_of(x), x.shape[0], gate.shape[0], x.shape[1]
  )
  counts = _counts(x, gate, tile_width=config.tile_width)
  total = jnp.sum(counts, axis=1)
  overflow = jnp.any(counts > config.slots, axis=1)
  overflow |= total > ell_width(gate.shape[0])
  return _ColdActivity(
    jnp.mean(total.astype(jnp.float32)).item(), jnp.sum(overflow).item()
  )


@functools.partial(jax.jit, static_argnames="tile_width")
def _counts(x, gate, *, tile_width):
  """Active neurons of each token and tile."""
  active = is_active(reference.per_neuron(x, gate))
  active = jnp.pad(active, ((0, 0), (0, -gate.shape[0] % tile_width)))
  tiles = active.reshape(x.shape[0], -1, tile_width)
  return jnp.sum(tiles, axis=2, dtype=jnp.int32)


def _time_gate(bench: _Bench, tokens: int) -> dict[str, Any]:
  """gate_pack by itself against the dense product."""
  point = _Point(tokens, bench.sizes.active[0], bench.sizes.rates[0])
  return _time_parts(bench, point, only=("gate_pack",))


def _time_parts(
  bench: _Bench, point: _Point, *, only: Sequence[str] | None = None
) -> dict[str, Any]:
  """The steps of a forward pass, each alone, and the dense gate product."""
  sizes = bench.sizes
  d_model, d_ff = sizes.layer
  made = make_layers(sizes, bench.seed, point.active, point.rates, 1)
  layer = made.mixed[0]
  x = inputs.timed_tokens(
    inputs.key(bench.seed, "x", 0, 0), tokens=point.tokens, d_model=d_model
  )
  parts = parts_of_forward(x, layer)
  gate_flops = 2.0 * point.tokens * d_model * d_ff
  row_bytes = 2.0 * 2 * point.tokens * d_model * parts.active_of_a_token
  calls = calls_for(sizes, point.tokens)
  contenders = {
    "dense gate [in, out]": Timed(
      _gate_by_input, [(x, layer.gate.T)] * calls, flops=gate_flops
    ),
    "dense gate [out, in]": Timed(
      _gate_by_output, [(x, layer.gate)] * calls, flops=gate_flops
    ),
  }
  for name, part in parts.steps.items():
    if only is None or name in only:
      contenders[name] = Timed(
        part.function,
        [part.arguments] * calls,
        flops=gate_flops if name.startswith("gate_pack") else None,
        gathered_bytes=row_bytes if name == "gathered_up_down" else None,
      )
  return {
    "status": "DONE",
    **point._asdict(),
    "contenders": measure(contenders, sizes, is_dry=bench.is_dry),
    "active_of_a_token": parts.active_of_a_token,
    "configs": parts.configs,
  }


@jax.jit
def _gate_by_input(x, gate):
  return jax.nn.relu(x @ gate)


@jax.jit
def _gate_by_output(x, gate):
  return jax.nn.relu(reference.per_neuron(x, gate))
