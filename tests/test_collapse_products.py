"""Sums over products that are spread out in memory become contractions; what is no larger than its operands, or rounds, stays."""

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from test_capture_normalize import forward_graph, run
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, Graph, GraphKind, GraphSet, ModelInfo, Workload
from agentcompile_core.ops.graph_check import check_graphs
from agentcompile_core.stages.capture.normalize import normalize

CONTRACTION = "aten.einsum.default"


class Summed(nn.Module):
    """The sum of a product over ``axes``; ``also``: the product itself is a result, too."""

    def __init__(self, axes: tuple[int, ...], keepdim: bool = False, also: bool = False) -> None:
        super().__init__()
        self.axes, self.keepdim, self.also = axes, keepdim, also

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        product = x * y
        total = product.sum(dim=self.axes, keepdim=self.keepdim)
        return total * product.max() if self.also else total


def chunk_graph(module: nn.Module, *inputs: Tensor) -> Graph:
    return normalize(evolve(forward_graph(module, *inputs), kind=GraphKind.PREFILL))


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


@st.composite
def spread(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of two tensors that are broadcast against each other, and axes of their product."""
    rank = draw(st.integers(2, 5))
    extents = draw(st.lists(st.integers(2, 6), min_size=rank, max_size=rank))
    has = draw(st.lists(st.sampled_from(["both", "left", "right"]), min_size=rank, max_size=rank))
    left = tuple(extent if which != "right" else 1 for extent, which in zip(extents, has, strict=True))
    right = tuple(extent if which != "left" else 1 for extent, which in zip(extents, has, strict=True))
    axes = draw(st.lists(st.integers(-rank, rank - 1), min_size=1, max_size=rank, unique_by=lambda axis: axis % rank))
    return left, right, tuple(axes)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(spread(), st.booleans(), st.integers(0, 99))
def test_any_sum_of_a_product_gives_what_it_gave(case: tuple[tuple[int, ...], ...], turned: bool, seed: int) -> None:
    """Whatever becomes of it; where the product is much larger than what is read and left, nothing of its size is made any more."""
    left, right, axes = case
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(shape, generator=generator) for shape in (left, right))
    if turned:  # as views of transposed tensors
        x, y = x.mT.contiguous().mT, y.mT.contiguous().mT
    module = Summed(axes)
    graph = chunk_graph(module, x, y)
    whole, kept = (x * y).numel(), x.numel() + y.numel() + module(x, y).numel()
    assert (CONTRACTION in ops(graph)) == (whole >= 4 * kept)
    if whole >= 4 * kept:
        assert max(graph.spec(name).numel for node in graph.nodes for name in node.outputs) < whole
    found, wanted = run(graph, module, x, y), module(x, y)
    assert found.shape == wanted.shape and found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


X, Y = (1, 32, 1, 8), (1, 1, 32, 8)


@pytest.mark.parametrize(("module", "dtype"), [
    (Summed((-1,)), torch.bfloat16), (Summed((-1,)), torch.float16), (Summed((-1,), keepdim=True), torch.float32),
    (Summed((-1,), also=True), torch.float32)])
def test_what_rounds_between_or_is_read_twice_stays(module: nn.Module, dtype: torch.dtype) -> None:
    x, y = torch.randn(X).to(dtype), torch.randn(Y).to(dtype)
    graph = chunk_graph(module, x, y)
    assert CONTRACTION not in ops(graph) and torch.equal(run(graph, module, x, y), module(x, y))


def test_generated_kernels_keep_sums_of_products() -> None:
    assert CONTRACTION not in ops(normalize(forward_graph(Summed((-1,)), torch.randn(X), torch.randn(Y))))


def test_one_that_is_large_enough_is_a_contraction_that_can_be_read_again() -> None:
    graph = chunk_graph(Summed((-1,)), torch.randn(X), torch.randn(Y))
    assert ops(graph) == [CONTRACTION, "aten.contiguous.default"]
    info = ModelInfo(name="m", model_type="module", config_json="{}", digest="", parameter_bytes=0)
    check_graphs(GraphSet(model=info, workload=Workload(dtype=DType.F32, max_context=2), graphs=(graph,)))


class Padded(nn.Module):
    """Padding by ``pads`` on the last axes."""

    def __init__(self, pads: tuple[int, ...]) -> None:
        super().__init__()
        self.pads = pads

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x + 1.0, self.pads) * 2.0


@pytest.mark.parametrize(("pads", "stays"), [
    ((0, 0), False), ((0, 0, 0, 0), False), ((1, -1), True), ((-1, 1, 0, 0), True), ((0, 1), True)])
def test_padding_by_nothing_goes(pads: tuple[int, ...], stays: bool) -> None:
    module, x = Padded(pads), torch.randn(3, 4)
    graph = chunk_graph(module, x)
    assert any("pad" in op for op in ops(graph)) == stays
    assert torch.equal(run(graph, module, x), module(x))
