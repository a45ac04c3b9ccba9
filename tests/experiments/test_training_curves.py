import json

from experiments import train, training_curves


def records(active, dead):
  """Two layers; the second does not change."""
  lines = []
  for step in (10, 20):
    means = [active / step, 4.0]
    lines.append(
      {
        "kind": "train",
        "step": step,
        "active_mean": means,
        "dead_fraction": [dead * step / 10, 0.0],
        "l1_coefficient": 0.00123456,
      }
    )
    lines.append(
      {
        "kind": "held_out",
        "step": step,
        "loss": 5.0 - step / 10 + dead,
        "active_mean": means,
      }
    )
  return lines


def test_every_run_is_a_run_of_its_own():
  configs = [training_curves.config_of(run) for run in training_curves.RUNS]
  options = [train.train_options(config) for config in configs]
  assert len({str(option) for option in options}) == len(options)
  assert {option.steps for option in options} == {1200}
  coefficients = [option.l1.coefficient for option in options]
  assert coefficients[0] == 0
  assert all(coefficients[1:])


def test_writes_tables_and_plots(give_flags, monkeypatch, tmp_path):
  workdir, output = tmp_path / "work", tmp_path / "results" / "curves"
  trained = []

  def train_to_end(config, folder):
    trained.append(config)
    number = len(trained)
    text = "".join(json.dumps(r) + "\n" for r in records(100 * number, 0.1))
    (folder / "metrics.jsonl").write_text(text)

  monkeypatch.setattr(training_curves.quickstart, "train_to_end", train_to_end)
  give_flags(workdir=str(workdir), output=str(output))
  assert training_curves.main() == 0
  assert [config.data.cache_dir for config in trained] == [
    str(workdir / "data")
  ] * 4
  lines = output.with_suffix(".md").read_text().splitlines()
  assert "| λ = 0 | 3.1000 | +0.0% | 4.5 | 0.22% | 90.0% | 0.00123 |" in lines
  assert any(line.startswith("| λ = 0.002, re-init") for line in lines)
  figures = json.loads(output.with_suffix(".json").read_text())
  assert figures["runs"]["target"]["held_out"]["active"] == [22.0, 12.0]
  assert figures["runs"]["l1"]["last"]["alive_by_layer"] == [0.8, 1.0]
  for what in ("loss", "active", "alive"):
    path = output.with_name(f"curves_{what}.png")
    assert f"![{what}]({path.name})" in lines
    assert path.read_bytes().startswith(b"\x89PNG")
