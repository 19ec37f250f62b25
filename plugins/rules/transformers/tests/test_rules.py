"""The rules: what they find, what they must not find, and that every match computes what its nodes compute."""

import pytest
import torch
from agentcompile_rules_transformers import agentcompile_region_rules
from agentcompile_rules_transformers.testing import attention_case

from agentcompile_core.ops.dependency import dependencies
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.plugin_api import GraphKind, Role, SemanticLabel, Symbol, ValueKind
from agentcompile_core.plugin_api import PointwiseKind as K
from agentcompile_core.stages.analyze.checking import problem
from agentcompile_core.testing.targets import FAKE

MODELS = {
    "qwen3": {},
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "bias": True},
    "gemma2": {"qk_norm": False, "norm": "rms_one_plus", "act": "gelu_tanh", "sandwich": True, "cap": 30.0, "softcap": 50.0, "window": 4},
    "gemma3": {"norm": "rms_one_plus", "act": "gelu_tanh", "sandwich": True},
    "phi3": {"qk_norm": False, "fused": True},
    "phi3 with biases": {"qk_norm": False, "fused": True, "bias": True},
    "partial_rope": {"qk_norm": False, "rotary_dim": 4, "norm": "layer", "bias": True, "act": "gelu"},
}


def find(graph):
    return [match for rule in agentcompile_region_rules() for match in rule.find(graph, FAKE)]


def of_kind(matches, kind, label=None):
    return [m for m in matches if m.kind == kind and label in (None, m.label)]


@pytest.mark.parametrize("model", MODELS)
def test_every_match_computes_what_its_nodes_compute(decode_graphs, model):
    builder, graph = decode_graphs.transformer(layers=1, **MODELS[model])
    deps = dependencies(graph)
    tensors = {**builder.results, **builder.tensors}  # states as they were before the run
    matches = find(graph)
    assert {m.kind for m in matches} == {"linear", "norm", "attention", "rope", "rope_table", "elementwise", "gather", "argmax"}
    for match in matches:
        assert not problem(match, graph, deps), (match.id, problem(match, graph, deps))
        states = [v for o in match.operands if o.role is Role.STATE for v in o.values]
        env = {name: tensor.clone() for name, tensor in tensors.items()}
        wanted = compile_nodes(graph, match.nodes, device="cpu").run(env) | {name: env[name] for name in states}
        said = decode_graphs.promised(match, tensors)
        for operand in match.operands:
            if operand.access.value != "read":
                real = torch.cat([wanted.get(v, env[v]).reshape(-1) for v in operand.values])
                claim = said[operand.name].reshape(-1)
                torch.testing.assert_close(claim, real, rtol=2e-5, atol=2e-5, msg=lambda m, x=match: f"{x.id}: {m}")


@pytest.mark.parametrize("model", MODELS)
def test_operand_specs_are_contiguous_and_of_the_right_size(decode_graphs, model):
    _, graph = decode_graphs.transformer(layers=1, **MODELS[model])
    for match in find(graph):
        for operand in match.operands:
            assert not operand.spec.strides
            assert operand.spec.numel == sum(graph.spec(v).numel for v in operand.values), (match.id, operand.name)


def test_qkv_with_norm_is_one_match_over_the_residual(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1, bias=True)
    best = max(of_kind(find(graph), "linear", SemanticLabel.QKV_PROJECTION), key=lambda m: len(m.nodes))
    assert best.text("norm") == "rms" and best.integer("n") == 64 and best.integer("k") == 32
    assert best.need("weight").values == ("layers.0.q.weight", "layers.0.k.weight", "layers.0.v.weight")
    assert best.need("aux0").values == ("layers.0.q.bias", "layers.0.k.bias", "layers.0.v.bias") and best.need("aux0").spec.shape == (64,)
    assert best.need("weight").spec.shape == (64, 32) and len(best.need("out").values) == 3
    assert best.need("x").values[0].startswith("embedding")


def test_one_matrix_for_q_k_and_v_writes_the_parts(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1, fused=True)
    parts = [m for m in of_kind(find(graph), "linear", SemanticLabel.QKV_PROJECTION) if m.text("norm") == "rms"]
    (match,) = parts
    assert match.need("weight").values == ("layers.0.qkv.weight",) and match.integer("n") == 64
    assert [graph.spec(v).numel for v in match.need("out").values] == [32, 16, 16]


