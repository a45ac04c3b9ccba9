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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.dense_layer import dense_ffn, dense_ffn_by_neuron
from experiments.on_gpu import inputs, plan, training_timings
from experiments.on_gpu.bench import (
  BY_INPUT,
  BY_OUTPUT,
  HOT_COLD,
  ROW,
  Bench,
  Point,
  cold_activities,
  difference,
  sparse_layer,
  timed_layers,
  timed_parts,
  tokens_of_calls,
)
from experiments.on_gpu.layers import make_layers
from experiments.on_gpu.measure import Timed, calls_for, compiled, measure
from experiments.on_gpu.parts import parts_of_forward
from experiments.on_gpu.worker import Stage
from twell_jax.ops import reference

_FIRST = (
  plan.forward_name(16384, 30, plan.HEAVY_TAIL),
  plan.forward_name(16384, 30, plan.UNIFORM),
  plan.training_name(16384, 30, plan.HEAVY_TAIL),
  plan.training_name(16384, 30, plan.UNIFORM),
  plan.decode_name(1, 30, plan.UNIFORM),
  plan.gate_name(16384),
  plan.training_parts_name(16384, 30, plan.UNIFORM),
  plan.parts_name(16384, 30, plan.UNIFORM),
  plan.decode_name(8, 30, plan.UNIFORM),
  plan.forward_name(131072, 30, plan.HEAVY_TAIL),
  plan.gate_name(131072),
  plan.parts_name(16384, 30, plan.HEAVY_TAIL),
)


def stages(sizes: plan.Sizes, *, seed: int, is_dry: bool) -> list[Stage]:
  """All measurements, most important first."""
  named = dict(_stages(Bench(sizes, seed, is_dry)))
  first = [name for name in _FIRST if name in named]
  rest = [name for name in named if name not in first]
  return [Stage(name, "timing", named[name]) for name in (*first, *rest)]


def _stages(bench: Bench) -> Iterator[tuple[str, Callable[[], Any]]]:
  """Names and functions; by activity, the targets' one first."""
  sizes = bench.sizes
  for tokens in sizes.prefill_tokens:
    yield plan.gate_name(tokens), functools.partial(_time_gate, bench, tokens)
  for active in sizes.active:
    for rates in sizes.rates:
      for tokens in sizes.decode_tokens:
        point = Point(tokens, active, rates)
        yield (
          plan.decode_name(*point),
          functools.partial(
            _time_layers, bench, point, layers=sizes.decode_layers
          ),
        )
      for tokens in sizes.prefill_tokens:
        point = Point(tokens, active, rates)
        yield (
          plan.forward_name(*point),
          functools.partial(_time_layers, bench, point, layers=1),
        )
  for rates in sizes.rates[:2]:
    point = Point(sizes.prefill_tokens[0], sizes.active[0], rates)
    yield plan.parts_name(*point), functools.partial(_time_parts, bench, point)
  yield from training_timings.stages(bench)


@functools.cache
def _chain(contender: str, hot_neurons: int) -> Any:
  """A step through layers, jitted: y of each is added up.

  Every layer has an x of its own, which in a trained model the layers before
  would make; a barrier makes it wait for them.
  """
  layer = {
    BY_INPUT: dense_ffn,
    BY_OUTPUT: dense_ffn_by_neuron,
    ROW: sparse_layer(0),
    HOT_COLD: sparse_layer(hot_neurons),
  }[contender]

  @jax.jit
  def step(xs, all_weights):
    total = jnp.zeros_like(xs[0])
    for x, weights in zip(xs, all_weights, strict=True):
      x, total = lax.optimization_barrier((x, total))
      total = total + layer(x, weights)
    return total

  return step


def _time_layers(bench: Bench, point: Point, *, layers: int) -> dict[str, Any]:
  """The dense layer, all neurons gathered, and hot/cold."""
  sizes = bench.sizes
  d_model, d_ff = sizes.layer
  made = make_layers(sizes, bench.seed, point.active, point.rates, layers)
  calls = calls_for(sizes, point.tokens)
  xs = tokens_of_calls(bench, point.tokens, layers=layers, calls=calls)
  cold = cold_activities(xs[0][0], made)
  numbers = layers * point.tokens * d_model

  def timed(name: str, weights: Sequence[Any]) -> Timed:
    is_dense = name not in cold
    return Timed(
      _chain(name, made.hot_neurons if name == HOT_COLD else 0),
      [(xs[call % len(xs)], weights) for call in range(calls)],
      flops=2.0 * 3 * numbers * d_ff if is_dense else None,
      # Rows of up and of down, in bfloat16.
      gathered_bytes=None if is_dense else 2.0 * 2 * numbers * cold[name].mean,
      layers=layers,
    )

  contenders = {
    BY_INPUT: timed(BY_INPUT, made.by_input),
    BY_OUTPUT: timed(BY_OUTPUT, made.by_output),
    ROW: timed(ROW, made.mixed),
  }
  if made.hot_neurons:
    contenders[HOT_COLD] = timed(HOT_COLD, made.by_rate)
  y = {
    name: compiled(contender)(*contender.calls[0])
    for name, contender in contenders.items()
  }
  differences = {
    name: difference(y[name], y[BY_INPUT]).item() for name in contenders
  }
  figures = measure(contenders, sizes, is_dry=bench.is_dry)
  return timed_layers(point, made, cold, figures, differences)


def _time_gate(bench: Bench, tokens: int) -> dict[str, Any]:
  """gate_pack by itself against the dense product."""
  point = Point(tokens, bench.sizes.active[0], bench.sizes.rates[0])
  return _time_parts(bench, point, only=("gate_pack",))


def _time_parts(
  bench: Bench, point: Point, *, only: Sequence[str] | None = None
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
  row_bytes = 2.0 * point.tokens * d_model * parts.active_of_a_token
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
        gathered_bytes=row_bytes * part.gathers if part.gathers else None,
      )
  return timed_parts(bench, point, parts, contenders)


@jax.jit
def _gate_by_input(x, gate):
  return jax.nn.relu(x @ gate)


@jax.jit
def _gate_by_output(x, gate):
  return jax.nn.relu(reference.per_neuron(x, gate))
