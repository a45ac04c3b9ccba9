import pytest

from experiments import memory_slots

REPORT = """\
Memory Space: default (color=0)
Total bytes: 1572888 (1.50MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   128.0MiB(100%);  128.0MiB;            0;       1; f32[3,2048,2048]

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    30.0MiB( 30%);   30.0MiB;            0;       3; 2×bf16[3,4,8,64], f32[7]
    60.0MiB( 60%);   20.0MiB;     31457280;       2; f32[3,256,64], bf16[5,3]
    80.0MiB( 80%);   10.0MiB;     52428800;       2; f32[3,256,64], u16[3,32,9]
    95.0MiB( 95%);    9.5MiB;     62428800;       1; bf16[4,8,64]
   100.0MiB(100%);  512.0KiB;     72428800;       2; f32[], bf16[3,256,64]
"""


def test_slots_are_told_by_their_shapes(tmp_path):
  path = tmp_path / "module_01.jit_train_step.sm_9.0a_x-memory-usage-report.txt"
  path.write_text(REPORT, encoding="utf-8")
  slots = memory_slots.read(tmp_path)
  # Of the largest allocation.
  assert [slot.size for slot in slots] == [128 * 2**20]
  path.write_text(REPORT.replace("128.0MiB", "128.0KiB"), encoding="utf-8")
  slots = memory_slots.read(tmp_path)
  assert [slot.size / 2**20 for slot in slots] == [30, 20, 10, 9.5, 0.5]
  assert slots[0].shapes == (("bf16", (3, 4, 8, 64)), ("f32", (7,)))
  assert slots[4].shapes == (("f32", ()), ("bf16", (3, 256, 64)))
  # 3 layers, 4 sequences of 8 tokens.
  assert memory_slots.stacked(slots, layers=3, tokens=(4, 32)) == {
    "residuals": 40 * 2**20,
    "gradients": 20 * 2**20,
  }


def test_a_report_that_is_missing(tmp_path):
  with pytest.raises(ValueError, match="the compiler wrote 0 memory reports"):
    memory_slots.read(tmp_path)
