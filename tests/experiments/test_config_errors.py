"""A mistake in a config: one line that says what and how, nothing written."""

import json
from typing import Any

import jax
import pytest

from experiments import train
from tests.experiments import programs
from twell_jax import nn, training


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
  """A folder with a checkpoint of step 3, and the config that made it."""
  workdir = tmp_path_factory.mktemp("trained")
  config = programs.tiny_config({"data.corpus": str(corpus)})
  data = train.load_data(config, workdir)
  mesh = training.make_mesh(devices=jax.devices()[:1])
  model = training.abstract_model(
    train.model_config(config), nn.Partitioning(mesh)
  )
  options = train.train_options(config)
  optimizer = training.make_optimizer(options.optimizer, steps=options.steps)
  with training.Checkpoints(workdir / "checkpoints") as checkpoints:
    checkpoints.save(
      training.initial_state(model, optimizer, seed=0),
      iter(data.train),
      step=3,
      config=config.to_dict(),
      held_out_loss=None,
    )
  return workdir, config


def listing(folder):
  return {
    path: path.stat().st_mtime_ns
    for path in (folder, *folder.rglob("*"))
    if path.exists()
  }


def complaint(workdir, config, *, start="fresh"):
  """The one line with which a run is refused."""
  before = listing(workdir)
  with pytest.raises(ValueError, match=r"\S") as error:
    train.run(config, workdir=workdir, start=start)
  assert listing(workdir) == before
  message = str(error.value)
  assert len(message.splitlines()) == 1
  return message


# Overrides, and what the line must name: the value, and the remedy.
MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
  "heads": (
    {"model.d_model": 30},
    ("d_model = 30", "num_heads = 4", "change one of them"),
  ),
  "kv_heads": (
    {"model.num_kv_heads": 3},
    ("num_kv_heads = 3", "num_heads = 4", "choose a divisor"),
  ),
  "implementation": (
    {"model.implementation": "cuda"},
    ("implementation = 'cuda'", "choose one of", "xla"),
  ),
  "activation": (
    {"model.activation": "gelu"},
    ("activation = 'gelu'", "choose one of", "silu"),
  ),
  "attention": (
    {"model.attention": "cudnn"},
    ("attention = 'cudnn'", "dtype = 'float32'", "attention = 'full'"),
  ),
  "residuals": (
    {"model.ffn_residuals": "dropped"},
    ("ffn_residuals = 'dropped'", "choose one of", "recomputed"),
  ),
  "ell_width": (
    {"model.ell_width": -8},
    ("width = -8", "at least 1"),
  ),
  "dense_rows": (
    {"model.dense_rows": 4},
    ("dense_rows = 4", "set ell_width too"),
  ),
  "dense_above": (
    {"model.dense_above": -0.5},
    ("dense_above = -0.5", "from 0"),
  ),
  "steps": ({"steps": 0}, ("steps = 0", "at least 1")),
  "warmup": (
    {"optimizer.warmup_steps": 8},
    ("warmup_steps = 8", "steps = 8", "fewer warm-up steps or more steps"),
  ),
  "learning_rate": (
    {"optimizer.learning_rate": -0.1},
    ("learning_rate = -0.1", "above 0"),
  ),
  "l1": ({"l1.coefficient": -1.0}, ("coefficient = -1.0", "0 or more")),
  "target": (
    {"l1.target_active": 64.0},
    ("target_active = 64.0", "below d_ff = 64"),
  ),
  "target_of_the_twin": (
    {"l1.target_active": 8.0, "l1.coefficient": 0.0},
    ("target_active = 8.0", "needs a coefficient above 0"),
  ),
  "dead_neurons": (
    {"dead_neurons.window_tokens": 0},
    ("window_tokens = 0", "from 1 to"),
  ),
  "mesh": (
    {"mesh.data": 1, "mesh.tensor": 3},
    ("tensor = 3", "4 devices", "must multiply to that number"),
  ),
  "batch": (
    {"data.batch_size": 6},
    ("batch of 6", "change batch_size"),
  ),
  "held_out": (
    {"data.held_out_fraction": 0.0},
    ("held_out_fraction", "0.0"),
  ),
  "vocab_size": (
    {"model.vocab_size": 100},
    ("vocab_size=100", "at least 257"),
  ),
  "tokenizer": (
    {"data.tokenizer": "absent.json"},
    ("'absent.json'", "no such tokenizer.json"),
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, corpus, tmp_path):
  overrides, words = MISTAKES[name]
  config = programs.tiny_config({"data.corpus": str(corpus)} | overrides)
  line = complaint(tmp_path / "run", config)
  for word in words:
    assert word in line


def test_a_corpus_without_text(tmp_path):
  (tmp_path / "photos").mkdir()
  (tmp_path / "photos" / "holiday.jpeg").write_bytes(b"\xff\xd8")
  for name in ("photos", "absent"):
    corpus = str(tmp_path / name)
    config = programs.tiny_config({"data.corpus": corpus})
    line = complaint(tmp_path / "run", config)
    assert corpus in line
    assert "accepted are .txt" in line


