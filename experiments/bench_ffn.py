r"""Times the sparse feed-forward layer against the dense one.

    python -m experiments.bench_ffn --d_model 2048 --d_ff 5632 --tokens 512 \
        --active 30 --dtype float32 --mode forward

forward  y of `tokens` tokens
train    y and the gradients of x and the matrices, for `tokens` tokens
decode   y of a few new tokens (1 by default), different ones at each call

With --implementation=mosaic it needs a Hopper GPU and --dtype=bfloat16. With
--hot_neurons the layer's neurons are sorted by firing rate, as measured on
other tokens, and so many are computed for all tokens.

The layer is random with a given mean number of active neurons per token and
heavy-tailed firing rates, as trained layers have. Both sides run under jit in
one process, in turn; the dense layer runs with its kernels [in, out] and, going
forward, also [out, in], and the faster one is the baseline. The last line is
JSON.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Float
from scipy import optimize, stats

from experiments import cli, environment, timing
from experiments.dense_layer import (
  DenseKernels,
  dense_ffn,
  dense_ffn_by_neuron,
)
from twell_jax.ops import IMPLEMENTATIONS, Activity, order_by_rate, sparse_ffn

_MODES = {"forward": 512, "train": 2048, "decode": 1}
_DTYPES = ("float32", "bfloat16", "float16")
_CALLS = 4  # different inputs, used in turn
_CALIBRATION_TOKENS = 4096  # from which firing rates are measured


class Layer(NamedTuple):
  """A random layer, a neuron being one row of each matrix."""

  gate: Float[Array, "d_ff d_model"]
  up: Float[Array, "d_ff d_model"] | None
  down: Float[Array, "d_ff d_model"]


def random_layer(
  rng: np.random.Generator,
  *,
  d_model: int,
  d_ff: int,
  active: float,
  gated: bool = True,
) -> Layer:
  """A float32 layer with `active` neurons per token for `random_tokens`.

  A neuron's gate is normal with unit variance around a threshold; thresholds
  are gamma-distributed, so that a few neurons fire often and most rarely.
  """
  if not 0 <= active <= d_ff:
    raise ValueError(f"{active=} must be from 0 to {d_ff=}")
  shape = (d_ff, d_model)
  gate, up, down = (
    rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(size))
    for size in (d_model, d_model, d_ff)
  )
  thresholds = rng.gamma(4.0, 0.65, size=d_ff)

  def excess(shift: float) -> float:
    return float(stats.norm.sf(thresholds + shift).sum()) - active

  # ±40 silences or excites every neuron.
  shift = optimize.brentq(excess, -40.0, 40.0) if 0 < active < d_ff else 0.0
  if active in (0, d_ff):
    shift = 40.0 if active == 0 else -40.0
  gate[:, 0] = -(thresholds + shift)
  return Layer(
    jnp.asarray(gate), jnp.asarray(up) if gated else None, jnp.asarray(down)
  )


def random_tokens(
  rng: np.random.Generator, *, tokens: int, d_model: int
) -> Float[Array, "tokens d_model"]:
  """Normal tokens whose first feature is 1: it carries the thresholds."""
  x = rng.standard_normal((tokens, d_model), dtype=np.float32)
  x[:, 0] = 1
  return jnp.asarray(x)


@jax.jit
def _activity(x: Array, layer: Layer) -> Activity:
  return sparse_ffn(x, *layer, implementation="reference").activity


def _with_gradients(layer):
  def function(x, weights, dy):
    y, pullback = jax.vjp(layer, x, weights)
    return y, pullback(dy)

  return function


def _sparse(x: Array, layer: Layer, **options: Any) -> Array:
  return sparse_ffn(x, *layer, **options).y


def _check_layer(sparse: Callable[..., Array], tokens: int) -> None:
  """Raises what the layer does about its options, before anything is made."""
  args = flags.FLAGS
  dtype = jnp.dtype(args.dtype)
  matrix: Any = jax.ShapeDtypeStruct((args.d_ff, args.d_model), dtype)
  layer = Layer(matrix, matrix if args.gated else None, matrix)
  jax.eval_shape(
    sparse, jax.ShapeDtypeStruct((tokens, args.d_model), dtype), layer
  )


def _sorted_by_rate(layer: Layer, seed: int) -> Layer:
  """The layer with the neurons first that fire most, on tokens of their own."""
  x = random_tokens(
    np.random.default_rng([seed, 1]),
    tokens=_CALIBRATION_TOKENS,
    d_model=layer.gate.shape[1],
  )
  fired = _activity(x.astype(layer.gate.dtype), layer).fired
  return order_by_rate(layer, fired)


def main() -> int:
  """Prints a table of times and memory, and the same as JSON."""
  args = flags.FLAGS
  mode, dtype = args.mode, jnp.dtype(args.dtype)
  tokens = args.tokens or _MODES[mode]
  if args.implementation == "mosaic" and args.dtype != "bfloat16":
    raise ValueError(
      f"--implementation=mosaic computes in bfloat16 and --dtype={args.dtype}:"
      " add --dtype=bfloat16"
    )
  sparse = functools.partial(
    _sparse, implementation=args.implementation, hot_neurons=args.hot_neurons
  )
  _check_layer(sparse, tokens)
  rng = np.random.default_rng(args.seed)
  layer = random_layer(
    rng,
    d_model=args.d_model,
    d_ff=args.d_ff,
    active=args.active,
    gated=args.gated,
  )
  layer = jax.tree.map(lambda matrix: matrix.astype(dtype), layer)
  if args.hot_neurons:
    layer = _sorted_by_rate(layer, args.seed)
  inputs = [
    random_tokens(rng, tokens=tokens, d_model=args.d_model).astype(dtype)
    for _ in range(_CALLS)
  ]
  kernels = DenseKernels(
    layer.gate.T, None if layer.up is None else layer.up.T, layer.down
  )

  if mode == "train":
    cotangent = rng.standard_normal(inputs[0].shape, dtype=np.float32)
    dy = jnp.asarray(cotangent).astype(dtype)
    contenders = {
      "dense": timing.contender(
        _with_gradients(dense_ffn), [(x, kernels, dy) for x in inputs]
      ),
      "sparse": timing.contender(
        _with_gradients(sparse), [(x, layer, dy) for x in inputs]
      ),
    }
  else:
    by_neuron = kernels._replace(
      gate=layer.gate, up=layer.up, down=layer.down.T
    )
    contenders = {
      "dense": timing.contender(dense_ffn, [(x, kernels) for x in inputs]),
      "dense [out, in]": timing.contender(
        dense_ffn_by_neuron, [(x, by_neuron) for x in inputs]
      ),
      "sparse": timing.contender(sparse, [(x, layer) for x in inputs]),
    }
  times = timing.interleaved(contenders, min_seconds=args.min_seconds)
  active = jnp.mean(
    jnp.stack([_activity(x, layer).active for x in inputs]).astype(jnp.float32)
  )
  best = min(
    (name for name in times if name != "sparse"),
    key=lambda name: times[name].median_ms,
  )
  print(
    f"{mode}: {tokens} tokens, d_model {args.d_model}, d_ff {args.d_ff},"
    f" {float(active):.1f} active, {dtype}"
  )
  print(f"{'':18}{'median ms':>10}{'quartiles':>20}{'ratio':>8}{'temp MB':>10}")
  for name, time in times.items():
    temporary = contenders[name].temporary_bytes
    megabytes = "" if temporary is None else f"{temporary / 1e6:.1f}"
    print(
      f"{name:18}{time.median_ms:10.3f}"
      f"{f'{time.lower_ms:.3f} – {time.upper_ms:.3f}':>20}"
      f"{times[best].median_ms / time.median_ms:8.2f}{megabytes:>10}"
    )
  print(
    json.dumps(
      {
        "mode": mode,
        "tokens": tokens,
        "d_model": args.d_model,
        "d_ff": args.d_ff,
        "gated": args.gated,
        "active": round(float(active), 2),
        "dtype": dtype.name,
        "implementation": args.implementation,
        "hot_neurons": args.hot_neurons,
        "dense_layout": "[out, in]" if "[" in best else "[in, out]",
        "dense_ms": round(times[best].median_ms, 4),
        "sparse_ms": round(times["sparse"].median_ms, 4),
        "ratio": round(times[best].median_ms / times["sparse"].median_ms, 3),
        "dense_spread_ms": [round(t, 4) for t in times[best][1:]],
        "sparse_spread_ms": [round(t, 4) for t in times["sparse"][1:]],
        "dense_temp_bytes": contenders[best].temporary_bytes,
        "sparse_temp_bytes": contenders["sparse"].temporary_bytes,
        **environment.describe(),
      }
    )
  )
  return 0


def _define_flags() -> None:
  flags.DEFINE_integer("d_model", 2048, "Width of x.", lower_bound=2)
  flags.DEFINE_integer("d_ff", 5632, "Neurons.", lower_bound=1)
  flags.DEFINE_integer(
    "tokens", None, f"Tokens of a call; by mode {_MODES}.", lower_bound=1
  )
  flags.DEFINE_float(
    "active", 30.0, "Mean active neurons per token.", lower_bound=0.0
  )
  flags.DEFINE_enum("dtype", "float32", _DTYPES, "Of x and the matrices.")
  flags.DEFINE_enum("mode", "forward", list(_MODES), "What is timed.")
  flags.DEFINE_bool("gated", True, "Whether there is an up projection.")
  flags.DEFINE_enum(
    "implementation", "xla", sorted(IMPLEMENTATIONS), "The sparse side."
  )
  flags.DEFINE_integer(
    "hot_neurons", 0, "Neurons computed for all tokens.", lower_bound=0
  )
  flags.DEFINE_float("min_seconds", 4.0, "How long to time.", lower_bound=0.0)
  flags.DEFINE_integer("seed", 0, "Of the layer and the tokens.")


if __name__ == "__main__":
  _define_flags()
  cli.run(main)
