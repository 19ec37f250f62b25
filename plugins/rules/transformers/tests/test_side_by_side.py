"""Results of one kernel lie side by side: none that is whole vectors behind one that is not."""

import pytest
from agentcompile_rules_transformers.draft import Draft
from agentcompile_rules_transformers.linear import LinearRule

from agentcompile_core.plugin_api import DType, Graph, Match, Role
from agentcompile_core.testing.targets import FAKE


def siblings(sizes: tuple[int, ...]) -> Graph:
    draft = Draft()
    x = draft.given("x", (1, 1, 32), DType.BF16)
    return draft.graph(*(draft.linear(f"linear{i}", x, size, 32, DType.BF16) for i, size in enumerate(sizes)))


def cut(sizes: tuple[int, ...]) -> Graph:
    draft = Draft()
    whole = draft.linear("linear", draft.given("x", (1, 1, 32), DType.BF16), sum(sizes), 32, DType.BF16)
    parts, first = [], 0
    for size in sizes:
        part = draft.one("aten.slice.Tensor", (whole, 2, first, first + size), (1, 1, size), DType.BF16, kind="view")
        parts.append(draft.one("aten.neg.default", (part,), (1, 1, size), DType.BF16))
        first += size
    return draft.graph(*parts)


def joined(graph: Graph) -> list[Match]:
    matches = LinearRule().find(graph, FAKE)
    return [match for match in matches if any(len(o.values) > 1 for o in match.operands if o.role is Role.OUTPUT)]


@pytest.mark.parametrize("sizes,is_one", [((16, 8), True), ((16, 8, 4), True), ((16, 4, 12), True), ((4, 16), False), ((12, 128), False)])
def test_results_are_one_where_each_begins_where_it_may(sizes: tuple[int, ...], is_one: bool) -> None:
    """What one matrix makes is cut in its order; rows of several may be in any."""
    assert bool(joined(cut(sizes))) is is_one
    matches = joined(siblings(sizes))
    assert matches and all(lies_where_it_may(match, siblings(sizes)) for match in matches)


def lies_where_it_may(match: Match, graph: Graph) -> bool:
    begin = 0
    for value in match.need("out").values:
        nbytes = graph.spec(value).nbytes
        if begin % 16 and nbytes % 16 == 0:
            return False
        begin += nbytes
    return True
