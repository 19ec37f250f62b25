"""Batches where memory is short or a step fails: rows run one after the other, and no other request is worse off."""

import functools
from typing import Any

import pytest
import test_growing_cache as growing_cases
import torch
from agentcompile_runtime_flashkv import growing
from attrs import evolve
from capture_models import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import agentcompile_core.runtime.rows as rows_module
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime import holding
from agentcompile_core.runtime.holding import held
from agentcompile_core.testing.reserving import HostReserved

G = growing_cases
MODEL: dict[str, Any] = {**G.MODEL, "num_hidden_layers": 1}  # its keys and its values grow apart; more layers would show nothing more
RANGES = 2
POSITION = RANGES * G.ROW
OPTIONS = {"eos_token_id": None, "pad_token_id": 0}


class Pool:
    """A device's memory, in bytes."""

    def __init__(self, positions: int) -> None:
        self.total, self.all = positions * POSITION, list[HostReserved]()

    @property
    def free(self) -> int:
        return self.total - sum(one.held_bytes for one in self.all)


class Pooled(HostReserved):
    """A reservation whose memory is the pool's."""

    def __init__(self, nbytes: Any, pool: Pool) -> None:
        super().__init__(nbytes, G.ROW, None)
        self.pool = pool
        pool.all.append(self)

    def hold(self, nbytes: Any) -> Any:
        self.limit_bytes = self.pool.free + self.held_bytes
        return super().hold(nbytes)


@functools.cache
def model() -> Any:
    return tiny("llama", MODEL)


@functools.cache
def graphs() -> Any:
    return G.capture_language_model(model(), "tiny", G.Workload(dtype=G.DType.F32, max_context=G.CONTEXT, prefill_chunks=G.CHUNKS))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "STEP", 8)
    monkeypatch.setattr(holding, "AHEAD", 0)
    monkeypatch.setattr(rows_module, "AHEAD", 0)


def session(positions: int, monkeypatch: pytest.MonkeyPatch, starts: tuple[int, ...] = ()) -> tuple[Any, Pool]:
    """A session over a pool of so many positions of one cache, with a program for the steps from each of ``starts`` on."""
    pool, kv = Pool(positions), graphs().kv

    def another() -> Any:
        return G.GrowingKVCacheManager(lambda nbytes: Pooled(nbytes, pool), layers=kv.layers, kv_heads=kv.kv_heads, head_dim=kv.head_dim,
                                       capacity=kv.capacity, dtype=torch.float32, device="cpu")

    programs = {graph.name: G.framework_program(graph) for graph in graphs().graphs}
    programs |= {p.name: p for p in (evolve(programs["decode"], start=start) for start in starts)}
    made = G.Session(graphs(), programs, G.WeightStore(model(), "cpu"), G.Executables(device="cpu"), kv_state=another(),
                     decode=G.PythonLoop())
    made.rows.another_kv = another
    made.prepare()
    monkeypatch.setattr(rows_module, "free_bytes", lambda device: pool.free)
    return made, pool


def served(made: Any, prompts: list[list[int]], count: int, when: str = "always") -> torch.Tensor:
    made.rows.when = when
    asked = G.request(model(), G.Asked(input_ids=prompts, max_new_tokens=count, options=OPTIONS), graphs())
    found: torch.Tensor = G.serve(model(), made, asked, seed=None, streamer=None, say=lambda line: None)
    return found


requests = st.lists(st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 60)), min_size=1, max_size=5)


