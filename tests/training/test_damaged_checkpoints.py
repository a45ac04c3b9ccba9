"""Checkpoints that something has happened to."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twell_jax import training
from twell_jax.nn import Partitioning
from twell_jax.training.fingerprints import state_fingerprints

# Orbax begins to read all arrays, and abandons the others when one fails.
pytestmark = pytest.mark.filterwarnings(
  "ignore:.*_read_array_index_and_device_put"
)


@pytest.fixture(scope="module")
def model(config):
  mesh = training.make_mesh(devices=jax.devices()[:1])
  return training.abstract_model(config, Partitioning(mesh))


@pytest.fixture(scope="module")
def optimizer():
  options = training.OptimizerOptions(warmup_steps=0)
  return training.make_optimizer(options, steps=10)


@pytest.fixture(scope="module")
def states(model, optimizer):
  """The states of steps 4 and 8."""
  initial = training.initial_state(model, optimizer, seed=0)
  return {step: initial._replace(step=initial.step + step) for step in (4, 8)}


@pytest.fixture
def saved(tmp_path, states, corpus):
  """A folder with the checkpoints of both."""
  save(tmp_path, states, corpus)
  return tmp_path


def save(directory, states, corpus):
  batches = corpus.batches()
  with training.Checkpoints(directory) as checkpoints:
    for step, state in states.items():
      while batches.get_state()["next_index"] < step:
        next(batches)
      checkpoints.save(
        state,
        batches,
        step=step,
        config={"saved": step},
        held_out_loss=float(step),
      )


def largest_file(directory):
  return max(
    (path for path in directory.rglob("*") if path.is_file()),
    key=lambda path: path.stat().st_size,
  )


def truncate(directory):
  path = largest_file(directory / "state/ocdbt.process_0")
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(directory):
  path = largest_file(directory / "state/ocdbt.process_0")
  content = bytearray(path.read_bytes())
  content[len(content) // 3] ^= 16
  path.write_bytes(content)


def lose_shapes(directory):
  (directory / "state/_METADATA").unlink()


def lose_position(directory):
  (directory / "input/process_0-of-1.json").unlink()


def move_position(directory):
  path = directory / "input/process_0-of-1.json"
  path.write_text(json.dumps({"next_index": 7}))


def change_config(directory):
  (directory / "config/metadata").write_text('{"saved": 9}')


def change_number(directory):
  """As if an array had changed and could still be read."""
  path = directory / "fingerprints/metadata"
  content = json.loads(path.read_text())
  content["state"]["params/embedding"] = "float32:00000000"
  path.write_text(json.dumps(content))


def empty_metrics(directory):
  (directory / "metrics/metrics").write_text("")


DAMAGES = [
  (truncate, r"\w"),
  (flip_a_bit, r"\w"),
  (lose_shapes, "shapes of its arrays are missing"),
  (lose_position, "position of the input is missing"),
  (move_position, "its input is not what was saved"),
  (change_config, "its config is not what was saved"),
  (change_number, "1 of its arrays are .* params/embedding the first"),
]


@pytest.mark.parametrize(
  ("damage", "problem"), DAMAGES, ids=[d.__name__ for d, _ in DAMAGES]
)
def test_the_checkpoint_before_is_taken(
  saved, model, optimizer, corpus, caplog, damage, problem
):
  damage(saved / "8")
  abstract = training.abstract_state(model, optimizer)
  batches = corpus.batches()
  with training.Checkpoints(saved) as checkpoints:
    with (
      pytest.raises(ValueError, match=rf"damaged \(step 8: .*{problem}") as e,
    ):
      checkpoints.restore(abstract, batches, step=8)
    assert "\n" not in str(e.value)
    assert batches.get_state() == corpus.batches().get_state()
    with caplog.at_level("WARNING"):
      restored = checkpoints.restore(abstract, batches)
    assert int(restored.state.step) == 4
    assert restored.config == {"saved": 4}
    assert batches.get_state()["next_index"] == 4
  assert f"{saved / '8'} is damaged: " in caplog.text
  assert "Taking that of step 4" in caplog.text
  # Reading moves nothing: another program may be writing here.
  assert training.saved_steps(saved) == [4, 8]


def test_a_damaged_step_is_saved_again(saved, model, optimizer, corpus, states):
  truncate(saved / "8")
  empty_metrics(saved / "4")
  abstract = training.abstract_state(model, optimizer)
  with training.Checkpoints(saved) as checkpoints:
    assert int(checkpoints.restore(abstract).state.step) == 4
    checkpoints.save(
      states[8], corpus.batches(), step=8, config={}, held_out_loss=None
    )
    checkpoints.wait()
    assert int(checkpoints.restore(abstract).state.step) == 8
    assert checkpoints.steps == [4, 8]
  # Only what is in the way is moved.
  assert {path.name for path in saved.iterdir()} == {"4", "8", "8.damaged"}


def test_none_can_be_read(saved, model, optimizer):
  for step in ("4", "8"):
    lose_shapes(saved / step)
    change = saved / step / "config/metadata"
    change.write_text("{")
  with training.Checkpoints(saved) as checkpoints:
    for read in (
      lambda: checkpoints.restore(training.abstract_state(model, optimizer)),
      checkpoints.config,
    ):
      with pytest.raises(ValueError, match=r"can be read .*step 8: .*step 4: "):
        read()


def test_early_checkpoints_have_no_fingerprints(
  saved, model, optimizer, caplog
):
  for path in (saved / "8/fingerprints").iterdir():
    path.unlink()
  (saved / "8/fingerprints").rmdir()
  with training.Checkpoints(saved) as checkpoints:
    restored = checkpoints.restore(training.abstract_state(model, optimizer))
  assert int(restored.state.step) == 8
  assert "step 8 is from before there were fingerprints" in caplog.text


@pytest.mark.parametrize("positions", [[4, 4], [4, 5]])
def test_saved_by_another_number_of_processes(
  saved, model, optimizer, corpus, positions
):
  folder = saved / "8/input"
  (folder / "process_0-of-1.json").unlink()
  for process, position in enumerate(positions):
    path = folder / f"process_{process}-of-2.json"
    path.write_text(json.dumps({"next_index": position}))
  fingerprints = saved / "8/fingerprints/metadata"
  content = json.loads(fingerprints.read_text())
  other = json.loads((saved / "4/fingerprints/metadata").read_text())
  fingerprints.write_text(json.dumps(content | {"input": other["input"]}))
  batches = corpus.batches()
  abstract = training.abstract_state(model, optimizer)
  with training.Checkpoints(saved) as checkpoints:
    if positions[0] == positions[1]:
      checkpoints.restore(abstract, batches)
      assert batches.get_state()["next_index"] == 4
    else:
      with pytest.raises(ValueError, match="resume with as many, not 1"):
        checkpoints.restore(abstract, batches)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path, states, corpus):
  params = states[4].params | {"embedding": states[4].params["embedding"] / 0}
  with (
    training.Checkpoints(tmp_path) as checkpoints,
    pytest.raises(
      FloatingPointError, match="params/embedding is not finite at step 4"
    ),
  ):
    checkpoints.save(
      states[4]._replace(params=params),
      corpus.batches(),
      step=4,
      config={},
      held_out_loss=1.0,
    )
  assert list(tmp_path.iterdir()) == []


def test_fingerprints_change_with_any_bit_and_with_no_mesh():
  rng = np.random.default_rng(0)
  arrays = {
    "float32": rng.normal(size=(4, 6)).astype(np.float32),
    "bfloat16": jnp.asarray(rng.normal(size=(8,)), jnp.bfloat16),
    "int32": rng.integers(-9, 9, (4, 2, 2)).astype(np.int32),
    "bool": rng.random((4, 4)) > 0.5,
    "scalar": np.float32(3),
  }
  mesh = training.make_mesh(data=4)

  def fingerprints(axes=(None,), **changes):
    def place(array):
      spec = axes if np.ndim(array) else ()
      return jax.device_put(array, jax.NamedSharding(mesh, jax.P(*spec)))

    return state_fingerprints(jax.tree.map(place, arrays | changes))

  sums = fingerprints().sums
  assert fingerprints(axes=("data",)).sums == sums
  assert sums["float32"].startswith("float32:")
  for name, array in arrays.items():
    changed = np.array(array)
    each_byte = changed.reshape(-1).view(np.uint8)
    each_byte[rng.integers(each_byte.size)] ^= 1
    others = fingerprints(**{name: changed}).sums
    assert [n for n in sums if others[n] != sums[n]] == [name]
  swapped = np.flip(arrays["float32"], 0)
  assert fingerprints(float32=swapped).sums["float32"] != sums["float32"]
  infinite = np.full((4, 6), np.inf, np.float32)
  assert fingerprints(float32=infinite).not_finite == ["float32"]
