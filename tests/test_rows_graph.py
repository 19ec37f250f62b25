"""The graph of several rows computes what the one of a single row does, whichever nodes are copied and however their results lie."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, Symbol, TensorSpec, Value, ValueKind
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.rows import rows_graph
from agentcompile_core.ops.schema import canonical

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=150)
VOCABULARY, CAPACITY = 16, 8
Shape = tuple[int, ...]


class Step:
    """A decode step: an embedding, ways to lay its elements out and to compute with them, a product, the most likely token."""

    def __init__(self, draw: Any) -> None:
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        heads, width = draw(st.integers(1, 4)), draw(st.integers(2, 5))
        self.tensors = {"table": torch.randn(VOCABULARY, heads * width, generator=torch.Generator().manual_seed(1)),
                        "head": torch.randn(VOCABULARY, heads * width, generator=torch.Generator().manual_seed(2))}
        for name, tensor in self.tensors.items():
            self._value(name, tuple(tensor.shape), DType.F32, ValueKind.WEIGHT, name)
        for name, shape in (("ids", (1, 1)), ("position", (1,)), ("history", (CAPACITY + 1,))):
            self._value(name, shape, DType.I64, ValueKind.STATE, f"session.{name}")
        current, shape = self._node("aten.embedding.default", (Ref("table"), Ref("ids")), (1, 1, heads * width)), (1, 1, heads, width)
        current = self._node("aten.view.default", (Ref(current), shape), shape)
        for kind in draw(st.lists(st.sampled_from(("turn", "compute", "pack", "flat", "turn pack flat")), max_size=6)):
            for one in kind.split():
                current, shape = self._changed(draw, one, current, shape, heads * width)
        flat = self._node("aten.reshape.default", (Ref(current), (1, 1, heads * width)), (1, 1, heads * width))
        logits = self._node("aten.linear.default", (Ref(flat), Ref("head")), (1, 1, VOCABULARY))
        token = self._node("agentcompile.argmax.default", (Ref(logits),), (1,), DType.I64)
        self.nodes.append(canonical(Node(name="advance", op="agentcompile.advance.default", kind="advance", outputs=(),
                                         args=(Ref(token), Ref("ids"), Ref("position"), Ref("history")),
                                         mutates=("ids", "position", "history"))))
        self.graph = Graph(name="decode", kind=GraphKind.DECODE, tokens=1, values=tuple(self.values), nodes=tuple(self.nodes), inputs=(),
                           outputs=(logits, token)).verify()
        layout = [node.name for node in self.nodes if node.op in ("aten.view.default", "aten.transpose.int", "aten.tanh.default",
                                                                  "aten.unsqueeze.default", "aten.squeeze.dim")]
        self.apart = draw(st.sets(st.sampled_from(layout)))

    def _changed(self, draw: Any, kind: str, current: str, shape: Shape, elements: int) -> tuple[str, Shape]:
        """Another layout of the elements, that a single row allows in place, or other elements."""
        if kind == "compute":
            return self._node("aten.tanh.default", (Ref(current),), shape), shape
        if kind == "pack":
            packed = Symbol(kind="memory_format", name="contiguous_format")
            return self._node("aten.clone.default", (Ref(current),), shape, memory_format=packed), shape
        if kind == "turn" and len(shape) == 4:
            made = (shape[0], shape[2], shape[1], shape[3])
            return self._node("aten.transpose.int", (Ref(current), 1, 2), made), made
        longest = max(shape)
        made = draw(st.sampled_from(((1, 1, elements), (1, elements // longest, 1, longest), (1, 1, elements // longest, longest))))
        return self._node("aten.view.default", (Ref(current), made), made), made

    def _value(self, name: str, shape: Shape, dtype: DType, kind: ValueKind = ValueKind.INTERMEDIATE, source: str = "") -> str:
        self.values.append(Value(name=name, spec=TensorSpec(shape=shape, dtype=dtype), kind=kind, source=source))
        return name

    def _node(self, op: str, args: tuple[Any, ...], shape: Shape, dtype: DType = DType.F32, **kwargs: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(canonical(Node(name=name, op=op, kind=op.split(".")[1], args=args, outputs=(name,),
                                         kwargs=tuple(kwargs.items()))))
        return self._value(name, shape, dtype)


steps = st.composite(Step)()


def logits_of(graph: Graph, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return compile_nodes(graph, device="cpu").run(given)[graph.outputs[0]]


@SETTINGS
@given(step=steps, ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=5))
def test_rows_are_what_they_are_alone(step: Step, ids: list[int]) -> None:
    """A copied view of a row that was made beside others raised: a single row's elements lie side by side, and of several they do not."""
    rows = len(ids)
    alone = [logits_of(step.graph, {**step.tensors, "ids": torch.tensor([[one]]), "position": torch.zeros(1, dtype=torch.long),
                                    "history": torch.zeros(CAPACITY + 1, dtype=torch.long)}) for one in ids]
    states = {"rows.ids": torch.tensor([ids]), "rows.position": torch.zeros(rows, dtype=torch.long),
              "rows.history": torch.zeros(rows, CAPACITY + 1, dtype=torch.long), "rows.live": torch.ones(rows, dtype=torch.long)}
    graph = rows_graph(step.graph, rows, step.apart).graph
    named = {value.name: states[value.source] for value in graph.values if value.source in states}
    found = logits_of(graph, {**step.tensors, **named})
    assert torch.allclose(found, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-6)
