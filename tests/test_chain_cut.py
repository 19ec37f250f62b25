"""The shorter graph that the chain is judged on, over generated graphs: a module's parts are numbered like layers and need not repeat."""

from collections import Counter

from agentcompile_cuda_kit.targets import preset
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, TensorSpec, Value, ValueKind
from agentcompile_core.stages.analyze.boundaries import partition
from agentcompile_core.stages.analyze.merging import merge
from agentcompile_core.stages.select.cut import cut, layers_needed

SPEC = TensorSpec(shape=(1, 64), dtype=DType.F32)
POINTWISE = ("relu", "tanh", "neg", "exp")


def graph_of(layers: list[tuple[int, list[tuple[str, int]]]]) -> Graph:
    """Nodes layer by layer; each reads the value before it and, added to that, the one so many values back (0: a linear with a weight)."""
    values, nodes, made = [Value(name="x", spec=SPEC, kind=ValueKind.INPUT)], [], ["x"]
    for number, (layer, members) in enumerate(layers):
        for word, back in members:
            name = f"{word}_{len(nodes)}"
            if back == 0:
                values.append(Value(name=f"w.{name}", spec=TensorSpec(shape=(64, 64), dtype=DType.F32), kind=ValueKind.WEIGHT))
                call = ("aten.linear.default", "linear", (Ref(made[-1]), Ref(f"w.{name}")))
            elif back == 1:
                call = (f"aten.{word}.default", word, (Ref(made[-1]),))
            else:
                call = ("aten.add.Tensor", "add", (Ref(made[-1]), Ref(made[-min(back, len(made))])))
            nodes.append(Node(name=name, op=call[0], kind=call[1], args=call[2], outputs=(name,), layer=layer, module=f"{number}"))
            values.append(Value(name=name, spec=SPEC))
            made.append(name)
    graph = Graph(name="forward", kind=GraphKind.FORWARD, values=tuple(values), nodes=tuple(nodes), inputs=("x",), outputs=(made[-1],))
    return graph.verify()


MEMBERS = st.lists(st.tuples(st.sampled_from(POINTWISE), st.integers(0, 6)), min_size=1, max_size=6)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Some kinds of layers in any order, repeated or not, with parts outside of layers between them."""
    kinds = draw(st.lists(MEMBERS, min_size=1, max_size=3))
    layers, number = [], draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 9))):
        outside = draw(st.integers(0, 4)) == 0
        layers.append((-1 if outside else number, draw(st.sampled_from(kinds))))
        number += 0 if outside else draw(st.integers(1, 2))
    return graph_of(layers)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(graphs(), st.integers(1, 9))
def test_every_graph_cuts_to_one_that_runs(graph: Graph, layers: int) -> None:
    """`nn.Sequential(Linear, ReLU, Linear)` ended its compile on a GPU: its second linear was dropped like a repeated layer."""
    regions = merge(graph, partition(graph))
    short, kept = cut(graph, regions, layers)
    assert short.verify() and short.nodes and len(short.nodes) <= len(graph.nodes)
    wanted = sorted({node.layer for node in graph.nodes if node.layer >= 0})[:layers]
    assert {node.name for node in graph.nodes if node.layer in (-1, *wanted)} <= {node.name for node in short.nodes}
    names = {node.name for node in short.nodes}
    assert all(name in names for region in kept for instance in region.instances for _, name in instance.nodes)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(MEMBERS.filter(lambda members: len(members) >= 4 and members[0][1] <= 1), st.integers(2, 12), st.integers(1, 12))
def test_layers_that_repeat_are_cut_to_the_number_asked_for(members: list[tuple[str, int]], count: int, layers: int) -> None:
    members = [(word, min(back, at + 1)) for at, (word, back) in enumerate(members)]  # within its own layer
    graph = graph_of([(number, members) for number in range(count)])
    short, _ = cut(graph, merge(graph, partition(graph)), layers)
    assert Counter(node.layer for node in short.nodes) == dict.fromkeys(range(min(layers, count)), len(members))


def test_layers_without_weights_count_as_layers() -> None:
    graph = graph_of([(0, [("relu", 0)]), (1, [("relu", 1)]), (2, [("relu", 0)])])
    assert layers_needed(graph, preset("h200")) == 3