def test_a_tokenizer_of_another_vocabulary(trained, tmp_path):
  workdir, config = trained
  (tokenizer,) = workdir.rglob("tokenizer.json")
  vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
  assert len(vocabulary) == 300
  config = config.copy_and_resolve_references()
  config.data.tokenizer = str(tokenizer)
  config.model.vocab_size = 320
  line = complaint(tmp_path / "run", config)
  for word in (str(tokenizer), "vocab_size=320", "set vocab_size=300"):
    assert word in line


def test_resuming_where_nothing_is(corpus, tmp_path):
  workdir = tmp_path / "run"
  config = programs.tiny_config({"data.corpus": str(corpus)})
  line = complaint(workdir, config, start="resume")
  assert f"no checkpoint in {workdir / 'checkpoints'}" in line
  assert "start a new run" in line


def test_starting_where_a_run_is(trained):
  workdir, config = trained
  line = complaint(workdir, config)
  assert f"{workdir / 'checkpoints'} already has a checkpoint of step 3" in line
  assert "resume it" in line


@pytest.mark.parametrize(
  ("overrides", "shapes"),
  [
    ({"model.d_ff": 80}, ("(2, 64, 32)", "(2, 80, 32)")),
    ({"model.num_layers": 3}, ("(2, ", "(3, ")),
    ({"model.gated": False}, ("layers/ffn/up", "none")),
    ({"model.tie_embeddings": False}, ("head", "none")),
  ],
)
def test_resuming_a_model_of_another_shape(trained, overrides, shapes):
  workdir, config = trained
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(overrides)
  line = complaint(workdir, config, start="resume")
  for word in (str(workdir / "checkpoints" / "3"), *shapes):
    assert word in line
  assert "use the config it was trained with" in line
  assert training.saved_steps(workdir / "checkpoints") == [3]


@pytest.mark.parametrize(
  ("overrides", "change"),
  [
    ({"data.seq_len": 16}, "data.seq_len: 32 -> 16"),
    ({"seed": 7}, "seed: 0 -> 7"),
  ],
)
def test_resuming_with_another_input(trained, overrides, change):
  workdir, config = trained
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(overrides)
  line = complaint(workdir, config, start="resume")
  assert change in line
  assert "train in another workdir" in line


def test_a_run_from_before_a_field_was_there(trained, monkeypatch):
  """It is as if the field had its default then."""
  workdir, config = trained
  read = training.Checkpoints.config

  def early(checkpoints):
    saved = read(checkpoints)
    data = {k: v for k, v in saved["data"].items() if k != "documents"}
    return {
      k: v for k, v in saved.items() if k not in ("non_finite", "train_key")
    } | {"data": data}

  monkeypatch.setattr(training.Checkpoints, "config", early)
  saved = train.read_saved(workdir)
  assert saved == train.Saved(config.to_dict(), None)
  changed = config.copy_and_resolve_references()
  changed.data.documents = "separate"
  assert "data.documents: 'joined' -> 'separate'" in complaint(
    workdir,
    changed,
    start="resume",
  )


def test_resuming_with_text_that_has_changed(tmp_path):
  """The config is the same, and so are the names of its files."""
  folder = tmp_path / "text"
  programs.write_corpus(folder)
  tokenizer = tmp_path / "tokenizer.json"
  config = programs.tiny_config({"data.corpus": str(folder), "steps": 3})
  loaded = train.load_data(config, tmp_path / "other")
  loaded.tokenizer.tokenizer.save(str(tokenizer))
  config.data.tokenizer = str(tokenizer)
  workdir = tmp_path / "run"
  train.run(config, workdir=workdir)
  path = folder / "1.txt"
  text = path.read_text()
  path.write_text(text + "and more\n")
  with pytest.raises(ValueError, match=r"the text that data\.corpus names is"):
    train.run(config, workdir=workdir, start="resume")
  # Brought back, though it is a newer file.
  path.write_text(text)
  assert train.run(config, workdir=workdir, start="resume").result.step == 3


# Arguments after --config and --workdir, and the words of the one line.
COMMAND_LINES = {
  "section": (
    ["--config.modle.d_ff=64"],
    ("modle", 'Did you mean "model"'),
  ),
  "field": (
    ["--config.model.d_fff=64"],
    ("d_fff", 'Did you mean "d_ff"'),
  ),
  "type": (["--config.steps=many"], ("--config.steps=many", "int")),
  "file": (["--config=configs/absent.py"], ("configs/absent.py",)),
  "file after a blank": (["--config", "configs"], ("configs",)),
  "variant": (["--config=configs/paper.py:3b"], ("'3b' begins", "0p5b, 1b")),
  "dashes": (["config.steps=5"], ("config.steps=5", "--")),
  # One that only the program finds: the exit code and the form are the same.
  "value": (["--config.steps=0"], ("steps = 0", "at least 1")),
}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_mistakes_on_the_command_line(name, environment, corpus, tmp_path):
  arguments, words = COMMAND_LINES[name]
  workdir = tmp_path / "run"
  process = programs.run(
    [
      "-m",
      "experiments.train",
      f"--workdir={workdir}",
      f"--config={programs.CONFIG_FILE}",
      *arguments,
    ],
    environment=environment,
  )
  assert process.returncode == 2
  (line,) = process.stderr.splitlines()
  assert line.startswith("error: ")
  assert r"\n" not in line
  for word in words:
    assert word in line
  assert process.stdout == ""
  assert not workdir.exists()
