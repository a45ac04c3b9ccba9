"""Random layers that are timed, in every form in which they are."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, BFloat16, Int32

from experiments.dense_layer import DenseKernels
from experiments.on_gpu import inputs, plan
from twell_jax.ops import (
  H200,
  choose_hot_neurons,
  order_by_rate,
  sparse_ffn,
)


class Layers(NamedTuple):
  """Layers of the same firing rates, one after the other in a model.

  Attributes:
    mixed: Neurons in random order.
    by_rate: The same layers with neurons by falling rate.
    by_input: Dense kernels [in, out].
    by_output: Dense kernels [out, in].
    hot_neurons: Of the layers by rate, by the cost model.
    hot_share: Of the activations, those of hot neurons.
  """

  mixed: tuple[inputs.Layer, ...]
  by_rate: tuple[inputs.Layer, ...]
  by_input: tuple[DenseKernels, ...]
  by_output: tuple[DenseKernels, ...]
  hot_neurons: int
  hot_share: float


# Stages that follow each other often have the same layers.
@functools.lru_cache(maxsize=3)
def make_layers(
  sizes: plan.Sizes, seed: int, active: int, rates: str, number: int
) -> Layers:
  """Layers whose neurons are sorted and split as in use, by measured rates.

  Args:
    sizes: Of a layer, and how many tokens the rates are measured with.
    seed: Of the numbers.
    active: Active neurons per token, the mean that is asked for.
    rates: A distribution, a name in plan.RATES.
    number: Of layers.
  """
  d_model, d_ff = sizes.layer
  mixed, by_rate, measured = [], [], []
  for index in range(number):
    asked = inputs.firing_rates(
      inputs.generator(seed, "rates", active, rates, index),
      rates,
      d_ff=d_ff,
      active=active,
    )
    layer = inputs.timed_layer(
      inputs.key(seed, "layer", index), asked, d_model=d_model
    )
    x = inputs.timed_tokens(
      inputs.key(seed, "calibration", index),
      tokens=sizes.calibration_tokens,
      d_model=d_model,
    )
    fired = _fired(x, layer)
    mixed.append(layer)
    by_rate.append(order_by_rate(layer, fired))
    measured.append(np.asarray(fired) / sizes.calibration_tokens)
  hot_neurons = choose_hot_neurons(
    np.stack(measured),
    break_even=H200.break_even(2),
    granule=sizes.hot_granule,
  )
  falling = -np.sort(-np.stack(measured), axis=1)
  return Layers(
    mixed=tuple(mixed),
    by_rate=tuple(by_rate),
    by_input=tuple(
      DenseKernels(layer.gate.T, layer.up.T, layer.down) for layer in mixed
    ),
    by_output=tuple(
      DenseKernels(layer.gate, layer.up, layer.down.T) for layer in mixed
    ),
    hot_neurons=hot_neurons,
    hot_share=float(falling[:, :hot_neurons].sum() / falling.sum()),
  )


@jax.jit
def _fired(
  x: BFloat16[Array, "tokens d_model"], layer: inputs.Layer
) -> Int32[Array, "d_ff"]:
  return sparse_ffn(x, *layer, implementation="reference").activity.fired
