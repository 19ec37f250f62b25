"""Behind the last call that needs all rows of a prompt chunk, its graph has the one row whose scores are asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from capture_models import SIZES, WORKLOAD, tiny, without
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from agentcompile_core.ir.graph import Graph, GraphKind
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.stages.capture.export import export_forward
from agentcompile_core.stages.capture.importer import import_program
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.one_row import keep_row_read

Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # of a value [1, T, C], an earlier one and a weight [C, C]


def in_groups(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Heads as rows of a matrix, several for each token."""
    half = x.shape[2] // 2
    return F.linear(x.reshape(-1, half), w[:half, :half]).sigmoid().reshape(x.shape)


def by_largest(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    found, at = x.topk(2, dim=-1)
    return torch.zeros_like(x).scatter(-1, at, found.softmax(-1)) * y


def parts(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    one, other = x.split([2, x.shape[2] - 2], -1)
    return torch.cat((other, one), -1) + y


def stacked(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.stack((x, y.tanh()), 2).sum(2) + torch.stack((x, y)).select(0, 1)


def gathered(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return x.gather(-1, y.argsort(-1))


def both_ways(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """A matrix whose rows are multiplied in one place and are weights in another."""
    rows = y[0].tanh()
    return F.linear(x, rows).sum(-1, keepdim=True) * rows


def with_itself(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    rows = x[0] * 0.5
    scores = F.linear(rows, rows) @ torch.addmm(rows.sum(0), rows, w)
    return (scores + rows @ rows if x.shape[1] == x.shape[2] else scores).unsqueeze(0) + y


def as_wide_as_long(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Where there are as many tokens as channels, what lies along one axis may look as if it lay along the other."""
    if x.shape[1] != x.shape[2]:
        return x + y
    return x * y[:, 0].unsqueeze(-1) + x.transpose(1, 2) + w + y.sum(1).unsqueeze(-1)


def in_longer_ones(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Rows that lie otherwise in one value of twice as many."""
    tokens = x.shape[1]
    whole = torch.cat((x, y), 1)
    return whole[:, tokens // 2 :][:, :tokens] + whole[:, ::2] * torch.stack((x, y), 1).reshape(1, 2 * tokens, -1)[:, :tokens]


def along_columns(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    square = torch.full((x.shape[1], x.shape[1]), 0.3, dtype=x.dtype).tril()
    return torch.matmul(x.transpose(1, 2), square).transpose(1, 2) + y


def small_sums(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Sums whose axes lie before and behind that of the rows."""
    return (torch.stack((x, y)).sum((0, 3)).unsqueeze(-1) + x.unsqueeze(0).amax((0, 3), keepdim=True)[0]) * w[0]


def squeezed_for_nothing(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """An axis of more than one element stays where it is squeezed."""
    return torch.stack((x, y)).squeeze(0).sum(0).squeeze(0).unsqueeze(0)


ALONE: dict[str, Call] = {  # every row by itself
    "linear": lambda x, y, w: F.linear(x, w) + y,
    "norm": lambda x, y, w: F.layer_norm(x, x.shape[-1:], w[0]) * x.mean(-1, keepdim=True),
    "gate": lambda x, y, w: F.silu(x) * y,
    "softmax": lambda x, y, w: x.softmax(-1) + y.amax(-1, True),
    "swapped": lambda x, y, w: F.linear(x.view(1, x.shape[1], -1, 2).transpose(1, 2).permute(0, 2, 1, 3).reshape(x.shape), w),
    "matrix": lambda x, y, w: (x[0] @ w + w[1]).unsqueeze(0) + torch.addmm(w[0], y[0], w),
    "groups": in_groups, "largest": by_largest, "parts": parts, "stacked": stacked, "gathered": gathered,
    "sums": small_sums, "squeezed": squeezed_for_nothing,
}
MIXED: dict[str, Call] = {  # rows of others, too
    "over rows": lambda x, y, w: x.softmax(1) + y,
    "running": lambda x, y, w: x.cumsum(1) * 0.2 + y,
    "turned": lambda x, y, w: x.flip(1) + y.roll(1, 1),
    "scores": lambda x, y, w: (x @ y.transpose(1, 2)).softmax(-1) @ x,
    "itself": lambda x, y, w: F.linear(x, x[0]).sum(-1, keepdim=True) * y,
    "mean": lambda x, y, w: x - x.mean(1, keepdim=True) + y[:, :1],
    "columns": lambda x, y, w: F.linear(x.transpose(1, 2), x.new_ones(x.shape[1], x.shape[1]) * 0.3).transpose(1, 2) + y,
    "other way": lambda x, y, w: x.reshape(1, x.shape[2], -1).softmax(-1).reshape(x.shape) + y,
    "parts of rows": lambda x, y, w: torch.cat((x[:, 1:], y[:, :1]), 1),
    "chosen": lambda x, y, w: x.gather(1, y.argsort(1)),
    "sorted": lambda x, y, w: x.sort(1)[0] + y,
    "both ways": both_ways, "with itself": with_itself, "as wide as long": as_wide_as_long, "longer": in_longer_ones,
    "along columns": along_columns,
    "written": lambda x, y, w: (x * 1).index_add_(1, torch.tensor([0]), y[:, 1:2]) + y,
}


class Chunk(nn.Module):
    """Layers over [1, T, C], then the scores of one row."""

    def __init__(self, layers: list[tuple[Call, int]], width: int, by_index: bool) -> None:
        super().__init__()
        self.layers, self.by_index = layers, by_index
        made = torch.Generator().manual_seed(len(layers))
        self.weights = nn.ParameterList(torch.randn(width, width, generator=made, dtype=torch.float64) for _ in layers)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        row = length - 1
        values = [x, x * 0.5]
        for (layer, back), weight in zip(self.layers, self.weights, strict=True):
            values.append(layer(values[-1], values[max(0, len(values) - 1 - back)], weight))
        last = values[-1][:, row] if self.by_index else values[-1].index_select(1, row)
        return F.linear(last, self.weights[0]).tanh()


def captured(module: nn.Module, x: Tensor, length: Tensor) -> Graph:
    graph = import_program(export_forward(module.eval(), (x, length)), "chunk", GraphKind.FORWARD)
    return evolve(graph, kind=GraphKind.PREFILL, tokens=x.shape[1])


def results(graph: Graph, module: nn.Module, x: Tensor, length: Tensor) -> Tensor:
    named = dict(module.named_parameters())
    env = {v.name: named[v.source] for v in graph.values if v.source in named} | dict(zip(graph.inputs, (x.clone(), length), strict=True))
    return compile_nodes(graph, device="cpu").bind(env)()[0]


def rows_of_products(graph: Graph) -> list[int]:
    """Of each product with a parameter, how many rows it has."""
    found = [node for node in graph.nodes if node.kind in ("linear", "mm", "addmm", "expert_linear")]
    return [graph.spec(node.outputs[0]).numel // graph.spec(node.outputs[0]).shape[-1] for node in found]


@st.composite
def chunks(draw: Any, calls: dict[str, Call]) -> tuple[Chunk, Tensor, Tensor]:
    width = draw(st.sampled_from([4, 6, 12]))
    tokens = draw(st.sampled_from([2, 3, 4, 6, width, 12]))
    layers = draw(st.lists(st.tuples(st.sampled_from(sorted(calls)), st.integers(0, 3)), min_size=1, max_size=6))
    module = Chunk([(calls[name], back) for name, back in layers], width, draw(st.booleans()))
    x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))), dtype=torch.float64)
    return module, x, torch.tensor([draw(st.integers(1, tokens))])


@settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))
@given(chunks({**ALONE, **MIXED}))
def test_the_row_is_what_it_was(case: tuple[Chunk, Tensor, Tensor]) -> None:
    module, x, length = case
    graph = captured(module, x, length)
    narrow = keep_row_read(graph).verify()
    expected = module(x, length)
    torch.testing.assert_close(results(graph, module, x, length), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results(narrow, module, x, length), expected, rtol=1e-9, atol=1e-12)
    assert keep_row_read(narrow) == narrow


@pytest.mark.parametrize("name", sorted({**ALONE, **MIXED}))
def test_of_every_kind_of_layer_alone(name: str) -> None:
    for tokens in (3, 6, 12):
        for back in (0, 1):
            module = Chunk([({**ALONE, **MIXED}[name], back)], 6, back == 0)
            x = torch.randn(1, tokens, 6, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)
            graph = keep_row_read(captured(module, x, torch.tensor([2])))  # of any length
            for count in (1, tokens):
                length = torch.tensor([count])
                found = results(graph, module, x, length)
                torch.testing.assert_close(found, module(x, length), rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(chunks(ALONE))
def test_where_every_row_is_by_itself_there_is_one_alone(case: tuple[Chunk, Tensor, Tensor]) -> None:
    module, x, length = case
    graph = captured(module, x, length)
    before, after = rows_of_products(graph), rows_of_products(keep_row_read(graph))
    assert len(before) == len(after)
    assert all(one in (1, 2) for one in after), "two heads of a token are two rows of its product"


def test_a_value_that_others_read_is_kept_whole() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.tanh(x)
            return (y * y.sigmoid()).index_select(1, row), y

    x, row = torch.randn(1, 4, 6), torch.tensor([2])
    graph = keep_row_read(captured(Shared(), x, row))
    found = compile_nodes(graph, device="cpu").bind(dict(zip(graph.inputs, (x, row), strict=True)))()
    for one, expected in zip(found, Shared()(x, row), strict=True):
        torch.testing.assert_close(one, expected)


def test_rows_are_told_apart_once_it_is_known_which_one_is_read() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            y = torch.tanh(x).sigmoid()
            row = length - 1
            return (y * 2 + y.exp())[:, row]

    x, length = torch.randn(1, 4, 6), torch.tensor([3])
    graph = keep_row_read(captured(Late(), x, length))
    found = compile_nodes(graph, device="cpu").bind(dict(zip(graph.inputs, (x, length), strict=True)))()[0]
    torch.testing.assert_close(found, Late()(x, length))
    rows = [graph.spec(node.outputs[0]).shape[1] for node in graph.nodes if node.kind in ("tanh", "sigmoid", "exp", "mul")]
    assert sorted(rows) == [1, 1, 4, 4]


def test_a_number_that_may_count_from_the_end_is_left_to_who_knows_how() -> None:
    class Behind(nn.Module):
        def forward(self, x: Tensor, row: Tensor) -> Tensor:
            return torch.tanh(x)[:, row]

    x, row = torch.randn(1, 4, 6), torch.tensor([-2])
    graph = keep_row_read(captured(Behind(), x, row))
    found = compile_nodes(graph, device="cpu").bind(dict(zip(graph.inputs, (x, row), strict=True)))()[0]
    torch.testing.assert_close(found, Behind()(x, row))


def test_what_is_written_in_place_meanwhile_is_left_as_it_was() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor, row: Tensor) -> Tensor:
            y = x * 2
            z = y.tanh()
            y[:, :2].zero_()
            return (z + y.sigmoid()).index_select(1, row)

    x = torch.randn(1, 4, 6)
    for at in range(4):
        row = torch.tensor([at])
        graph = keep_row_read(captured(Written(), x, row))
        found = compile_nodes(graph, device="cpu").bind(dict(zip(graph.inputs, (x.clone(), row), strict=True)))()[0]
        torch.testing.assert_close(found, Written()(x, row))


MODELS = {
    "llama": SIZES, "gemma2": {**SIZES, "sliding_window": 5}, "gpt_neox": without("num_key_value_heads", "head_dim"),
    "qwen3_moe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "gpt_oss": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "mamba": {"vocab_size": 128, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4, "pad_token_id": None},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_models_last_layer_multiplies_one_row_behind_what_it_caches(model_type: str) -> None:
    graphs = capture_language_model(tiny(model_type, MODELS[model_type]), model_type, WORKLOAD)
    chunks_of_it = graphs.of_kind(GraphKind.PREFILL)
    assert not graphs.eager_reason and chunks_of_it
    for graph in chunks_of_it:
        last = max(place for place, node in enumerate(graph.nodes) if node.mutates and node.kind != "start_decode")
        behind = [node for node in graph.nodes[last + 1 :] if node.kind in ("linear", "expert_linear")]
        assert behind and all(graph.spec(node.outputs[0]).shape[:-1].count(graph.tokens) == 0 for node in behind)