@pytest.mark.parametrize("ranges", [
    [(0, 8), (8, 12)], [(0, 8), (6, 16)], [(0, 8), (4, 12)], [(2, 10), (10, 18)], [(4, 16)], [(0, 16, 2), (1, 16, 2)], [(0, 16)]])
def test_parts_that_do_not_tile_the_result_are_not_written_alone(decode_graphs, ranges):
    b = decode_graphs.Builder()
    y = b.linear("w", b.given("x", b.randn(1, 1, 8), ValueKind.INPUT), 16)
    cuts = [b.call("aten.slice.Tensor", y, 2, *r) for r in ranges]
    assert {m.need("out").values for m in of_kind(find(b.graph(*cuts)), "linear")} == {(y.value,)}


def test_gate_rows_come_first_whichever_order_the_model_calls_them_in(decode_graphs):
    b = decode_graphs.Builder()
    x = b.given("x", b.randn(1, 1, 16), ValueKind.INPUT)
    up = b.linear("up", x, 24)
    gate = b.call("aten.silu.default", b.linear("gate", x, 24))
    pair = next(m for m in find(b.graph(b.call("aten.mul.Tensor", up, gate))) if m.label == SemanticLabel.GATED_MLP)
    assert pair.need("weight").values == ("gate.weight", "up.weight") and pair.integer("pair") == 2
    assert [op.kind for op in pair.epilogue.operations] == [K.SILU, K.MUL]


def test_pair_with_biases_adds_them_before_the_activation(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1, bias=True, qk_norm=False)
    pair = next(m for m in find(graph) if m.label == SemanticLabel.GATED_MLP)
    assert [op.kind for op in pair.epilogue.operations] == [K.ADD, K.ADD, K.SILU, K.MUL]
    assert (pair.need("aux0").values, pair.need("aux1").values) == (("layers.0.gate.bias",), ("layers.0.up.bias",))


def test_output_projection_takes_the_residual(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1)
    fused = [m for m in of_kind(find(graph), "linear", SemanticLabel.GEMV) if m.operand("aux0") and m.need("aux0").role is Role.INPUT]
    residuals = {m.need("weight").values[0]: m.need("aux0").values[0] for m in fused}
    assert residuals["layers.0.o.weight"].startswith("embedding") and residuals["layers.0.down.weight"].startswith("add")


def test_attention_reaches_from_the_projections_to_the_output_projection(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1)
    widest = max(of_kind(find(graph), "attention"), key=lambda m: len(m.nodes))
    assert widest.flag("qk_norm") and widest.flag("rope") and widest.need("out").values[0].startswith("reshape")
    assert all(widest.need(name).values[0].startswith("linear") for name in ("q", "k", "v"))
    assert widest.need("position").role is Role.LENGTH and widest.need("k_cache").role is Role.STATE
    assert widest.integer("state_bytes") == 2 * 8 * 2 * 8 * 4  # K and V, half of 16 positions, 2 heads of 8 fp32


def test_attention_with_different_norms_for_q_and_k_keeps_them_outside(decode_graphs):
    b = decode_graphs.Builder()
    cos, sin = (b.given(n, b.randn(1, 1, 8), ValueKind.INPUT) for n in ("cos", "sin"))
    sides = []
    for name, eps in (("q", 1e-6), ("k", 1e-5), ("v", None)):
        side = b.given(name, b.randn(1, 2, 1, 8), ValueKind.INPUT)
        if eps:
            side = b.call("agentcompile.rms_norm.default", side, b.weight(f"{name}_norm", 8), eps, False)
            side = b.call("agentcompile.rope.default", side, cos, sin)
        sides.append(side)
    caches = [b.given(n, b.randn(1, 16, 2, 8), ValueKind.STATE) for n in ("kc", "vc")]
    position = b.given("position", torch.tensor([2]), ValueKind.STATE)
    out = b.call("agentcompile.attention.default", *sides, *caches, position, 1.0, mutates=("kc", "vc"))
    attention = of_kind(find(b.graph(out)), "attention")
    assert {m.flag("rope") for m in attention} == {True, False} and not any(m.flag("qk_norm") for m in attention)


@pytest.mark.parametrize("rope", ["pairs", "pairs_wide"])
def test_attention_takes_in_rotations_of_neighbours_and_casts_around_them(rope):
    match, graph = attention_case(heads=(4, 2), head_dim=16, capacity=40, rope=rope)
    assert match.flag("rope") and match.flag("interleaved") and len(match.nodes) == len(graph.nodes)
    assert (match.need("q").values, match.need("cos").values) == (("q",), ("cos",))


