"""A decode step that computes something else, or leaves something unwritten, is seen before it serves."""

from collections.abc import Callable
from typing import Any

import pytest
from capture_models import SIZES, TOKENS, WORKLOAD, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentcompile_core.installation.program_check import difference
from agentcompile_core.runtime.bound_program import BoundProgram, Piece
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model

MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "lfm2": {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
             "max_position_embeddings": 64, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 2,
             "layer_types": ["full_attention", "conv"], "conv_L_cache": 3, **TOKENS},  # with a state beside the cache
}
Checked = tuple[Session, Callable[[], str]]


@pytest.fixture(scope="module")
def checked() -> dict[str, Checked]:
    """By model a session, and its check, which has passed once: all memory holds what is right."""
    found: dict[str, Checked] = {}
    for name, options in MODELS.items():
        model = tiny(name, options)
        graphs = capture_language_model(model, name, WORKLOAD)
        assert graphs.kv is not None, graphs.eager_reason
        programs, weights = {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model, "cpu")
        session = Session(graphs, programs, weights, Executables(device="cpu"), kv_state=PlainKVCache().allocate(graphs.kv, "cpu"),
                          decode=PythonLoop())
        found[name] = session, lambda session=session, programs=programs, weights=weights: difference(  # type: ignore[misc]
            session, programs, weights, None)  # type: ignore[arg-type]
        assert found[name][1]() == ""
    return found


def behind(bound: BoundProgram, before: Callable[[], Any], after: Callable[[Any], None]) -> tuple[Piece, ...]:
    """The parts of a program as one, with something done before it and with the result of that behind it."""
    parts = bound._parts

    def run() -> None:
        known = before()
        for part in parts:
            part.run()
        after(known)

    return (Piece(run=run),)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_a_step_leaves_as_it_was_is_seen(checked: dict[str, Checked], data: st.DataObject) -> None:
    """Any of what it writes: a row of K or V of any layer, a state, token, position, history; as memory had it from the same run before."""
    session, check = checked[data.draw(st.sampled_from(sorted(MODELS)))]
    written = sorted(set(session.states) - {"session.ids"})
    left = data.draw(st.sampled_from(written))
    bound = session.bound("decode")
    whole = bound._parts

    def put_back(was: Tensor) -> None:
        session.states[left].copy_(was)

    bound._parts = behind(bound, lambda: session.states[left].clone(), put_back)
    try:
        assert check() != "", left
    finally:
        bound._parts = whole
    assert check() == ""


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.floats(0.5, 0.99), st.integers(1, 60))
def test_other_logits_and_tokens_that_are_not_theirs_are_seen(checked: dict[str, Checked], name: str, factor: float, other: int) -> None:
    session, check = checked[name]
    bound = session.bound("decode")
    whole = bound._parts

    def scaled(_: None) -> None:
        bound.output(0).mul_(factor)

    def another(_: None) -> None:
        session.ids.copy_((bound.output(0)[0, -1].argmax() + other) % bound.output(0).shape[-1])

    for defect, why in ((scaled, "rms"), (another, "")):
        bound._parts = behind(bound, lambda: None, defect)
        try:
            found = check()
            assert found and why in found
        finally:
            bound._parts = whole
    assert check() == ""
