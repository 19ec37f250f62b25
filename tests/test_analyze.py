"""Analyze: where regions are cut, which are equal, which matches the core refuses, what summaries say."""

import pytest
from analyze_cases import chain, context, graph_set, relu, renamed
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.ir import serial
from agentcompile_core.ir.graph import (
    DType,
    Ref,
    TensorSpec,
    ValueKind,
    map_refs,
)
from agentcompile_core.ir.region import Analysis, SemanticLabel
from agentcompile_core.ops.canonical import canonical
from agentcompile_core.ops.dependency import dependencies
from agentcompile_core.stages import analyze
from agentcompile_core.stages.analyze.boundaries import boundary_reason, layer_indices, partition
from agentcompile_core.stages.analyze.merging import merge

# ---- regions


def test_a_transformer_is_prologue_layer_and_head(decode_graphs):
    _, graph = decode_graphs.transformer(layers=3)
    (analysis,) = analyze.run(graph_set(graph), context())
    assert [(r.name, len(r.instances)) for r in analysis.regions] == [("prologue", 1), ("layer", 3), ("head", 1)]
    assert analysis.instances == 5 and analysis.graph == "decode"
    covered = [name for region in analysis.regions for instance in region.instances for name in instance.node.values()]
    assert sorted(covered) == sorted(node.name for node in graph.nodes)


def test_instances_are_the_region_under_other_names(decode_graphs):
    _, graph = decode_graphs.transformer(layers=3)
    layer = merge(graph, partition(graph))[1]
    for index, instance in enumerate(layer.instances):
        assert list(instance.node) == [node.name for node in layer.graph.nodes]
        for node in layer.graph.nodes:
            other = graph.node_by_name[instance.node[node.name]]
            assert (other.op, other.layer) == (node.op, index)
            assert other.args == tuple(map_refs(a, instance.value) for a in node.args)
            assert other.outputs == tuple(instance.value[o] for o in node.outputs)
    weights = {instance.value["layers.0.q.weight"] for instance in layer.instances}
    assert weights == {f"layers.{i}.q.weight" for i in range(3)}


def test_layers_that_differ_are_not_merged(decode_graphs):
    _, graph = decode_graphs.transformer(layers=3, window=4)
    odd = next(n for n in graph.nodes if n.kind == "attention" and n.layer == 1)
    nodes = tuple(evolve(n, args=(*n.args[:7], 0)) if n is odd else n for n in graph.nodes)
    regions = merge(evolve(graph, nodes=nodes), partition(graph))
    assert [(r.name, len(r.instances)) for r in regions] == [("prologue", 1), ("layer", 2), ("layer_2", 1), ("head", 1)]


@given(salt=st.text("abcxyz", min_size=1, max_size=4))
def test_signatures_do_not_depend_on_names(decode_graphs, salt):
    _, graph = decode_graphs.transformer(layers=2, hidden=16, inter=24, vocabulary=8)
    other = renamed(graph, salt)
    mine, theirs = merge(graph, partition(graph)), merge(other, partition(other))
    assert [r.signature for r in mine] == [r.signature for r in theirs]
    assert [len(r.instances) for r in mine] == [len(r.instances) for r in theirs]
    found, again = ([analyze.with_matches(r, context()).matches for r in regions] for regions in (mine, theirs))
    assert [[(m.kind, m.attributes, m.epilogue) for m in ms] for ms in found] == [
        [(m.kind, m.attributes, m.epilogue) for m in ms] for ms in again]