@pytest.mark.parametrize("other", ["style", "table", "read"])
def test_attention_takes_in_no_rotations_that_differ_or_that_others_read(decode_graphs, other):
    b = decode_graphs.Builder()
    tables = [b.given(n, b.randn(1, 1, 8), ValueKind.INPUT) for n in ("cos", "sin", "cos2", "sin2")]
    q, k, v = (b.given(n, b.randn(1, 2, 1, 8), ValueKind.INPUT) for n in "qkv")
    q = b.call("agentcompile.rope.default", q, *tables[:2], True)
    k = b.call("agentcompile.rope.default", k, *(tables[2:] if other == "table" else tables[:2]), other != "style")
    caches = [b.given(n, b.randn(1, 16, 2, 8), ValueKind.STATE) for n in ("kc", "vc")]
    position = b.given("position", torch.tensor([2]), ValueKind.STATE)
    out = b.call("agentcompile.attention.default", q, k, v, *caches, position, 1.0, mutates=("kc", "vc"))
    graph = b.graph(out, q) if other == "read" else b.graph(out)
    assert not any(m.flag("rope") for m in of_kind(find(graph), "attention"))


@pytest.mark.parametrize("size", [0, 3])
def test_attention_in_chunks_of_positions_says_so(decode_graphs, size):
    """And counts what a chunk holds: a kernel reads the cache from where one begins."""
    b = decode_graphs.Builder()
    q, k = (b.given(n, b.randn(1, heads, 1, 8), ValueKind.INPUT) for n, heads in (("q", 4), ("k", 2)))
    caches = [b.given(n, b.randn(1, 16, 2, 8), ValueKind.STATE) for n in ("kc", "vc")]
    position = b.given("position", torch.tensor([5]), ValueKind.STATE)
    out = b.call("agentcompile.attention.default", q, k, k, *caches, position, 1.0, 0, 0.0, None, False, None, size, mutates=("kc", "vc"))
    matches = of_kind(find(b.graph(out)), "attention")
    row_bytes = 2 * 2 * 8 * 4
    assert matches and {(m.integer("chunk"), m.integer("state_bytes")) for m in matches} == {(size, (size or 8) * row_bytes)}


def test_prompt_chunks_and_fresh_attention_are_not_matched(decode_graphs):
    b = decode_graphs.Builder()
    x = b.given("x", b.randn(1, 4, 16), ValueKind.INPUT)
    q, k = (b.given(n, b.randn(1, 2, 4, 8), ValueKind.INPUT) for n in ("q", "k"))
    caches = [b.given(n, b.randn(1, 16, 2, 8), ValueKind.STATE) for n in ("kc", "vc")]
    position = b.given("position", torch.tensor([0]), ValueKind.STATE)
    out = b.call("agentcompile.attention.default", q, k, k, *caches, position, 1.0, 0, 0.0, None, True, mutates=("kc", "vc"))
    assert not of_kind(find(b.graph(b.linear("w", x, 24), out)), "linear") + of_kind(find(b.graph(out)), "attention")


