"""Times a training step of the layer, forward and backward, and its parts.

The dense layer is the best of two layouts. Both sides give y and the gradients
of x and of all matrices, in bfloat16; the sparse side starts from x and the
weights, so that packing, the transposed pattern and the choice of who is
computed densely are in its time.

Neurons may be in another order on each side. So what is compared is y, the
gradient of x, and those of the matrices summed over neurons.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.dense_layer import dense_ffn, dense_ffn_by_neuron
from experiments.on_gpu import inputs, plan
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
from experiments.on_gpu.training_parts import parts_of_training
from twell_jax.ops import reference

# Products of a dense layer, three of them forward.
_DENSE_PRODUCTS = 9
# Rows that are gathered for an entry: of up and down, of dy, of up and gate at
# once, of x.
_GATHERS = 6


def stages(bench: Bench) -> Iterator[tuple[str, Callable[[], Any]]]:
  """Names and functions."""
  sizes = bench.sizes
  for active in sizes.training_active:
    for rates in sizes.rates:
      for tokens in sizes.training_tokens:
        point = Point(tokens, active, rates)
        yield (
          plan.training_name(*point),
          functools.partial(_time_layer, bench, point),
        )
  for rates in sizes.rates[:2]:
    point = Point(sizes.training_tokens[0], sizes.training_active[0], rates)
    yield (
      plan.training_parts_name(*point),
      functools.partial(_time_parts, bench, point),
    )


class _Side(NamedTuple):
  """A layer, and the axis of the neurons in each of its matrices."""

  layer: Callable[..., Array]
  neuron_axes: tuple[int, int, int]


@functools.cache
def _step(contender: str, hot_neurons: int) -> Any:
  """y and the gradients of x and the weights, jitted."""
  layer = _sides(hot_neurons)[contender].layer

  @jax.jit
  def step(x, weights, dy):
    y, pull_back = jax.vjp(layer, x, weights)
    return y, *pull_back(dy)

  return step


def _sides(hot_neurons: int) -> Mapping[str, _Side]:
  return {
    BY_INPUT: _Side(dense_ffn, (1, 1, 0)),
    BY_OUTPUT: _Side(dense_ffn_by_neuron, (0, 0, 1)),
    ROW: _Side(sparse_layer(0), (0, 0, 0)),
    HOT_COLD: _Side(sparse_layer(hot_neurons), (0, 0, 0)),
  }


def _time_layer(bench: Bench, point: Point) -> dict[str, Any]:
  """The dense layer, all neurons gathered, and hot/cold."""
  sizes = bench.sizes
  d_model, d_ff = sizes.layer
  made = make_layers(sizes, bench.seed, point.active, point.rates, 1)
  calls = calls_for(sizes, point.tokens)
  xs = [
    x for (x,) in tokens_of_calls(bench, point.tokens, layers=1, calls=calls)
  ]
  dy = _cotangent(bench, point)
  cold = cold_activities(xs[0], made)
  numbers = 1.0 * point.tokens * d_model

  def timed(name: str, layers: Sequence[Any]) -> Timed:
    is_dense = name not in cold
    return Timed(
      _step(name, made.hot_neurons if name == HOT_COLD else 0),
      [(xs[call % len(xs)], layers[0], dy) for call in range(calls)],
      flops=2 * _DENSE_PRODUCTS * numbers * d_ff if is_dense else None,
      # In bfloat16.
      gathered_bytes=None
      if is_dense
      else 2 * _GATHERS * numbers * cold[name].mean,
    )

  contenders = {
    BY_INPUT: timed(BY_INPUT, made.by_input),
    BY_OUTPUT: timed(BY_OUTPUT, made.by_output),
    ROW: timed(ROW, made.mixed),
  }
  if made.hot_neurons:
    contenders[HOT_COLD] = timed(HOT_COLD, made.by_rate)
  sides = _sides(made.hot_neurons)
  found = {
    name: _comparable(
      *compiled(contender)(*contender.calls[0]),
      neuron_axes=sides[name].neuron_axes,
    )
    for name, contender in contenders.items()
  }
  differences = {
    name: {
      array: difference(found[name][array], found[BY_INPUT][array]).item()
      for array in found[name]
    }
    for name in contenders
  }
  figures = measure(contenders, sizes, is_dry=bench.is_dry)
  return timed_layers(point, made, cold, figures, differences)


def _cotangent(bench: Bench, point: Point) -> Array:
  return jax.random.normal(
    inputs.key(bench.seed, "dy"),
    (point.tokens, bench.sizes.layer[0]),
    jnp.bfloat16,
  )


@functools.partial(jax.jit, static_argnames="neuron_axes")
def _comparable(y, dx, dweights, *, neuron_axes):
  """Arrays that do not depend on the order of neurons, by name."""
  sums = {
    f"d{name}": jnp.sum(gradient.astype(jnp.float32), axis=axis)
    for name, gradient, axis in zip(
      ("gate", "up", "down"), dweights, neuron_axes, strict=True
    )
  }
  return {"y": y, "dx": dx, **sums}


def _time_parts(bench: Bench, point: Point) -> dict[str, Any]:
  """The steps of the sparse side, each alone, and one dense product."""
  sizes = bench.sizes
  d_model, d_ff = sizes.layer
  made = make_layers(sizes, bench.seed, point.active, point.rates, 1)
  layer = made.mixed[0]
  ((x,),) = tokens_of_calls(bench, point.tokens, layers=1, calls=1)
  parts = parts_of_training(x, layer, _cotangent(bench, point))
  calls = calls_for(sizes, point.tokens)
  product_flops = 2.0 * point.tokens * d_model * d_ff
  row_bytes = 2.0 * point.tokens * d_model * parts.active_of_a_token
  contenders = {
    "dense product": Timed(
      _dense_product, [(x, layer.gate)] * calls, flops=product_flops
    ),
  }
  for name, part in parts.steps.items():
    contenders[name] = Timed(
      part.function,
      [part.arguments] * calls,
      gathered_bytes=row_bytes * part.gathers if part.gathers else None,
    )
  return timed_parts(bench, point, parts, contenders)


@jax.jit
def _dense_product(x, gate):
  return reference.per_neuron(x, gate)