@pytest.mark.parametrize("change", [
    lambda n, v, o: ((evolve(n, op="aten.silu.default"),), v, o),
    lambda n, v, o: ((evolve(n, kind="silu"),), v, o),
    lambda n, v, o: ((evolve(n, args=(*n.args, 1)),), v, o),
    lambda n, v, o: ((evolve(n, args=(*n.args, 1.0)),), v, o),
    lambda n, v, o: ((evolve(n, args=(*n.args, True)),), v, o),
    lambda n, v, o: ((evolve(n, args=(*n.args, float("inf"))),), v, o),
    lambda n, v, o: ((evolve(n, args=(*n.args, "inf")),), v, o),
    lambda n, v, o: ((evolve(n, kwargs=(("alpha", 1),)),), v, o),
    lambda n, v, o: ((evolve(n, mutates=("x",)),), v, o),
    lambda n, v, o: ((n,), (evolve(v[0], kind=ValueKind.WEIGHT), v[1]), o),
    lambda n, v, o: ((n,), (evolve(v[0], spec=TensorSpec(shape=(4,), dtype=DType.F16)), v[1]), o),
    lambda n, v, o: ((n,), (evolve(v[0], spec=TensorSpec(shape=(2, 2), dtype=DType.F32)), v[1]), o),
    lambda n, v, o: ((n,), (evolve(v[0], spec=TensorSpec(shape=(4,), dtype=DType.F32, strides=(2,))), v[1]), o),
    lambda n, v, o: ((n,), v, ()),
])
def test_signatures_depend_on_everything_else(change):
    graph = chain(relu("r", "x", "c"))
    nodes, values, outputs = change(graph.nodes[0], graph.values, graph.outputs)
    changed = [evolve(graph, nodes=nodes, values=values, outputs=outputs)]
    assert canonical(changed[0]).signature != canonical(graph).signature


def test_constants_of_different_types_are_different():
    graph = chain(relu("r", "x", "c"))
    nodes = [evolve(graph.nodes[0], args=(Ref("x"), a)) for a in (1, 1.0, True, "1", None, (1,))]
    forms = {canonical(evolve(graph, nodes=(node,))).signature for node in nodes}
    assert len(forms) == 6


@pytest.mark.parametrize(("op", "extra", "reason"), [
    ("aten.relu_.default", {}, "undeclared mutation"),
    ("aten.add.out", {}, "undeclared mutation"),
    ("aten.nonzero.default", {}, "data-dependent operator"),
    ("aten._local_scalar_dense.default", {}, "data-dependent operator"),
    ("aten.relu_.default", {"mutates": ("a",)}, ""),
    ("aten.relu.default", {}, ""),
])
def test_hard_boundaries(op, extra, reason):
    graph = chain(relu("first", "x", "a"), ("middle", op, "what", ("a",), ("b",), extra), relu("last", "b", "c"))
    assert boundary_reason(graph, graph.nodes[1]) == reason
    expected = [("first",), ("last",)] if reason else [("first", "middle", "last")]
    assert [part.nodes for part in partition(graph)] == expected


def test_double_precision_is_a_boundary():
    assert partition(chain(relu("r", "x", "c"), spec=TensorSpec(shape=(4,), dtype=DType.F64))) == ()


def test_layers_come_from_module_paths_where_capture_gave_none(decode_graphs):
    _, graph = decode_graphs.transformer(layers=3)
    plain = evolve(graph, nodes=tuple(evolve(n, layer=-1) for n in graph.nodes))
    assert layer_indices(plain.nodes) == layer_indices(graph.nodes)


def test_a_small_sequential_is_one_region():
    rows = [relu(f"r{i}", "x" if i == 0 else f"v{i - 1}", f"v{i}", module=f"net.{i}", layer=i) for i in range(4)]
    assert [part.nodes for part in partition(chain(*rows, outputs=("v3",)))] == [("r0", "r1", "r2", "r3")]


def test_a_layer_that_something_outside_interrupts_is_cut():
    rows = [relu(f"a{i}", "x" if i == 0 else f"va{i - 1}", f"va{i}", layer=0) for i in range(4)]
    rows += [relu("outside", "va3", "vo")] + [relu(f"b{i}", "vo" if i == 0 else f"vb{i - 1}", f"vb{i}", layer=0) for i in range(4)]
    parts = partition(chain(*rows, outputs=("vb3",)))
    assert [part.nodes for part in parts] == [("a0", "a1", "a2", "a3"), ("outside",), ("b0", "b1", "b2", "b3")]


