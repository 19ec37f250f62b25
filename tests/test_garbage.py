"""A compile looks at its own garbage alone, and models that are gone leave none."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

import agentcompile_core as ac
from agentcompile_core import garbage
from agentcompile_core.garbage import look_further, set_apart, settle, uncollected
from agentcompile_core.store import Store
from agentcompile_core.worker import Worker

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"


@pytest.fixture(autouse=True)
def _thawed(asked_whether_frozen: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What conftest froze is looked at again, until the test ends."""
    monkeypatch.setattr(garbage, "is_frozen", asked_whether_frozen)
    gc.unfreeze()
    yield
    gc.freeze()


class Circle:
    def __init__(self) -> None:
        self.itself = self


def entered_elsewhere(block: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Have another thread be in a block; the result ends it."""
    entered, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with block():
            entered.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()

    def end() -> None:
        may_end.set()
        thread.join()

    return end


def test_blocks_of_several_threads_set_objects_apart_until_the_last_one_ends() -> None:
    assert not gc.get_freeze_count()
    with set_apart():
        end = entered_elsewhere(set_apart)
        assert gc.get_freeze_count()
    assert gc.get_freeze_count()
    end()
    assert not gc.get_freeze_count()
    with pytest.raises(KeyError), set_apart():
        raise KeyError
    assert not gc.get_freeze_count()


Thresholds = Callable[..., None]


@pytest.fixture
def thresholds() -> Iterator[Thresholds]:
    """Sets those of Python's collector, which are afterwards what they were."""
    usual = gc.get_threshold()
    yield gc.set_threshold
    gc.set_threshold(*usual)


@pytest.mark.parametrize("before, within", [((700, 10, 10), (10_000, 300, 10)), ((50_000, 700, 3), (50_000, 700, 3)),
                                            ((0, 10, 10), (0, 10, 10))])
def test_a_block_collects_less_often_until_it_ends(before: tuple[int, int, int], within: tuple[int, int, int],
                                                   thresholds: Thresholds) -> None:
    thresholds(*before)
    with pytest.raises(KeyError), set_apart():
        with set_apart():
            assert gc.get_threshold() == within
        assert gc.get_threshold() == within
        raise KeyError
    assert gc.get_threshold() == before


def test_collections_look_at_what_was_made_last_while_a_block_makes_what_a_deep_model_needs(thresholds: Thresholds) -> None:
    thresholds(700, 10, 10)
    with set_apart():
        before, made = [one["collections"] for one in gc.get_stats()], [[] for _ in range(1_300_000)]
        young, middle, full = (now["collections"] - one for now, one in zip(gc.get_stats(), before, strict=True))
        del made
    assert young > 100 and not middle and not full


def test_who_begins_a_search_has_older_objects_looked_at_again(thresholds: Thresholds) -> None:
    thresholds(700, 9, 8)
    look_further()
    assert gc.get_threshold() == (700, 9, 8)
    with set_apart():
        with set_apart():
            look_further()
            assert gc.get_threshold() == (10_000, 9, 8)
        look_further()
        assert gc.get_threshold() == (10_000, 9, 8)
    assert gc.get_threshold() == (700, 9, 8)
    with set_apart():
        thresholds(123_456, 11, 12)  # by somebody else
        look_further()
        assert gc.get_threshold() == (123_456, 11, 12)


def test_a_worker_that_starts_is_a_search(thresholds: Thresholds) -> None:
    thresholds(700, 9, 8)
    with set_apart():
        assert gc.get_threshold()[1] > 9
        with Worker() as worker:
            worker.start()
        assert gc.get_threshold()[1] == 9


def test_thresholds_that_somebody_sets_within_a_block_stay(thresholds: Thresholds) -> None:
    with set_apart():
        thresholds(123_456, 11, 12)
    assert gc.get_threshold() == (123_456, 11, 12)


def test_a_process_that_froze_objects_keeps_its_thresholds(thresholds: Thresholds) -> None:
    thresholds(900, 10, 10)
    gc.freeze()
    try:
        with set_apart():
            assert gc.get_threshold() == (900, 10, 10)
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_garbage_of_the_block_is_collected_within_it() -> None:
    before = Circle()
    with set_apart():
        made = Circle()
        seen = weakref.ref(made)
        del made
        gc.collect()
        assert seen() is None
    kept = weakref.ref(before)
    del before
    gc.collect()
    assert kept() is None


def test_what_was_made_until_it_settled_is_looked_at_behind_the_block_alone() -> None:
    with set_apart():
        old = Circle()
        first = weakref.ref(old)
        settle()
        new = Circle()
        second = weakref.ref(new)
        del old, new
        gc.collect()
        assert first() is not None and second() is None
    gc.collect()
    assert first() is None and not gc.get_freeze_count()


def test_outside_of_a_block_and_in_a_process_that_froze_objects_itself_nothing_settles() -> None:
    settle()
    assert not gc.get_freeze_count()
    gc.freeze()
    try:
        with set_apart():
            made = Circle()
            seen = weakref.ref(made)
            settle()
            del made
            gc.collect()
            assert seen() is None
    finally:
        gc.unfreeze()


def test_graphs_out_of_the_store_settle_and_those_that_were_just_captured_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core.stages import capture

    settled: list[bool] = []
    monkeypatch.setattr(capture, "settle", lambda: settled.append(True))
    for count in range(2):  # what a capture leaves in circles, a copy of the model among it, may be collected soon
        ac.compile(str(TINY), store=Store(tmp_path), dtype="float32", max_context=32, random_weights=0, run_on="framework", validators=(),
                   origins=[])
        assert len(settled) == count


def test_a_block_without_collections_ends_with_the_last_thread_that_is_in_one() -> None:
    assert gc.isenabled()
    with uncollected():
        end = entered_elsewhere(uncollected)
    assert not gc.isenabled(), "the other one captures still"
    end()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("held", [0, 1 << 20])
def test_what_is_garbage_before_is_collected_before_where_a_device_has_memory_in_use(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: held)
    before = Circle()
    seen = weakref.ref(before)
    gc.disable()
    try:
        del before
        with set_apart():
            assert (seen() is None) is (held > 0)
    finally:
        gc.enable()


def test_objects_that_somebody_else_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        with set_apart():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


class Kept:
    """What a device's backend makes of a capture: it keeps what it recorded."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run

    def __call__(self) -> None:
        self.run()


@pytest.mark.parametrize("run_on", ["framework", "emulation"])
def test_a_model_that_is_gone_keeps_no_memory(run_on: str) -> None:
    """Nothing of a session lies in a circle, whatever it was asked for."""
    model = ac.compile(str(TINY), store=Store(None), dtype="float32", max_context=32, random_weights=0, run_on=run_on, validators=(),
                       origins=[], steps_per_graph=2)
    captured = list[weakref.ref[Kept]]()

    def capture(run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1) -> Kept:
        found = Kept(run)
        captured.append(weakref.ref(found))
        return found

    model.session.capture = capture
    for options in ({}, {"do_sample": True, "seed": 3}, {"repetition_penalty": 1.2}):
        model.generate([[3, 4, 5], [4, 5]], max_new_tokens=4, pad_token_id=0, **options)
        model.generate([3, 4, 5], max_new_tokens=4, **options)
    seen = [weakref.ref(one) for one in (model.session, model.session.rows, model.session.kv, model.session.bound("decode"))]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [one() for one in (*seen, *captured)] == [None] * len(seen + captured) and len(captured) > 1
    finally:
        gc.enable()


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_that_is_gone_keeps_no_memory_of_a_device() -> None:
    import transformers

    config = transformers.LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=4096)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).cuda().eval()
    options = {"dtype": "float16", "max_context": 4096, "budget_s": 6.0, "budget_plans": 20, "rounds": 1, "validators": (), "origins": []}
    before = 0
    for count in range(2):  # libraries keep what they took once
        model = ac.compile(module, store=Store(None), **options)
        for asked in ({}, {"do_sample": True, "seed": 3}):
            model.generate(torch.randint(3, 500, (1, 300)), max_new_tokens=20, **asked)
        model.generate([[3, 4, 5]] * 4, max_new_tokens=8, pad_token_id=0)
        session, held = weakref.ref(model.session), torch.cuda.memory_reserved()
        gc.collect()
        gc.disable()
        try:
            del model
            assert session() is None
        finally:
            gc.enable()
        torch.cuda.empty_cache()  # pools of graphs too
        left = torch.cuda.memory_reserved()
        assert left < held and (not count or left <= before + (2 << 20)), (left, held)
        before = left
