"""What layers compute alike of what no layer makes is computed once in front of them: bitwise the same, and nothing that is written."""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from agentcompile_rules_transformers.draft import Draft
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.plugin_api import DType, Graph, Ref, ValueKind, Workload
from agentcompile_core.stages.capture.comparison import difference
from agentcompile_core.stages.capture.invariants import hoist_invariants
from agentcompile_core.stages.capture.language_model import capture_language_model

WIDTH, F32 = 4, DType.F32
# Each step of a layer: what it does, to which of the values that it has so far, with which number.
STEP = st.tuples(st.sampled_from(["neg", "add", "cat", "view", "weigh", "write"]), st.integers(0, 3), st.integers(1, 2))
LAYERS = st.lists(st.lists(STEP, min_size=1, max_size=5), min_size=2, max_size=4)


def drawn(layers: list[list[tuple[str, int, int]]]) -> Graph:
    """Layers over two tables in front of them; all that they end with is added up behind them."""
    draft, layer_of = Draft(), dict[str, int]()
    position = draft.given("position", (WIDTH,), F32, ValueKind.STATE)
    tables = [(draft.one("aten.exp.default", (position,), (WIDTH,), F32), WIDTH), (position, WIDTH)]
    ends: list[tuple[Ref, int]] = []
    for layer, steps in enumerate(layers):
        known, first = list(tables), len(draft.nodes)
        for what, which, number in steps:
            value, width = known[which % len(known)]
            if what == "neg":
                known.append((draft.one("aten.neg.default", (value,), (width,), F32), width))
            elif what == "add":
                known.append((draft.one("aten.add.Tensor", (value, number), (width,), F32), width))
            elif what == "cat":
                known.append((draft.one("aten.cat.default", ((value, value), -1), (2 * width,), F32), 2 * width))
            elif what == "view":
                known.append((draft.one("aten.view.default", (value, (width,)), (width,), F32, kind="view"), width))
            elif what == "weigh":
                weight = draft.weight(f"w{layer}.{len(draft.nodes)}", width, dtype=F32)
                known.append((draft.one("aten.mul.Tensor", (value, weight), (width,), F32), width))
            else:
                known.append((draft.call("aten.add_.Tensor", (value, number), (width,), dtype=F32, mutates=(value.value,))[0], width))
        layer_of |= {node.name: layer for node in draft.nodes[first:]}
        ends += known[len(tables):]
    total = draft.one("aten.sum.default", (ends[0][0],), (), F32)
    for end, _ in ends[1:]:
        total = draft.one("aten.add.Tensor", (total, draft.one("aten.sum.default", (end,), (), F32)), (), F32)
    graph = draft.graph(total)
    return evolve(graph, nodes=tuple(evolve(node, layer=layer_of.get(node.name, -1)) for node in graph.nodes))


def run(graph: Graph) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    given = {value.name: torch.randn(value.spec.shape, generator=generator) for value in sorted(graph.values, key=lambda one: one.name)
             if value.kind is not ValueKind.INTERMEDIATE}
    result = compile_nodes(graph, device="cpu").run(given)
    return [result[name] for name in graph.outputs] + [given["position"]]


@settings(max_examples=300, deadline=None)
@given(layers=LAYERS)
def test_graphs_compute_what_they_did(layers: list[list[tuple[str, int, int]]]) -> None:
    graph = drawn(layers)
    found = hoist_invariants(graph).verify()
    weights = {v.name for v in graph.values if v.kind is ValueKind.WEIGHT} - {v.name for v in found.values}
    assert not weights, "weights are read as before"
    assert all(map(torch.equal, run(found), run(graph)))
    assert len(found.nodes) <= len(graph.nodes) and hoist_invariants(found) == found


@settings(max_examples=100, deadline=None)
@given(chain=st.lists(STEP.filter(lambda step: step[0] in ("neg", "add", "cat")), min_size=1, max_size=5), count=st.integers(2, 5))
def test_what_layers_have_in_common_is_computed_once(chain: list[tuple[str, int, int]], count: int) -> None:
    graph = drawn([[*chain, ("weigh", 1, 1)]] * count)
    found = hoist_invariants(graph)
    assert Counter(node.layer for node in found.nodes if node.layer >= 0) == dict.fromkeys(range(count), 1), "its own weight alone"


@pytest.mark.parametrize("layers", [
    [[("add", 0, 1)], [("add", 0, 2)]], [[("weigh", 0, 1)], [("weigh", 0, 1)]], [[("neg", 0, 1), ("neg", 2, 1)], [("add", 0, 1)]],
    [[("view", 0, 1)], [("view", 0, 1)]], [[("neg", 0, 1)], [("write", 0, 1), ("neg", 0, 1)]],
    [[("neg", 0, 1), ("write", 2, 1)], [("neg", 0, 1)]],
], ids=["other numbers", "weights of layers", "one layer alone", "views", "written between", "written behind"])
def test_what_is_not_alike_costs_nothing_or_is_written_stays(layers: list[list[tuple[str, int, int]]]) -> None:
    assert hoist_invariants(drawn(layers)) == drawn(layers)


@pytest.mark.parametrize(("kind", "more"), [
    ("ministral3", {}), ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
])
def test_tables_of_positions_belong_to_no_layer(kind: str, more: dict[str, Any]) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8, "pad_token_id": None,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.AutoConfig.for_model(kind, **sizes, **more)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    graphs = capture_language_model(model, kind, Workload(dtype=DType.F32, max_context=24, prefill_chunks=(8,)))
    assert graphs.graphs, graphs.eager_reason
    for graph in graphs.graphs:
        given_to = [value for value in graph.values if value.kind is not ValueKind.INTERMEDIATE]
        outside = {value.name for value in given_to if not value.source.startswith("model.layers")}
        outside |= {name for node in graph.nodes if node.layer < 0 for name in node.outputs}
        free = [node for node in graph.nodes if node.layer >= 0 and node.kind != "view" and set(node.inputs) <= outside]
        assert {node.op for node in free} <= {"agentcompile.rms_norm.default"}, "the first layer's norm of what was embedded"
    assert difference(graphs, LoadedModel(module=model, name=kind)) == ""