@st.composite
def random_graphs(draw):
    """Random programs of relu and add over a few layers, with boundaries."""
    count = draw(st.integers(1, 24))
    rows = []
    for i in range(count):
        sources = draw(st.lists(st.sampled_from(["x", *(f"v{j}" for j in range(i))]), min_size=1, max_size=2))
        op = draw(st.sampled_from(["aten.relu.default"] * 6 + ["aten.nonzero.default"]))
        rows.append((f"n{i}", op, "relu", tuple(sources), (f"v{i}",), {"layer": draw(st.integers(-1, 2))}))
    return chain(*rows, outputs=(f"v{count - 1}",))


@given(graph=random_graphs())
def test_parts_are_disjoint_convex_and_of_one_layer(graph):
    deps = dependencies(graph)
    parts = partition(graph)
    masks = [deps.mask(part.nodes) for part in parts]
    assert sum(mask.bit_count() for mask in masks) == sum(1 for n in graph.nodes if not boundary_reason(graph, n))
    assert all(deps.is_convex(mask) for mask in masks) and deps.is_schedulable(masks)
    layers = layer_indices(graph.nodes)
    if max(list(layers.values()).count(layer) for layer in range(3)) >= 4:
        assert all(len({layers[name] for name in part.nodes}) == 1 for part in parts)


@given(graph=random_graphs(), data=st.data())
def test_convexity_is_what_it_says(graph, data):
    deps = dependencies(graph)
    chosen = data.draw(st.sets(st.sampled_from([n.name for n in graph.nodes]), min_size=1))
    reached, convex = set(), True  # by hand: what is reached from the set through the outside
    for node in graph.nodes:
        sources = {graph.producer[i].name for i in node.inputs if i in graph.producer}
        if node.name in chosen:
            convex &= not sources & reached
        elif sources & (chosen | reached):
            reached.add(node.name)
    assert deps.is_convex(deps.mask(chosen)) == convex


def test_writers_wait_for_readers(decode_graphs):
    _, graph = decode_graphs.transformer(layers=2)
    deps = dependencies(graph)
    advance = next(n.name for n in graph.nodes if n.kind == "advance")
    readers = [n.name for n in graph.nodes if n.kind in ("attention", "rotary_embedding", "embedding")]
    assert deps.mask(readers) & ~deps.ancestors[deps.index[advance]] == 0


def test_effects_order_what_data_does_not():
    rows = [relu("reads", "s", "a"), ("writes", "aten.relu_.default", "relu", ("s",), ("b",), {"mutates": ("s",)}), relu("again", "s", "c")]
    deps = dependencies(chain(*rows, given=("s",)))
    assert [deps.members(mask) for mask in deps.before] == [(), ("reads",), ("writes",)]


# ---- summaries


def test_summaries_count_and_measure(decode_graphs):
    _, graph = decode_graphs.transformer(layers=2)
    (analysis,) = analyze.run(graph_set(graph), context())
    layer = analysis.summaries[1]
    assert layer.instances == 2 and dict(layer.operators)["linear"] == 7 and "view" not in dict(layer.operators)
    assert layer.dominant == SemanticLabel.GATED_MLP and layer.label == SemanticLabel.MIXED and layer.dynamic_shapes
    pair = next(m for m in layer.matches if m.label == SemanticLabel.GATED_MLP and m.kind == "linear" and "rms_norm" in m.operators)
    assert pair.flops == 2 * 2 * 48 * 32 + 48 * 2 + 4 * 32
    assert pair.bytes == 4 * (2 * 48 * 32 + 32 + 32 + 48)
    assert pair.dtype == "float32" and pair.reduction_axis == -1 and pair.intensity == pytest.approx(pair.flops / pair.bytes)


def test_summaries_name_no_weight_and_no_module(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1)
    (analysis,) = analyze.run(graph_set(graph), context())
    text = serial.dumps(analysis.summaries)
    assert "layers.0" not in text and ".weight" not in text


def test_analyses_survive_json(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1)
    (analysis,) = analyze.run(graph_set(graph), context())
    assert serial.loads(serial.dumps(analysis), Analysis) == analysis


def test_a_lookup_moves_its_row_and_not_the_table(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1)
    (analysis,) = analyze.run(graph_set(graph), context())
    (lookup,) = [m for m in analysis.summaries[0].matches if m.kind == "gather"]
    assert lookup.bytes == 8 + 2 * 32 * 4  # the id, the row read, the row written
