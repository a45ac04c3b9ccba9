"""What is checked and timed: sizes, the names of stages, targets.

A stage is one check or one measurement. Its name says what it is, so that a
hang can be told by it, and the targets find their figures by it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

UNIFORM = "uniform"
# Firing rates in proportion to gamma-distributed numbers of that shape: the
# smaller, the more a few neurons do.
RATES: Mapping[str, float | None] = {
  UNIFORM: None,
  "gamma 1.0": 1.0,
  "gamma 0.1": 0.1,
}
HEAVY_TAIL = "gamma 0.1"


class Shape(NamedTuple):
  """Of a layer and the tokens of a call."""

  tokens: int
  d_model: int
  d_ff: int


class Packing(NamedTuple):
  """Tiles of TwELL, and the CTAs of a cluster."""

  tile_width: int
  slots: int
  cluster: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of everything.

  Attributes:
    activities: What layers are checked with, names in inputs.gate_inputs.
    other_activities: Those of them for the further shapes.
    counts: What rows of entries are checked with, names in inputs.entries.
    rates: Distributions of firing rates, names in RATES.
    packings: Of the checks of gate_pack, besides the default configs.
    pack: Of the checks of gate_pack; more tiles than multiprocessors.
    pack_others: Further shapes, each with the default config.
    gather: Of the checks of the gathered kernels; d_ff rows to choose from.
    gather_others: Further shapes.
    gather_width: Slots of a row there.
    op: Of the checks of the whole op.
    op_others: Further shapes.
    layer: Width and neurons of the layer that is timed, as (d_model, d_ff).
    prefill_tokens: Tokens of a forward pass that is timed.
    decode_tokens: Tokens of a decoding step that is timed.
    training_tokens: Tokens of a training step that is timed.
    active: Mean active neurons per token.
    training_active: Likewise, where a training step is timed.
    decode_layers: Layers of a decoding step, each with weights of its own so
      that they come from memory, not from a cache.
    calls: Calls that are started at once and timed together, so that the
      host's part is hidden; fewer at many tokens.
    min_seconds: How long the contenders of a stage are timed together.
    min_repeats: Rounds, at least.
    calibration_tokens: Tokens from which firing rates are measured.
    hot_granule: What the number of hot neurons is a multiple of.
    stage_limit_s: A stage that takes longer hangs. Compiling is part of it.
  """

  activities: tuple[str, ...]
  other_activities: tuple[str, ...]
  counts: tuple[str, ...]
  rates: tuple[str, ...]
  packings: tuple[Packing, ...]
  pack: Shape
  pack_others: tuple[Shape, ...]
  gather: Shape
  gather_others: tuple[Shape, ...]
  gather_width: int
  op: Shape
  op_others: tuple[Shape, ...]
  layer: tuple[int, int]
  prefill_tokens: tuple[int, ...]
  decode_tokens: tuple[int, ...]
  training_tokens: tuple[int, ...]
  active: tuple[int, ...]
  training_active: tuple[int, ...]
  decode_layers: int
  calls: int
  min_seconds: float
  min_repeats: int
  calibration_tokens: int
  hot_granule: int
  stage_limit_s: float


FULL = Sizes(
  activities=(
    "heavy tail",
    "edges",
    "nothing",
    "everything",
    "one token",
    "not finite",
    "subnormal",
  ),
  other_activities=("heavy tail", "edges", "not finite"),
  counts=("heavy tail", "nothing", "full rows", "one row", "not finite"),
  rates=(UNIFORM, HEAVY_TAIL, "gamma 1.0"),
  packings=tuple(
    Packing(*tile, cluster)
    for tile in ((256, 32), (128, 16), (64, 8))
    for cluster in (1, 2)
  ),
  pack=Shape(2048, 2048, 5632),
  pack_others=(
    Shape(1, 2048, 5632),
    Shape(64, 2048, 5632),
    Shape(77, 576, 1000),
    Shape(300, 4096, 14336),
  ),
  gather=Shape(1024, 2048, 5632),
  gather_others=(
    Shape(1, 2048, 5632),
    Shape(77, 768, 1000),
    Shape(300, 4096, 14336),
  ),
  gather_width=256,
  op=Shape(1536, 2048, 5632),
  op_others=(Shape(1, 2048, 5632), Shape(77, 576, 1000)),
  layer=(2048, 5632),
  prefill_tokens=(16384, 131072),
  decode_tokens=(1, 8, 64),
  training_tokens=(16384,),
  active=(30, 10, 100, 300),
  training_active=(30, 100),
  decode_layers=4,
  calls=8,
  min_seconds=0.6,
  min_repeats=7,
  calibration_tokens=65536,
  hot_granule=128,
  stage_limit_s=120.0,
)

