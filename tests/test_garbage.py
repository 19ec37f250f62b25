"""A compile looks at its own garbage alone, and collects what models that are gone have left."""

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentcompile_core as ac
from agentcompile_core.garbage import belongs_to, set_apart
from agentcompile_core.store import Store

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """What conftest froze is looked at again, until the test ends."""
    gc.unfreeze()
    yield
    gc.freeze()


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_blocks_of_several_threads_set_objects_apart_until_the_last_one_ends() -> None:
    assert not gc.get_freeze_count()
    entered, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with set_apart():
            entered.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    with set_apart():
        thread.start()
        entered.wait()
        assert gc.get_freeze_count()
    assert gc.get_freeze_count()
    may_end.set()
    thread.join()
    assert not gc.get_freeze_count()
    with pytest.raises(KeyError), set_apart():
        raise KeyError
    assert not gc.get_freeze_count()


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


def test_objects_that_somebody_else_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        with set_apart():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_what_belongs_to_nobody_any_more_is_collected_before() -> None:
    owner, held = Circle(), Circle()
    belongs_to(owner, held)
    seen = weakref.ref(held)
    del held, owner
    gc.collect(0)
    held_by_nobody = Circle()
    owner = Circle()
    owner.itself = None
    belongs_to(owner, held_by_nobody)
    again = weakref.ref(held_by_nobody)
    gc.disable()
    try:
        del owner, held_by_nobody
        assert again() is not None
        with set_apart():
            assert again() is None and seen() is None
    finally:
        gc.enable()


def test_the_session_of_a_model_that_is_gone_is_no_more_when_another_one_is_compiled() -> None:
    options = {"dtype": "float32", "max_context": 32, "random_weights": 0, "run_on": "framework", "validators": (), "origins": []}
    model = ac.compile(str(TINY), store=Store(None), **options)
    session = weakref.ref(model.session)
    gc.collect()
    gc.disable()
    try:
        del model
        other = ac.compile(str(TINY), store=Store(None), **options)
        assert session() is None and other.session is not None
    finally:
        gc.enable()
    assert not gc.get_freeze_count()
