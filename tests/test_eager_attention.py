"""Eager is measured with the libraries of attention with which it is at its best."""

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize(("with_ms", "without_ms", "asks"), [(60.0, 15.0, False), (14.0, 15.0, True), (15.4, 15.0, True)])
def test_eager_runs_with_the_libraries_that_make_new_lengths_faster(bench: Any, monkeypatch: pytest.MonkeyPatch, with_ms: float,
                                                                    without_ms: float, asks: bool) -> None:
    eager_attention = bench("peers.eager_attention")
    module = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=100)))
    state, lengths = [True], list[int]()

    def run(prompt: int, count: int) -> int:
        lengths.extend(range(prompt + 1, prompt + count))
        return count

    monkeypatch.setattr(eager_attention.bench, "framework", lambda module, ids, length, name: lambda count: run(ids.shape[1], count))
    monkeypatch.setattr(eager_attention.bench, "timed", lambda call: 100.0 + (call() - 1) * (with_ms if state[0] else without_ms))
    found = eager_attention.choose(module, lambda asked: state.__setitem__(0, asked))
    assert state == [asks] and found["asks_cudnn"] is asks
    assert found["step_ms_with_cudnn"] == pytest.approx(with_ms) and found["step_ms_without_cudnn"] == pytest.approx(without_ms)
    assert len(lengths) == len(set(lengths)) > 2 * eager_attention.STEPS, "no step has a length that was seen before"
    assert min(lengths[:2]) > eager_attention.FIRST, "the first steps of a process are not counted"