@pytest.mark.parametrize("kind", ["rms", "rms_one_plus", "layer"])
def test_norm_that_others_read_is_written_by_a_prologue(decode_graphs, kind):
    b = decode_graphs.Builder()
    h = b.given("h", b.randn(1, 1, 16), ValueKind.INPUT)
    x = b.norm("norm", h, kind)
    graph = b.graph(b.linear("w", b.call("aten.view.default", x, (1, 1, 16)), 24), x)
    alone, fused = of_kind(find(graph), "linear")
    assert alone.text("norm") == "none" and fused.text("norm") == kind and not problem(fused, graph, dependencies(graph))
    assert fused.need("norm_out").values == (x.value,)
    said = decode_graphs.promised(fused, b.results | b.tensors)
    torch.testing.assert_close(said["norm_out"].reshape(-1), b.results[x.value].reshape(-1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_number_that_the_operand_is_multiplied_with_is_one_that_the_result_is(decode_graphs, shared, bias):
    """Falcon-H1 scales a norm in one way for its recurrence and in another for its attention."""
    b = decode_graphs.Builder()
    x = b.norm("norm", b.given("h", b.randn(1, 1, 16), ValueKind.INPUT))
    made = b.linear("w", b.call("aten.mul.Tensor", b.call("aten.mul.Tensor", x, 0.3), 0.5), 24, bias)
    graph = b.graph(b.call("aten.silu.default", made), *((x,) if shared else ()))
    matches = of_kind(find(graph), "linear")
    widest = max(matches, key=lambda m: len(m.nodes))
    assert len(widest.nodes) == 5 and widest.text("norm") == "rms" and (widest.operand("norm_out") is not None) is shared
    for match in matches:
        assert not problem(match, graph, dependencies(graph)), match.id
        said = decode_graphs.promised(match, b.results | b.tensors)
        torch.testing.assert_close(said["out"].reshape(-1), b.results[match.need("out").values[0]].reshape(-1), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_is_no_number_stays_in_front(decode_graphs, number):
    b = decode_graphs.Builder()
    made = b.linear("w", b.call("aten.mul.Tensor", b.given("h", b.randn(1, 1, 16), ValueKind.INPUT), number), 24)
    assert [len(m.nodes) for m in of_kind(find(b.graph(made)), "linear")] == [1]


def test_layers_beside_each_other_take_a_norm_in_together(decode_graphs):
    """Of a group no layer does so alone: another one that reads the norm would wait for it for nothing."""
    b = decode_graphs.Builder()
    x = b.norm("norm", b.given("h", b.randn(1, 1, 16), ValueKind.INPUT))
    graph = b.graph(b.linear("one", x, 24), b.linear("other", x, 8), x)
    assert sorted((len(m.need("weight").values), m.text("norm")) for m in of_kind(find(graph), "linear")) == [
        (1, "none"), (1, "none"), (2, "none"), (2, "rms")]


def test_norm_per_head_before_a_linear_is_no_prologue(decode_graphs):
    b = decode_graphs.Builder()
    heads = b.norm("norm", b.given("h", b.randn(1, 1, 4, 8), ValueKind.INPUT))
    graph = b.graph(b.linear("w", b.call("aten.view.default", heads, (1, 1, 32)), 24))
    assert [m.text("norm") for m in of_kind(find(graph), "linear")] == ["none"]


def test_a_window_bounds_the_bytes_of_attention(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1, window=4)
    assert {m.integer("state_bytes") for m in of_kind(find(graph), "attention")} == {2 * 4 * 2 * 8 * 4}


def test_the_table_of_a_position_reads_it_late(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1)
    (table,) = of_kind(find(graph), "rope_table")
    assert table.need("position").role is Role.LENGTH and table.need("position").values == ("session.position",)
    assert table.need("inv_freq").role is Role.CONSTANT


def test_value_that_others_read_ends_the_epilogue(decode_graphs):
    b = decode_graphs.Builder()
    x = b.given("x", b.randn(1, 1, 16), ValueKind.INPUT)
    y = b.linear("w", x, 24)
    z = b.call("aten.silu.default", y)
    assert [m.need("out").values for m in of_kind(find(b.graph(y, z)), "linear")] == [(y.value,)]
    assert {m.need("out").values for m in of_kind(find(b.graph(z)), "linear")} == {(y.value,), (z.value,)}


def test_value_used_twice_inside_is_fused(decode_graphs):
    b = decode_graphs.Builder()
    y = b.linear("w", b.given("x", b.randn(1, 1, 16), ValueKind.INPUT), 24)
    swish = b.call("aten.mul.Tensor", y, b.call("aten.sigmoid.default", y))
    graph = b.graph(b.call("aten.sub.Tensor", swish, 0.5))
    widest = max(of_kind(find(graph), "linear"), key=lambda m: len(m.nodes))
    assert [op.kind for op in widest.epilogue.operations] == [K.SIGMOID, K.MUL, K.SUB]
    assert widest.epilogue.operations[2].operands == (1, 0.5)


def test_residual_that_depends_on_the_match_is_not_taken(decode_graphs):
    b = decode_graphs.Builder()
    y = b.linear("w", b.given("x", b.randn(1, 1, 16), ValueKind.INPUT), 16)
    later = b.linear("v", b.norm("n", y), 16)
    graph = b.graph(b.add(y, later))
    assert not any("w.weight" in m.need("weight").values and len(m.nodes) > 1 for m in of_kind(find(graph), "linear"))


@pytest.mark.parametrize("call", [
    lambda b, x: b.call("aten.softplus.default", x, 1.0, 2.0),
    lambda b, x: b.call("aten.div.Tensor_mode", x, 2.0, rounding_mode="floor"),
    lambda b, x: b.call("aten.pow.Tensor_Scalar", x, 2.5),
    lambda b, x: b.call("aten.cumsum.default", x, -1),
    lambda b, x: b.call("aten.to.dtype", x, Symbol("dtype", "float16")),
])
def test_operators_outside_the_grammar_are_not_elementwise(decode_graphs, call):
    b = decode_graphs.Builder()
    out = call(b, b.given("x", b.randn(1, 1, 16), ValueKind.INPUT))
    assert not [m for m in find(b.graph(out)) if m.label == SemanticLabel.ELEMENTWISE and m.epilogue.operations[0].kind is not K.ROUND]


def test_broadcast_of_rows_and_scalars(decode_graphs):
    b = decode_graphs.Builder()
    x = b.given("x", b.randn(1, 3, 16), ValueKind.INPUT)
    out = b.call("aten.mul.Tensor", b.add(x, b.weight("row", 16)), b.weight("scalar", 1))
    widest = max(find(b.graph(out)), key=lambda m: len(m.nodes))
    assert [widest.text(f"broadcast{i}") for i in range(3)] == ["full", "row", "scalar"]
    assert (widest.integer("count"), widest.integer("columns")) == (48, 16)


def test_results_without_axes_are_no_rows(decode_graphs):
    """A sum of everything and what is computed with it: one element, which a row of many is no input of."""
    b = decode_graphs.Builder()
    row = b.given("x", b.randn(16), ValueKind.INPUT)
    total = b.call("aten.exp.default", b.call("aten.sum.default", row))
    graph = b.graph(b.call("aten.mul.Tensor", b.call("aten.neg.default", row), total), b.call("aten.sub.Tensor", total, 0.5))
    assert {m.text("broadcast0") for m in find(graph) if m.label == SemanticLabel.ELEMENTWISE} >= {"full"}


@pytest.mark.parametrize(("shape", "kind", "inner"), [
    ((3, 1, 1), "channel", 16), ((1, 3, 1, 1), "channel", 16), ((3, 2, 8), "channel", 1), ((2, 1, 1, 1), "channel", 48),
    ((2, 3, 1, 1), "channel", 16), ((2, 1), "channel", 8), ((2, 1, 2, 8), "middle", 16), ((2, 3, 1, 8), "middle", 8),
    ((2, 1, 1, 8), "middle", 8), ((3, 1, 8), "", 0), ((2, 1, 2, 1), "", 0), ((1, 3, 1, 8), "", 0),
])
def test_what_repeats_along_neighbouring_axes_is_read_by_channel_or_around_the_middle(decode_graphs, shape, kind, inner):
    """What repeats along axes that are no neighbours, and has elements around both, is read by no kernel."""
    b = decode_graphs.Builder()
    x = b.given("x", b.randn(2, 3, 2, 8), ValueKind.INPUT)
    found = find(b.graph(b.add(x, b.weight("part", *shape))))
    assert [(m.text("broadcast1"), m.integer("inner")) for m in found] == ([(kind, inner)] if kind else [])


def test_a_view_between_keeps_what_a_channel_is(decode_graphs):
    """[2, 3, 4] + [3, 1], seen as [4, 3, 2]: there the same numbers would be other channels."""
    b = decode_graphs.Builder()
    x = b.given("x", b.randn(2, 3, 4), ValueKind.INPUT)
    seen = b.call("aten.view.default", b.add(x, b.weight("part", 3, 1)), (4, 3, 2))
    widest = max(find(b.graph(b.call("aten.exp.default", seen))), key=lambda m: len(m.nodes))
    assert len(widest.nodes) == 3 and widest.integer("inner") == 4


def test_embedding_by_position_reads_the_state_as_an_input(decode_graphs):
    b = decode_graphs.Builder()
    position = b.given("session.position", torch.tensor([2]), ValueKind.STATE)
    graph = b.graph(b.call("aten.embedding.default", b.weight("wpe", 16, 8), b.call("aten.unsqueeze.default", position, 0)))
    (gather,) = of_kind(find(graph), "gather")
    assert gather.need("ids").role is Role.INPUT and (gather.integer("rows"), gather.integer("columns")) == (1, 8)


def test_forward_graphs_of_plain_modules_are_matched_too(decode_graphs):
    b = decode_graphs.Builder()
    x = b.given("x", b.randn(1, 16), ValueKind.INPUT)
    y = b.linear("fc2", b.call("aten.relu.default", b.linear("fc1", x, 24, bias=True)), 4)
    graph = b.graph(y, kind=GraphKind.FORWARD)
    assert {m.need("weight").values[0] for m in of_kind(find(graph), "linear")} == {"fc1.weight", "fc2.weight"}
