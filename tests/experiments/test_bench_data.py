from experiments import bench_data


def test_measures(monkeypatch, tmp_path):
  """On a corpus of a few lines: that all figures come, not what they are."""
  texts = [f"a line of document {i}, and another\n" * 40 for i in range(60)]

  class Prepared:
    train = texts

  monkeypatch.setattr(
    bench_data.data, "prepare_corpus", lambda *_, **__: Prepared
  )
  monkeypatch.setattr(bench_data, "VOCAB_SIZE", 290)
  monkeypatch.setattr(bench_data, "SEQ_LEN", 16)
  monkeypatch.setattr(bench_data, "BATCH_SIZE", 4)
  monkeypatch.setattr(bench_data.os, "sched_getaffinity", lambda _: {0})
  figures = bench_data.measure(tmp_path, files=2, batches=3)
  assert set(figures["tokens_per_s"]) == {
    "tokenise, 1 process",
    "read, documents joined",
    "read, documents separate",
  }
  assert all(rate > 0 for rate in figures["tokens_per_s"].values())
  assert figures["tokens_in_shards"] > 2 * 60
  figures["tokens_per_s"] = {"read": 389_200}
  text = bench_data.markdown(figures)
  assert "| read | 0.39 | 0.50 |" in text
  assert "on 2 shards of" in text
