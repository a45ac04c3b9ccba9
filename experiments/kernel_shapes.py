"""Shapes of a layer for the scripts about kernels, and how they are written."""

import argparse
from typing import NamedTuple


class Shape(NamedTuple):
  """Tokens m, d_model k and d_ff n of a call, in the order they are written."""

  m: int
  k: int
  n: int

  def __str__(self) -> str:
    return "x".join(map(str, self))


# Prefill of the published layer, of a wider and of a small one; decode.
SHAPES = (
  Shape(16384, 2048, 5632),
  Shape(131072, 2048, 5632),
  Shape(16384, 4096, 14336),
  Shape(512, 576, 1536),
  Shape(1, 2048, 5632),
  Shape(64, 2048, 5632),
)

# At fewer tokens nothing is trained.
MIN_TRAINING_TOKENS = 512

# Active neurons of all: 30 of the published layer's 5632.
ACTIVE_SHARE = 30 / 5632


def parse_shapes(text: str) -> tuple[Shape, ...]:
  """Shapes from M x K x N, separated by commas: 16384x2048x5632,64x576x1536.

  Raises:
    argparse.ArgumentTypeError: The text is not of that form.
  """
  shapes = []
  for part in text.split(","):
    sizes = part.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
      raise argparse.ArgumentTypeError(
        f"{part!r} is no shape: write tokens x d_model x d_ff, such as"
        " 16384x2048x5632"
      )
    shape = Shape(*map(int, sizes))
    if min(shape) < 1:
      raise argparse.ArgumentTypeError(f"{part!r} has a size below 1")
    shapes.append(shape)
  return tuple(shapes)
