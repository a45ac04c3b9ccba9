"""What packing a pre-activation as TwELL words gives, in plain numpy."""

from typing import NamedTuple

import ml_dtypes
import numpy as np


class Words(NamedTuple):
  """int32 words [tokens, tiles · slots] and counts [tiles, tokens]."""

  words: np.ndarray
  counts: np.ndarray


def pack_words(z: np.ndarray, *, tile_width: int, slots: int) -> Words:
  """Packs float32 z [tokens, neurons], entry by entry."""
  tokens, neurons = z.shape
  tiles = neurons // tile_width
  with np.errstate(invalid="ignore", over="ignore"):
    rounded = z.astype(ml_dtypes.bfloat16)
  is_nan = np.isnan(z)
  bits = np.where(is_nan, 0x7FFF, rounded.view(np.uint16)).astype(np.int64)
  # Bits, since comparisons may take subnormals for zero.
  is_active = is_nan | ((bits != 0) & (bits < 0x8000))
  words = np.zeros((tokens, tiles, slots), np.uint32)
  counts = np.zeros((tiles, tokens), np.int32)
  for token, neuron in zip(*np.nonzero(is_active)):
    tile, offset = divmod(neuron, tile_width)
    slot = counts[tile, token]
    if slot < slots:
      words[token, tile, slot] = bits[token, neuron] << 16 | offset
    counts[tile, token] += 1
  return Words(words.reshape(tokens, tiles * slots).view(np.int32), counts)
