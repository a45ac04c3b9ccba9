import jax.numpy as jnp
import pytest

from experiments import timing


def test_contenders_take_turns_with_all_arguments():
  calls = []

  def contender(name):
    def function(argument):
      calls.append((name, argument))
      return jnp.zeros(())

    return timing.Contender(function, [(0,), (1,)], temporary_bytes=None)

  times = timing.interleaved(
    {"a": contender("a"), "b": contender("b")},
    min_seconds=0.0,
    min_repeats=4,
    warm_up=2,
  )
  rounds = [(name, i % 2) for i in range(6) for name in ("a", "b")]
  assert calls == rounds
  assert times.keys() == {"a", "b"}
  for measured in times.values():
    assert 0 < measured.lower_ms <= measured.median_ms <= measured.upper_ms


def test_rounds_go_on_for_the_time_asked_for():
  calls: list[int] = []
  contender = timing.Contender(calls.append, [(0,)], temporary_bytes=None)
  timing.interleaved({"a": contender}, min_seconds=0.05)
  assert len(calls) > 9


def test_a_contender_is_compiled():
  compiled = timing.contender(
    lambda x, y: (x + 1) @ y, [(jnp.ones((8, 8)),) * 2]
  )
  assert compiled.temporary_bytes is not None
  assert compiled.temporary_bytes >= 0
  result = compiled.function(*compiled.arguments[0])
  assert result == pytest.approx(16.0)
