"""The product of a parameter and a turned row is a linear layer of the row; other products stay."""

import pytest
import torch
from agentcompile_rules_transformers.draft import Draft
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.plugin_api import Argument, DType, Graph, ValueKind
from agentcompile_core.stages.capture.normalize import normalize
from agentcompile_core.stages.capture.turned_products import turn_products

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
TURNS: dict[str, tuple[str, tuple[Argument, ...]]] = {
    "1, 2": ("aten.transpose.int", (1, 2)), "2, 1": ("aten.transpose.int", (2, 1)), "-1, -2": ("aten.transpose.int", (-1, -2)),
    "-2, 2": ("aten.transpose.int", (-2, 2)), "mT": ("aten.mT.default", ()),
}


def graph_of(n: int = 6, k: int = 4, tokens: int = 1, *, dtype: DType = DType.F32, turn: str = "1, 2",
             kind: ValueKind = ValueKind.WEIGHT, read: bool = False) -> Graph:
    """A bias added to a product as Mamba writes it; ``read``: the turned row is a result too."""
    draft, (op, axes) = Draft(), TURNS[turn]
    w, x = draft.given("w", (n, k), dtype, kind), draft.given("x", (1, tokens, k), dtype)
    turned = draft.apart(op, (x, *axes), (1, k, tokens), (k * tokens, 1, k) if tokens > 1 else (), dtype)[0]
    product = draft.one("aten.matmul.default", (w, turned), (1, n, tokens), dtype)
    added = draft.one("aten.add.Tensor", (product, draft.weight("b", n, 1, dtype=dtype)), (1, n, tokens), dtype)
    return draft.graph(added, *((turned,) if read else ()))


def results(graph: Graph, outputs: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    env = {value.name: torch.randn(value.spec.shape, generator=generator).to(getattr(torch, value.spec.dtype.value))
           for value in graph.values if value.kind is not ValueKind.INTERMEDIATE}
    return compile_nodes(graph, device="cpu", outputs=outputs or None).run(env)


@SETTINGS
@given(n=st.integers(1, 40), k=st.integers(1, 40), dtype=st.sampled_from([DType.F32, DType.BF16, DType.F16]),
       turn=st.sampled_from(list(TURNS)), read=st.booleans())
def test_a_product_with_a_turned_row_is_a_linear_layer(n: int, k: int, dtype: DType, turn: str, read: bool) -> None:
    graph = graph_of(n, k, dtype=dtype, turn=turn, read=read)
    after = turn_products(graph).verify()
    assert [node.kind for node in after.nodes] == ["view", "linear", "view", "add"] and after.nodes[1].inputs == ("x", "w")
    got, want = results(after), results(graph)
    rounding = 16 * torch.finfo(getattr(torch, dtype.value)).eps
    for name in graph.outputs:
        torch.testing.assert_close(got[name], want[name], rtol=rounding, atol=rounding)
    for name, tensor in results(after, tuple(name for node in after.nodes for name in node.outputs)).items():
        assert tuple(tensor.shape) == after.spec(name).shape and tensor.is_contiguous(), name


def test_the_turned_row_is_gone_where_nothing_else_reads_it() -> None:
    assert [node.kind for node in normalize(graph_of()).nodes] == ["linear", "view", "add"]
    assert [node.kind for node in normalize(graph_of(read=True)).nodes] == ["view", "linear", "view", "add"]


@pytest.mark.parametrize("tokens,kind", [(2, ValueKind.WEIGHT), (9, ValueKind.WEIGHT), (1, ValueKind.INPUT), (1, ValueKind.CONSTANT)])
def test_more_rows_and_matrices_that_are_no_parameters_stay(tokens: int, kind: ValueKind) -> None:
    graph = graph_of(tokens=tokens, kind=kind)
    assert turn_products(graph) is graph


@pytest.mark.parametrize("weight,shape,axes,result", [
    ((3, 4, 4), (1, 1, 4), (-2, -1), (3, 4, 1)), ((4,), (1, 1, 4), (1, 2), (1, 1)), ((6, 4), (4, 1, 1), (0, 1), (1, 6, 1)),
    ((6, 4), (1, 4), (0, 1), (6, 1)), ((6, 4), (2, 1, 4), (1, 2), (2, 6, 1)),
], ids=["matrices", "a vector", "another axis", "two axes", "two rows"])
def test_other_products_with_a_parameter_stay(weight: tuple[int, ...], shape: tuple[int, ...], axes: tuple[int, int],
                                              result: tuple[int, ...]) -> None:
    draft, dtype = Draft(), DType.F32
    turned = tuple(torch.empty(shape).transpose(*axes).shape)
    x = draft.one("aten.transpose.int", (draft.given("x", shape, dtype), *axes), turned, dtype, "view")
    graph = draft.graph(draft.one("aten.matmul.default", (draft.weight("w", *weight, dtype=dtype), x), result, dtype))
    assert results(graph)[graph.outputs[0]].shape == result and turn_products(graph) is graph


def test_a_row_that_is_not_turned_and_a_parameter_from_the_right_stay() -> None:
    draft, dtype = Draft(), DType.F32
    x, w = draft.given("x", (1, 1, 4), dtype), draft.weight("w", 4, 4, dtype=dtype)
    column = draft.one("aten.view.default", (x, (1, 4, 1)), (1, 4, 1), dtype, "view")
    turned = draft.one("aten.transpose.int", (x, 1, 2), (1, 4, 1), dtype, "view")
    graph = draft.graph(draft.one("aten.matmul.default", (w, column), (1, 4, 1), dtype),
                        draft.one("aten.matmul.default", (turned, draft.weight("v", 1, 4, dtype=dtype)), (1, 4, 4), dtype))
    assert results(graph) and turn_products(graph) is graph
