"""What is computed of a row that streams share is computed by the match that reads it; products take what has another shape than they."""

import pytest
import torch
from agentcompile_rules_transformers import agentcompile_region_rules
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.dependency import dependencies
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.plugin_api import ValueKind
from agentcompile_core.stages.analyze.checking import problem
from agentcompile_core.testing.targets import FAKE

QUICK = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def product_of(decode_graphs, match, tensors):
    """What a match of a plain product makes: element i of it reads element i, modulo its size, of what is added."""
    made = (tensors[match.need("a").values[0]] @ tensors[match.need("b").values[0]]).reshape(-1)
    if match.epilogue is None:
        return {"out": made}
    others = {o.name: tensors[o.values[0]].reshape(-1) for o in match.operands if o.name.startswith("aux")}
    read = {name: flat[torch.arange(made.numel()) % flat.numel()] for name, flat in others.items()}
    return {"out": decode_graphs.evaluate(match.epilogue, {"acc0": made, **read})}


def right_matches(decode_graphs, builder, graph):
    """All matches of a graph, each checked: what it promises is what its nodes compute."""
    found = [match for rule in agentcompile_region_rules() for match in rule.find(graph, FAKE)]
    deps, tensors = dependencies(graph), {**builder.results, **builder.tensors}
    for match in found:
        assert not problem(match, graph, deps), (match.id, problem(match, graph, deps))
        real = compile_nodes(graph, match.nodes, device="cpu").run(dict(tensors))
        said = product_of(decode_graphs, match, tensors) if match.kind == "matmul" else decode_graphs.promised(match, tensors)
        (value,) = match.need("out").values
        torch.testing.assert_close(said["out"].reshape(-1), real[value].reshape(-1), rtol=2e-5, atol=2e-5)
    return found


@QUICK
@given(streams=st.integers(1, 4), tokens=st.integers(1, 3), width=st.integers(1, 9), seen=st.booleans())
def test_a_difference_of_rows_is_taken_in_where_it_is_repeated(decode_graphs, streams, tokens, width, seen):
    b = decode_graphs.Builder()
    x = b.given("x", b.randn(streams, tokens, width), ValueKind.INPUT)
    one, other = (b.given(name, b.randn(tokens, width), ValueKind.INPUT) for name in ("one", "other"))
    scaled = b.call("aten.mul.Tensor", b.call("aten.sub.Tensor", one, other), b.weight("factors", streams, 1, 1))
    if seen:
        scaled = b.call("aten.view.default", scaled, (streams, tokens, width))
    matches = right_matches(decode_graphs, b, b.graph(b.add(scaled, x)))
    if tokens == 1:
        assert max(len(match.nodes) for match in matches) == 3 + seen


@QUICK
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)), small=st.tuples(*[st.booleans()] * 3),
       turned=st.booleans())
def test_whatever_is_repeated_and_however_that_is_seen_behind_every_match_is_right(decode_graphs, shape, small, turned):
    b = decode_graphs.Builder()
    x = b.given("x", b.randn(*shape), ValueKind.INPUT)
    part = b.given("part", b.randn(*(1 if one else extent for one, extent in zip(small, shape, strict=True))), ValueKind.INPUT)
    made = b.call("aten.mul.Tensor", b.call("aten.exp.default", part), x)
    if turned:
        made = b.call("aten.view.default", made, tuple(reversed(shape)))
    right_matches(decode_graphs, b, b.graph(b.call("aten.neg.default", made)))


@pytest.mark.parametrize("added", [(4, 1, 1, 16), (4, 16), (1, 16), (16,), (1, 1, 16)])
def test_a_product_takes_what_is_added_to_a_view_of_it(decode_graphs, added):
    b = decode_graphs.Builder()
    c, x = b.given("c", b.randn(4, 3), ValueKind.INPUT), b.given("x", b.randn(3, 16), ValueKind.INPUT)
    other = b.given("other", b.randn(*added), ValueKind.INPUT)
    shape = (4, 1, 1, 16) if len(added) != 2 else (4, 16)
    seen = b.call("aten.view.default", b.call("aten.matmul.default", c, x), shape)
    matches = right_matches(decode_graphs, b, b.graph(b.add(seen, other)))
    assert max(len(match.nodes) for match in matches if match.kind == "matmul") == 3
