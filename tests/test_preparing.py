"""Chunks for which there is no memory are left out where smaller ones do their work; what a prompt gives stays the same."""

from functools import cache

import pytest
import torch
from attrs import evolve
from capture_models import CONTEXT, SIZES, WORKLOAD, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import agentcompile_core as ac
from agentcompile_core.ir.graph import GraphSet
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.store import Store

SMALLEST, SECOND, THIRD = 4, 8, 16
MODEL = tiny("llama", SIZES)


@cache
def graphs() -> GraphSet:
    """Not while tests are collected, which every process of a run does."""
    return capture_language_model(MODEL, "llama", evolve(WORKLOAD, prefill_chunks=(SMALLEST, SECOND, THIRD)))


def session(short: set[str]) -> Session:
    """A session in which capturing the programs of these names finds no memory."""
    programs = {g.name: framework_program(g) for g in graphs().graphs}
    made = Session(graphs(), programs, WeightStore(MODEL, "cpu"), Executables(device="cpu"),
                   kv_state=PlainKVCache().allocate(graphs().kv, "cpu"), decode=PythonLoop())
    step = made.step

    def scarce(name: str) -> object:
        if name in short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(name)

    made.step = scarce  # type: ignore[method-assign]
    return made


@settings(derandomize=True, database=None, deadline=None, max_examples=12)
@given(short=st.sets(st.sampled_from([f"prefill_{size}{kind}" for size in (SECOND, THIRD) for kind in ("", "_fresh")])),
       length=st.integers(1, CONTEXT - 3))
def test_prompts_are_read_without_the_chunks_that_find_no_memory(short: set[str], length: int) -> None:
    mine, gone = session(short), {int(name.split("_")[1]) for name in short}
    assert set(mine.prepare()) == gone and mine.chunk_sizes == tuple(sorted({SMALLEST, SECOND, THIRD} - gone))
    prompt = torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length))
    wanted = MODEL.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert torch.equal(mine.generate(prompt, 2), wanted)


@pytest.mark.parametrize("name", ["decode", f"prefill_{SMALLEST}", f"prefill_{SMALLEST}_fresh"])
def test_what_nothing_else_does_is_not_left_out(name: str) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        session({name}).prepare()


def test_a_note_says_which_chunks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "prepare", lambda self, observer: (THIRD, SECOND))
    mine = ac.compile(MODEL, device="cpu", run_on="framework", store=Store(None), validators=(), origins=[], max_context=CONTEXT)
    assert any("chunks of 16, 8 tokens need more memory than there is" in note for note in mine.notes)
