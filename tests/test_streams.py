"""Streams that are stacked, mixed and added to in part (AltUp, hyper-connections)."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_programs import Of
from torch import Tensor, nn

from agentcompile_core.ir.graph import Graph, GraphKind
from agentcompile_core.ops.aliasing import written_in_place
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.region_view import is_contiguous
from agentcompile_core.stages.capture.export import export_forward
from agentcompile_core.stages.capture.importer import import_program
from agentcompile_core.stages.capture.normalize import normalize


def captured(call: Callable[..., Tensor], *given: Tensor) -> Graph:
    return normalize(import_program(export_forward(Of(call), given), "forward", GraphKind.FORWARD, 1))


def results(graph: Graph, *given: Tensor) -> Tensor:
    env = dict(zip(graph.inputs, (one.clone() for one in given), strict=True))
    return compile_nodes(graph, device="cpu").bind(env)()[0]


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# ---- writes to a part

@settings(deadline=None, max_examples=25)
@given(st.data())
def test_what_is_added_to_a_part_of_a_tensor_makes_a_new_one(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(-shape[axis], shape[axis] - 1))
    end = data.draw(st.sampled_from([None, *(at for at in range(1, shape[axis] + 1) if at > first % shape[axis])]))
    where = (slice(None),) * axis + (slice(first, end),)
    x, y = drawn(*shape), drawn(*shape[axis + 1:], 1)[..., 0]

    def call(x: Tensor, y: Tensor) -> Tensor:
        made = x * 2
        before = made[where].exp().sum()
        made[where] += y
        made[where] *= 0.5
        return made.tanh() + before + made[where].sum()

    graph = captured(call, x, y)
    whole = x[where].shape == x.shape  # then nothing is cut, and what is written is no part
    assert whole or not written_in_place(graph)
    assert torch.equal(results(graph, x, y), call(x, y))


def seen_by_an_earlier_view(x: Tensor) -> Tensor:
    made = x * 2
    first = made[0]
    made[:1] += 1
    return made.exp() + first


def result_written_again(x: Tensor) -> Tensor:
    made = x * 2
    part = made[1:]
    part += 1
    made[1:] *= 3
    return part + made.sum()


def written_again_as_a_whole(x: Tensor) -> Tensor:
    made = x * 2
    made[1:] += 1
    part = made[1:]
    made.mul_(3)
    return made.sum() + part


def an_argument(x: Tensor) -> Tensor:
    x[1:] += 1
    return x * 2


def parts_within_each_other(x: Tensor) -> Tensor:
    made = x * 2
    made[1:] += 1
    made[:2] -= made[2:]
    return made * made[0]


@pytest.mark.parametrize("call", [seen_by_an_earlier_view, result_written_again, written_again_as_a_whole, parts_within_each_other])
def test_whatever_else_shows_that_memory_sees_what_it_should(call: Callable[..., Tensor]) -> None:
    x = drawn(4, 3)
    assert torch.equal(results(captured(call, x), x), call(x.clone()))


def test_an_argument_that_is_written_stays_so() -> None:
    x = drawn(4, 3)
    graph = import_program(export_forward(Of(an_argument), (x,)), "forward", GraphKind.FORWARD, 1)
    assert written_in_place(normalize(graph))


def test_a_write_of_the_kind_that_every_layer_has_costs_one_walk() -> None:
    """Graphs of many layers with a write each are rewritten at once: all of them are gone, and no write is left between."""
    def call(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(30):
            x = x * 2
            x[1:] += y
        return x

    x, y = drawn(4, 3), drawn(3)
    graph = captured(call, x, y)
    assert not written_in_place(graph) and sum(op == "aten.where.self" for op in ops(graph)) == 30
    assert sum(op == "aten.cat.default" for op in ops(graph)) == 1  # what says which elements they are
    assert torch.equal(results(graph, x, y), call(x, y))


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_a_part_that_is_computed_alike_in_many_places_is_chosen_element_by_element(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, shape[axis] - 1))
    end = data.draw(st.integers(first + 1, shape[axis]))
    where = (slice(None),) * axis + (slice(first, end),)
    of_all = data.draw(st.booleans())  # else the other operand has elements of its own along the axis
    x = drawn(*shape)
    y = drawn(*(1 if at == axis else extent for at, extent in enumerate(shape))) if of_all else drawn(*x[where].shape)
    x.view(-1)[0] = torch.inf

    def call(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(5):
            x = x * 2
            x[where] /= y
        return x

    graph = captured(call, x, y)
    whole, alike = x[where].shape == x.shape, of_all or y.shape[axis] == 1
    assert ("aten.where.self" in ops(graph)) == (alike and not whole)
    assert torch.equal(results(graph, x, y), call(x, y))


# ---- numbers that scale

class Scaled(nn.Module):
    """A layer of an operand, normed or not, that is times a number of the model."""

    def __init__(self, width: int, made: int, normed: bool, scale: float, weights: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(width, made, bias=False)
        self.layer.weight.data.mul_(weights)
        self.normed = normed
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((torch.rms_norm(x, x.shape[-1:], self.norm, 1e-6) if self.normed else x) * self.scale)


def scaled(model: nn.Module, x: Tensor) -> tuple[Graph, Tensor]:
    graph = normalize(import_program(export_forward(model, (x,)), "forward", GraphKind.FORWARD, 1))
    env = {graph.inputs[0]: x, **dict(model.named_parameters()), **dict(model.named_buffers())}
    return graph, compile_nodes(graph, device="cpu").bind(env)()[0]


@settings(deadline=None, max_examples=25)
@given(width=st.integers(2, 40), made=st.integers(1, 50), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
       scale=st.sampled_from([1e-3, 0.02, 1.0, -7.0, 100.0]), weights=st.sampled_from([1e-3, 1.0, 100.0]))
def test_a_number_of_the_model_scales_the_fewer_of_normed_operands_and_results(
        width: int, made: int, dtype: torch.dtype, scale: float, weights: float) -> None:
    model, x = Scaled(width, made, True, scale, weights).to(dtype).requires_grad_(False), drawn(1, width).to(dtype)
    graph, found = scaled(model, x)
    behind = graph.nodes[-1].op == "aten.mul.Tensor"
    assert behind == (made < width and dtype is not torch.float16)
    normed = torch.rms_norm(x, (width,), model.norm, 1e-6).float().abs()
    terms = (normed @ model.layer.weight.float().abs().T).max() * abs(scale)  # whose sum may be next to nothing
    bound = 4 * torch.finfo(dtype).eps * float(terms)
    torch.testing.assert_close(found, model(x), rtol=4 * torch.finfo(dtype).eps, atol=bound)


@settings(deadline=None, max_examples=25)
@given(dtype=st.sampled_from([torch.float32, torch.bfloat16]), size=st.sampled_from([1e-30, 1e-10, 1.0, 1e10, 1e30]),
       scale=st.sampled_from([1e-30, 1e-10, 1.0, 1e10]), weights=st.sampled_from([1e-30, 1e-10, 1.0, 1e10, 1e30]), normed=st.booleans())
def test_what_a_scale_keeps_in_range_stays_there(dtype: torch.dtype, size: float, scale: float, weights: float, normed: bool) -> None:
    model, x = Scaled(24, 3, normed, scale, weights).to(dtype).requires_grad_(False), (drawn(1, 24) * size).to(dtype)
    graph, found = scaled(model, x)
    wanted = model(x)
    assert normed or graph.nodes[-1].op == "aten.linear.default"
    assert torch.equal(torch.isfinite(found), torch.isfinite(wanted))
    near = 32 * torch.finfo(dtype).eps * float(wanted[torch.isfinite(wanted)].abs().max() if torch.isfinite(wanted).any() else 0.0)
    kept = float(wanted.abs().max()) > 1e-30  # below that each of the two may lose what the other one has
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=near if kept else 1e-25, equal_nan=True)


# ---- products that mix streams

@settings(deadline=None, max_examples=25)
@given(streams=st.integers(1, 6), mixed=st.integers(1, 6), width=st.integers(1, 33), turned=st.booleans(), added=st.booleans())
def test_streams_are_mixed_where_they_lie(streams: int, mixed: int, width: int, turned: bool, added: bool) -> None:
    x, c = drawn(streams, 1, 1, width), drawn(1, 1, streams * mixed)

    def call(x: Tensor, c: Tensor) -> Tensor:
        factors = c.reshape(1, 1, mixed, streams).permute(0, 1, 3, 2) if turned else c.reshape(1, 1, streams, mixed)
        made = torch.matmul(x.permute(1, 2, 3, 0), factors).permute(3, 0, 1, 2)
        if added and streams == mixed:
            made += x
        return made.contiguous().exp()

    graph = captured(call, x, c)
    torch.testing.assert_close(results(graph, x, c), call(x, c))
    in_place = turned or 1 in (streams, mixed)  # else the factors would have to be turned
    if in_place and width > 1 and streams > 1 and mixed > 1:
        assert not any(op == "aten.contiguous.default" for op in ops(graph))
        assert all(is_contiguous(graph.spec(name)) for node in graph.nodes for name in node.outputs if node.kind != "view")


def test_streams_of_several_tokens_are_mixed_as_they_were() -> None:
    x, c = drawn(4, 1, 5, 8), drawn(1, 5, 4, 4)
    graph = captured(lambda x, c: torch.matmul(x.permute(1, 2, 3, 0), c).permute(3, 0, 1, 2).contiguous(), x, c)
    assert any(op == "aten.contiguous.default" for op in ops(graph))


@settings(deadline=None, max_examples=15)
@given(streams=st.integers(1, 5), width=st.integers(1, 9))
def test_what_repeats_a_row_for_each_stream_is_left_to_the_operator_that_reads_it(streams: int, width: int) -> None:
    x, c = drawn(1, 1, width), drawn(streams, 1, 1, 1)
    def call(x: Tensor, c: Tensor) -> Tensor:
        return torch.mul(x.repeat(streams, 1, 1, 1), c)

    graph = captured(call, x, c)
    assert "aten.repeat.default" not in ops(graph)
    assert torch.equal(results(graph, x, c), call(x, c))


def test_what_a_repetition_makes_longer_is_repeated() -> None:
    x, c = drawn(1, 3), drawn(1, 6)
    def call(x: Tensor, c: Tensor) -> Tensor:
        return x.repeat(1, 2) * c

    assert torch.equal(results(captured(call, x, c), x, c), call(x, c))
