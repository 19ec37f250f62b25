"""Whether something is written in place between two nodes, against a walk from one to the other, in generated graphs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import Graph, GraphKind, Node
from agentcompile_core.ops.operator_names import ATTENTION
from agentcompile_core.ops.write_order import written_between

OPS = ("aten.add.Tensor", "aten.copy_.default", ATTENTION)


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(ops=st.lists(st.tuples(st.sampled_from(OPS), st.booleans()), min_size=1, max_size=12), data=st.data())
def test_what_is_written_between_two_nodes_is_seen(ops: list[tuple[str, bool]], data: st.DataObject) -> None:
    nodes = tuple(Node(name=f"n{i}", op=op, kind="any", args=(), outputs=(), mutates=("x",) * writes)
                  for i, (op, writes) in enumerate(ops))
    graph = Graph(name="g", kind=GraphKind.FORWARD, tokens=1, values=(), nodes=nodes, inputs=(), outputs=())
    places = st.integers(0, len(nodes) - 1)
    for _ in range(4):
        first, second = data.draw(places), data.draw(places)
        for counts in (True, False):
            wanted = any(node.mutates and (counts or node.op != ATTENTION) for node in nodes[first:second])
            assert written_between(graph, f"n{first}", f"n{second}", by_attention=counts) == wanted
