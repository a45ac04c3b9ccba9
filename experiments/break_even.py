"""Finds the active share up to which sparse products beat dense ones.

    python -m experiments.break_even --output=experiments/results/break_even

Times the xla implementation with its sparse and with its dense products forced,
in turn, at several active shares, and writes OUTPUT.md: the time of the dense
over that of the sparse way. `twell_jax.ops.xla.sparse_share` is chosen by it.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array

from experiments import bench_ffn, cli, environment, timing
from twell_jax.ops import sparse_ffn

SHARES = (0.05, 0.10, 0.15, 0.25)


class Case(NamedTuple):
  """The shape of a call, and what of it is timed: "forward" or "train"."""

  tokens: int
  d_model: int
  d_ff: int
  dtype: str = "float32"
  mode: str = "forward"


CASES = (
  Case(1, 2048, 5632),
  Case(8, 2048, 5632),
  Case(512, 2048, 5632),
  Case(1, 576, 1536),
  Case(512, 576, 1536),
  Case(2048, 192, 1024),
  Case(1, 2048, 5632, "bfloat16"),
  Case(512, 2048, 5632, "bfloat16"),
  Case(8, 576, 1536, "bfloat16"),
  Case(512, 2048, 5632, mode="train"),
  Case(2048, 192, 1024, mode="train"),
)


def _function(mode: str, dense_above: float) -> Callable[..., Any]:
  """The layer, or its gradients, dense above that active share."""

  def forward(x: Array, layer: bench_ffn.Layer) -> Array:
    return sparse_ffn(
      x, *layer, implementation="xla", dense_above=dense_above
    ).y

  def train(x: Array, layer: bench_ffn.Layer) -> Any:
    _, pullback = jax.vjp(forward, x, layer)
    return pullback(x)

  return train if mode == "train" else forward


def ratio(case: Case, share: float, *, min_seconds: float) -> float:
  """Dense time over sparse time at an active share."""
  rng = np.random.default_rng(0)
  dtype = jnp.dtype(case.dtype)
  layer = bench_ffn.random_layer(
    rng, d_model=case.d_model, d_ff=case.d_ff, active=share * case.d_ff
  )
  layer = jax.tree.map(lambda matrix: matrix.astype(dtype), layer)
  arguments = [
    (
      bench_ffn.random_tokens(
        rng, tokens=case.tokens, d_model=case.d_model
      ).astype(dtype),
      layer,
    )
    for _ in range(3)
  ]
  times = timing.interleaved(
    {
      name: timing.contender(_function(case.mode, dense_above), arguments)
      for name, dense_above in (("dense", 0.0), ("sparse", 1.0))
    },
    min_seconds=min_seconds,
    min_repeats=3,
    warm_up=1,
  )
  return times["dense"].median_ms / times["sparse"].median_ms


def main() -> int:
  """Times every case and writes the table."""
  lines = [
    "# Dense time over sparse time, by active share of the neurons",
    "",
    "Both within the xla implementation, one of its two ways forced.",
    "",
    "| mode | tokens | d_model, d_ff | dtype |"
    + "".join(f" {share:.0%} |" for share in SHARES),
    "|---|---|---|---|" + "---|" * len(SHARES),
  ]
  for case in CASES:
    ratios = [
      ratio(case, share, min_seconds=flags.FLAGS.min_seconds)
      for share in SHARES
    ]
    lines.append(
      f"| {case.mode} | {case.tokens} | {case.d_model}, {case.d_ff} |"
      f" {case.dtype} |" + "".join(f" {value:.2f} |" for value in ratios)
    )
    print(lines[-1], flush=True)
  lines += [
    "",
    environment.sentence(environment.describe()),
    "",
    "    python -m experiments.break_even"
    " --output=experiments/results/break_even",
    "",
  ]
  path = pathlib.Path(flags.FLAGS.output).with_suffix(".md")
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("\n".join(lines), encoding="utf-8")
  return 0


if __name__ == "__main__":
  flags.DEFINE_string("output", None, "Where to write, without suffix.")
  flags.DEFINE_float(
    "min_seconds", 1.0, "How long to time each figure.", lower_bound=0.0
  )
  flags.mark_flag_as_required("output")
  cli.run(main)
