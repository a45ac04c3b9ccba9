"""The models of arXiv 2603.23198, sparse and dense, on GPUs.

    python -m experiments.train --config=configs/paper.py:2b --workdir=DIR

After the colon stand a size and, if wanted, words, with commas between:

    0p5b 1b 1p5b 2b   the size
    non_gated         layers without up projection, 8192 neurons instead of 5632
    dense             the baseline: the same ReLU model without L1 (λ = 0),
                      computed by dense products
    silu              the other dense baseline: SiLU instead of ReLU
    reinit            re-initialises dead neurons after every update

All train on 512 sequences of 2048 tokens an update, 1,048,576 tokens, cut into
8 micro-batches of 8 sequences on each of 8 devices: 131,072 tokens a pass, so
16,384 of a device. Published for 8 H100, by arXiv 2603.23198 (accuracy is the
mean of seven tasks, speed that of training; dense -> sparse):

    size  layers  parameters     steps   accuracy, %    tokens / ms of a device
    0p5b       8    511,739,904  10,000  40.4 -> 40.4   97.3 -> 95.9
    1b        18  1,025,583,104  20,000  44.6 -> 44.7   48.6 -> 52.1
    1p5b      28  1,539,426,304  30,000  46.4 -> 46.2   31.8 -> 35.5
    2b        38  2,053,269,504  40,000  49.1 -> 48.8   22.4 -> 27.3

with 29 of 5632 neurons active per token on average (39 at 0p5b, 24 at 2b; 911
without L1) and more than 30 % of them dead; at 1p5b, SiLU has 47.1 % and
re-initialisation brings the sparse model to 46.6 %. Their L1 coefficient, 2e-5,
was multiplied by 64 in the code that used it (accumulation steps × devices): it
is λ = 1.28e-3 here. Nothing of this has been reproduced yet, for want of GPUs.
Every field is explained in base.py.
"""

from ml_collections import ConfigDict

from configs import base

# Size: layers and updates.
_SIZES = {
  "0p5b": (8, 10_000),
  "1b": (18, 20_000),
  "1p5b": (28, 30_000),
  "2b": (38, 40_000),
}
_WORDS = ("non_gated", "dense", "silu", "reinit")


def get_config(variant: str = "1p5b") -> ConfigDict:
  """The run that words such as "2b" or "0p5b,non_gated,dense" name."""
  size, *words = variant.split(",")
  _check(variant, size, words)
  config = base.get_config()
  config.model.num_layers, config.steps = _SIZES[size]
  config.accumulation_steps = 8
  config.mesh.update(data=-1, fsdp=8)
  config.data.update(
    # FineWeb-Edu without duplicates, in the SmolLM corpus.
    corpus=(
      "hf://datasets/HuggingFaceTB/smollm-corpus/fineweb-edu-dedup/*.parquet"
    ),
    # End of text, id 0, follows every document; sequences join documents.
    tokenizer="hf://HuggingFaceTB/SmolLM2-360M/tokenizer.json",
    store="shards",
  )
  config.eval.batches = 10  # of 1,048,576 tokens
  config.model.update(
    remat="attention",
    attention="cudnn",
    cross_entropy="chunked",
    implementation="mosaic",  # Hopper's; "xla" on other devices
  )
  if "non_gated" in words:
    config.model.update(gated=False, d_ff=8192)
  if "dense" in words:
    config.model.implementation = "reference"
  if "silu" in words:
    config.model.update(activation="silu", implementation="")
  if "dense" in words or "silu" in words:
    config.l1.coefficient = 0.0
  if "reinit" in words:
    config.dead_neurons.reinitialize_every_steps = 1
  return config


def _check(variant: str, size: str, words: list[str]) -> None:
  if size not in _SIZES:
    raise ValueError(
      f"{variant!r} begins with no size: write one of {', '.join(_SIZES)} first"
    )
  for word in words:
    if word not in _WORDS:
      raise ValueError(
        f"{word!r} in {variant!r} is unknown: use {', '.join(_WORDS)}"
      )
  if "dense" in words and "silu" in words:
    raise ValueError(f"{variant!r} names two baselines: dense or silu")
  if "reinit" in words and ("dense" in words or "silu" in words):
    raise ValueError(
      f"{variant!r}: reinit is for sparse models, leave out the baseline"
    )