# What can be interpreted in a few minutes. XLA:CPU takes subnormals for 0.
DRY = Sizes(
  activities=("edges", "not finite"),
  other_activities=("edges", "not finite"),
  counts=("heavy tail", "not finite"),
  rates=(HEAVY_TAIL,),
  packings=(Packing(256, 32, 1), Packing(64, 8, 2)),
  pack=Shape(16, 64, 256),
  pack_others=(Shape(1, 33, 100),),
  gather=Shape(4, 256, 40),
  gather_others=(Shape(1, 256, 7),),
  gather_width=9,
  op=Shape(4, 33, 72),
  op_others=(Shape(1, 5, 20),),
  layer=(256, 64),
  prefill_tokens=(4,),
  decode_tokens=(1,),
  training_tokens=(4,),
  active=(2,),
  training_active=(2,),
  decode_layers=2,
  calls=1,
  min_seconds=0.0,
  min_repeats=3,
  calibration_tokens=2048,
  hot_granule=16,
  stage_limit_s=300.0,
)


def forward_name(tokens: int, active: int, rates: str) -> str:
  """The stage that times a forward pass."""
  return f"forward of {tokens} tokens, {active} active, {rates} rates"


def decode_name(tokens: int, active: int, rates: str) -> str:
  """The stage that times a decoding step."""
  return f"decode of {tokens} tokens, {active} active, {rates} rates"


def gate_name(tokens: int) -> str:
  """The stage that times gate_pack against the dense gate product."""
  return f"gate product of {tokens} tokens"


def parts_name(tokens: int, active: int, rates: str) -> str:
  """The stage that times what a forward pass consists of."""
  return f"parts of {forward_name(tokens, active, rates)}"


def training_name(tokens: int, active: int, rates: str) -> str:
  """The stage that times a forward and a backward pass."""
  return f"training of {tokens} tokens, {active} active, {rates} rates"


def training_parts_name(tokens: int, active: int, rates: str) -> str:
  """The stage that times what these two consist of."""
  return f"parts of {training_name(tokens, active, rates)}"


class Target(NamedTuple):
  """A ratio to the dense time that the project sets itself.

  Attributes:
    stage: The stage that measures it.
    contender: Whose ratio it is.
    at_least: What it should be.
  """

  stage: str
  contender: str
  at_least: float


TARGETS = (
  Target(gate_name(16384), "gate_pack", 0.85),
  Target(gate_name(131072), "gate_pack", 0.85),
  Target(forward_name(16384, 30, UNIFORM), "row-gathered", 1.2),
  Target(forward_name(16384, 30, HEAVY_TAIL), "hot/cold", 1.4),
  Target(decode_name(1, 30, UNIFORM), "row-gathered", 2.0),
  Target(decode_name(8, 30, UNIFORM), "row-gathered", 2.0),
)


def verdicts(stages: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
  """The targets with what was measured, from the results by stage."""
  found = []
  for target in TARGETS:
    contenders = stages.get(target.stage, {}).get("contenders", {})
    measured = contenders.get(target.contender, {}).get("ratio_to_dense")
    verdict = "not measured"
    if measured is not None:
      verdict = "met" if measured >= target.at_least else "missed"
    found.append({**target._asdict(), "measured": measured, "verdict": verdict})
  return found