@settings(derandomize=True, database=None, deadline=None, max_examples=40)
@given(positions=st.integers(60, 600), asked=requests)
def test_whatever_single_rows_serve_is_served_beside_batches(positions: int, asked: list[tuple[list[int], int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        one, _ = session(positions, patch)
        other, pool = session(positions, patch)
        for lengths, count in asked:
            prompts = [[3 + (7 * row + at) % 50 for at in range(length)] for row, length in enumerate(lengths)]
            try:
                wanted = served(one, prompts, count, "never")
            except UsageError:
                with pytest.raises(UsageError):
                    served(other, prompts, count)
                continue
            assert torch.equal(served(other, prompts, count), wanted)
            assert len(other.rows.notes) <= 3
        for reserved in pool.all:
            reserved.check()


def test_half_of_what_is_free_is_left_while_rows_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pool = session(400, monkeypatch)
    served(made, [[3], [4]], 4)
    before, seen = pool.free, []
    run = made.rows._made[2, "decode"].run
    made.rows._made[2, "decode"].run = lambda: (seen.append(pool.free), run())
    served(made, [[3] * 20, [4] * 20], 40)
    assert seen and min(seen) >= before // 2 - 60 * POSITION  # the session's own cache holds one of the prompts
    rows = [held(cache) for cache in made.rows._caches]
    assert rows == [64, 64]
    served(made, [[3] * 40], 56, "never")
    served(made, [[5] * 60], 36, "never")


def test_rows_give_back_with_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pool = session(400, monkeypatch)
    wanted = served(made, [[3] * 20, [4] * 20], 40)
    assert [held(cache) for cache in made.rows._caches] == [64, 64]
    made.give_back()
    assert [held(cache) for cache in made.rows._caches] == [1, 1] and held(made.kv) == 0
    assert pool.free == pool.total - 2 * POSITION
    assert torch.equal(served(made, [[3] * 20, [4] * 20], 40), wanted)


def test_a_shortage_that_passes_is_not_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pool = session(2000, monkeypatch)
    other = Pooled([G.ROW * 2000] * RANGES, pool)
    other.hold([G.ROW * 1900] * RANGES)
    prompts = [[7 + row] for row in range(8)]
    wanted = served(made, prompts, 30, "never")
    for count in range(20, 30):
        served(made, prompts, count)
    assert not made.rows._made and len(made.rows.notes) == 1 and "memory did not suffice" in made.rows.notes[0]
    other.give_back([0] * RANGES)
    assert torch.equal(served(made, prompts, 30), wanted) and made.rows._made[8, "decode"] is not None


def failing(error: Exception, at: int) -> Any:
    calls = []

    def run() -> None:
        calls.append(1)
        if len(calls) >= at:
            raise error

    return run


def test_a_step_that_fails_in_the_middle_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = session(10_000, monkeypatch)
    prompts = [[3, 4], [5], [6, 7, 8]]
    wanted = served(made, prompts, 12, "never")
    assert torch.equal(served(made, prompts, 12), wanted)
    step = made.rows._made[4, "decode"]
    right = step.run
    for _ in range(2):  # memory that is short for a moment: the step stays
        step.run = failing(torch.OutOfMemoryError("CUDA out of memory"), 3)
        assert torch.equal(served(made, prompts, 12), wanted)
        assert made.rows._made[4, "decode"] is step and all(held(cache) <= 8 for cache in made.rows._caches)
    step.run = right
    assert torch.equal(served(made, prompts, 12), wanted)
    step.run = failing(RuntimeError("a launch\nfailed"), 3)
    assert torch.equal(served(made, prompts, 12), wanted)
    assert made.rows._made[4, "decode"] is None and not made.rows._caches
    assert "a launch failed" in made.rows.notes[-1]
    assert torch.equal(served(made, prompts, 12), wanted)


def test_memory_that_is_always_short_is_asked_for_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = session(10_000, monkeypatch)
    tried = []

    def prepared(*_: Any) -> Any:
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(made.rows, "_prepared", prepared)
    wanted = served(made, [[3], [4]], 9, "never")
    for _ in range(5):
        assert torch.equal(served(made, [[3], [4]], 9), wanted)
    assert len(tried) == 3 and made.rows._made == {(2, "decode"): None} and not made.rows._caches


def test_a_measurement_that_fails_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = session(10_000, monkeypatch)
    wanted = served(made, [[3], [4]], 9, "never")
    monkeypatch.setattr(rows_module, "_seconds", lambda *_: (_ for _ in ()).throw(RuntimeError("launch failed")))
    made.rows.when, made.device = "always", "meta"  # no processor, as far as rows ask
    monkeypatch.setattr(rows_module.Rows, "_make_room", lambda self, ends: [self._caches.append(self.another_kv()) for _ in ends])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "difference", lambda *_: "")
        patch.setattr(rows_module.Rows, "_prepared", lambda *_: rows_module.RowsStep(None, None, None))
        found = made.rows.tokens([torch.tensor([[3]]), torch.tensor([[4]])], 9, frozenset())
    made.device = "cpu"
    assert found == [None, None] and made.rows._made == {(2, "decode"): None} and "launch failed" in made.rows.notes[0]
    assert torch.equal(served(made, [[3], [4]], 9), wanted)


def test_steps_are_those_of_the_range_in_which_most_of_a_batch_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = session(10_000, monkeypatch, starts=(40,))
    for lengths, name in (((3, 5), "decode"), ((50, 60), "decode_from_40"), ((4, 70), "decode_from_40")):
        prompts = [[3 + (7 * row + at) % 50 for at in range(length)] for row, length in enumerate(lengths)]
        wanted = served(made, prompts, 12, "never")
        assert torch.equal(served(made, prompts, 12), wanted)
        assert made.rows._made[2, name].bound.program.graph.name == "rows_2"
    assert set(made.rows._made) == {(2, "decode"), (2, "decode_from_40")} and not made.rows.notes


def test_another_word_for_when_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = session(1000, monkeypatch)
    with pytest.raises(UsageError, match=r"'allways': allowed are 'measured', 'always', 'never'"):
        made.rows.when = "allways"
    assert made.rows.when == "measured"
