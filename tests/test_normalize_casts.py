"""Casts to a wider type and back are what they were made from, unless that is written meanwhile or the way there loses something."""

import pytest
from agentcompile_rules_transformers.draft import Draft

from agentcompile_core.plugin_api import DType, Graph, ValueKind
from agentcompile_core.stages.capture.normalize import plain_casts


def graph_of(first: DType, between: DType, last: DType, *, state: bool = False, written: bool = False) -> Graph:
    draft, shape = Draft(), (8,)
    w = draft.given("w", shape, first, ValueKind.STATE if state else ValueKind.WEIGHT)
    wide = draft.cast(w, shape, between)
    back = draft.cast(wide, shape, last)
    if written:
        draft.call("aten.copy_.default", (w, draft.given("x", shape, first)), shape, dtype=first, mutates=("w",))
    return draft.graph(draft.one("aten.neg.default", (back,), shape, last))


@pytest.mark.parametrize("first,between", [(DType.BF16, DType.F32), (DType.F16, DType.F32), (DType.F32, DType.F64), (DType.F16, DType.F64)])
def test_a_cast_to_a_wider_type_and_back_is_gone(first: DType, between: DType) -> None:
    for state in (False, True):
        assert plain_casts(graph_of(first, between, first, state=state)).nodes[-1].inputs == ("w",)


@pytest.mark.parametrize("first,between,last,written", [
    (DType.F32, DType.BF16, DType.F32, False), (DType.BF16, DType.F16, DType.BF16, False), (DType.BF16, DType.F32, DType.F16, False),
    (DType.BF16, DType.F32, DType.BF16, True)], ids=["narrower", "as narrow", "to another type", "written behind it"])
def test_what_a_cast_may_change_stays(first: DType, between: DType, last: DType, written: bool) -> None:
    found = plain_casts(graph_of(first, between, last, state=written, written=written))
    assert found.nodes[-1].inputs != ("w",) and sum(node.kind == "cast" for node in found.nodes) == 2
