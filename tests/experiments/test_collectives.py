"""Reading the collectives of a program: each form, and a step that is known."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments import collectives
from experiments.collectives import Collective

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def program(*lines, others=()):
  return "\n".join(
    [
      "HloModule jit_step, is_scheduled=true",
      "",
      *others,
      "ENTRY %main.1 (param.0: f32[8]) -> f32[8] {",
      "  %param.0 = f32[8]{0} parameter(0)",
      *lines,
      "}",
    ]
  )


def read(*lines, others=()):
  return collectives.read(program(*lines, others=others), mesh=MESH)


def all_reduce(groups):
  return (
    "  ROOT %all-reduce.1 = f32[8]{0} all-reduce(%param.0), channel_id=1,"
    f" replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
  )


@pytest.mark.parametrize(
  ("groups", "axes", "size"),
  [
    ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), 2),
    ("{{0,2},{1,3},{4,6},{5,7}}", ("fsdp",), 2),
    ("{{0,4},{5,1},{2,6},{3,7}}", ("data",), 2),
    ("{{0,1,2,3},{4,5,6,7}}", ("fsdp", "tensor"), 4),
    ("{}", ("data", "fsdp", "tensor"), 8),
    ("{{0,1,2,3,4,5,6,7}}", ("data", "fsdp", "tensor"), 8),
    ("{{0,7},{1,6},{2,5},{3,4}}", ("?",), 2),
    ("[4,2]<=[8]", ("tensor",), 2),
    ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",), 2),
    ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp"), 4),
    ("[1,8]<=[8]", ("data", "fsdp", "tensor"), 8),
    ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}", ("fsdp",), 2),
    (
      "mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','tensor'}",
      ("data", "tensor"),
      4,
    ),
    # Of another order than ours, and with an axis of its own.
    ("mesh['a'=4,'b'=2] {'b'}", ("tensor",), 2),
  ],
)
def test_groups(groups, axes, size):
  (found,) = read(all_reduce(groups))
  assert (found.axes, found.group_size) == (axes, size)


def test_axes_of_one_device_are_not_named():
  text = program(all_reduce("[1,4]<=[4]"))
  mesh = {"data": 1, "fsdp": 4, "tensor": 1}
  (found,) = collectives.read(text, mesh=mesh)
  assert found.axes == ("fsdp",)


@pytest.mark.parametrize(
  ("kind", "sent"),
  [
    ("all-reduce", 2 * 32 * 3 // 4),
    ("all-gather", 32 * 3 // 4),
    ("all-to-all", 32 * 3 // 4),
    ("reduce-scatter", 32 * 3),
    ("collective-permute", 32),
  ],
)
def test_bytes(kind, sent):
  (found,) = read(all_reduce("[2,4]<=[8]").replace("all-reduce(", f"{kind}("))
  assert found == Collective(kind, ("f32[8]",), ("fsdp", "tensor"), 4, 1, 32)
  assert found.sent_bytes == sent


def test_source_target_pairs():
  (found,) = read(
    "  ROOT %shift = bf16[4,8]{1,0} collective-permute(%param.0), channel_id=1,"
    " source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"
  )
  assert (found.kind, found.axes) == ("collective-permute", ("tensor",))
  assert found.sent_bytes == 64


def test_an_asynchronous_pair_is_one():
  found = read(
    "  %ag.1 = ((f32[4]{0}, bf16[2,3]{1,0}), (f32[8]{0}, /*index=1*/bf16[4,3]"
    "{1,0})) all-gather-start(%param.0, %other), channel_id=1,"
    " replica_groups=[4,2]<=[8], dimensions={0}",
    "  %work = f32[8]{0} negate(%param.0)",
    "  %ag.2 = (f32[8]{0}, bf16[4,3]{1,0}) all-gather-done(%ag.1)",
    "  %uses = f32[8]{0} fusion(%ag.2), kind=kLoop, calls=%all-gather.9",
  )
  shapes = ("f32[8]", "bf16[4,3]")
  assert found == [Collective("all-gather", shapes, ("tensor",), 2, 1, 32 + 24)]


def computation(name, *lines):
  return f"%{name} (p: f32[8]) -> f32[8] {{", *lines, "}", ""


def loop(body, count):
  known = f'{{"known_trip_count":{{"n":"{count}"}}}}' if count else "{}"
  return (
    "  %loop = (s32[], f32[8]{0}) while(%tuple), condition=%cond,"
    f" body=%{body}, backend_config={known}"
  )


def test_loops_multiply():
  inner = computation("inner", all_reduce("[4,2]<=[8]"))
  outer = computation("outer", loop("inner", 3), all_reduce("[1,8]<=[8]"))
  found = read(loop("outer", 5), others=[*inner, *outer])
  assert [(c.axes, c.runs) for c in found] == [
    (("tensor",), 15),
    (("data", "fsdp", "tensor"), 5),
  ]
  assert collectives.total_bytes(found) == {
    ("all-reduce", "tensor"): 15 * 32,
    ("all-reduce", "data+fsdp+tensor"): 5 * 56,
  }


def test_a_loop_of_unknown_length():
  inner = computation("inner", all_reduce("[4,2]<=[8]"))
  found = read(loop("inner", None), others=inner)
  assert found[0].runs is None
  with pytest.raises(ValueError, match=r"f32\[8\] runs in a loop of unknown"):
    collectives.total_bytes(found)


def test_calls_and_branches():
  others = [
    line
    for name in ("called", "first", "second", "waiting")
    for line in computation(name, all_reduce("[4,2]<=[8]"))
  ]
  found = read(
    "  %c = f32[8]{0} call(%param.0), to_apply=%called",
    "  %d = f32[8]{0} conditional(%i, %param.0, %param.0),"
    " branch_computations={%first, %second}",
    "  %e = ((f32[8]{0}), f32[8]{0}) async-start(%param.0), calls=%waiting",
    # What a reduction applies is no collective of the device's own.
    "  %f = f32[] reduce(%param.0), to_apply=%called",
    others=others,
  )
  assert len(found) == 4


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("nothing", "no ENTRY"),
    (program("  %a = f32[8]{0} all-reduce(%p), to_apply=%add"), "no groups"),
    (program(all_reduce("everyone")), "unknown form: 'everyone"),
    (
      program(all_reduce("[4,2]<=[8]").replace("f32[8]", "q7[8]")),
      "dtype q7 of a collective",
    ),
    (
      program("  %a = (f32[8]{0}, f32[8]{0}) all-reduce-start(%p)"),
      "a is not waited for",
    ),
  ],
)
def test_other_text(text, message):
  with pytest.raises(ValueError, match=message):
    collectives.read(text, mesh=MESH)


def test_a_compiled_program():
  """Two layers whose weights, in slices, are gathered; gradients are summed."""
  mesh = jax.make_mesh(
    (2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
  )
  rows, batch, once = (
    NamedSharding(mesh, spec)
    for spec in (
      PartitionSpec(None, "fsdp", None),
      PartitionSpec(("data", "fsdp"), None),
      PartitionSpec(),
    )
  )

  @functools.partial(
    jax.jit, in_shardings=(rows, batch), out_shardings=(once, rows)
  )
  @jax.value_and_grad
  def step(weights, x):
    def layer(x, weight):
      weight = jax.lax.with_sharding_constraint(weight, once)
      y = jax.lax.with_sharding_constraint(jnp.tanh(x @ weight), batch)
      return y, None

    return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

  shapes = (
    jax.ShapeDtypeStruct((2, 64, 64), jnp.float32),
    jax.ShapeDtypeStruct((8, 64), jnp.float32),
  )
  text = step.lower(*shapes).compile().as_text()
  assert text is not None
  found = collectives.read(text, mesh=dict(mesh.shape))
  gathers = [c for c in found if c.kind == "all-gather"]
  matrix = 64 * 64 * 4
  assert gathers
  assert {c.axes for c in gathers} == {("fsdp",)}
  # Forward and, unless kept, backward; both layers.
  gathered = sum((c.runs or 0) * c.result_bytes for c in gathers)
  assert gathered in (2 * matrix, 4 * matrix)
  reductions = [c for c in found if c.kind in ("all-reduce", "reduce-scatter")]
  summed = [c for c in reductions if c.result_bytes > 1000]
  # Every device's part of each gradient, to all or to those that keep it.
  assert {c.runs for c in summed} == {2}
  assert {axis for c in summed for axis in c.axes} == {"data", "fsdp"}
