"""The graph of a chunk between two sizes is the one that torch.export would have made, wherever it is not made by it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attrs import evolve
from capture_models import CONTEXT, SIZES, WINDOWED, WORKLOAD, export_each_once, tiny
from hypothesis import given
from hypothesis import strategies as st
from test_capture_models import CAPTURED, EXPERTS, WITHOUT_ITS_HELP
from torch import Tensor, nn

from agentcompile_core.ir.graph import Graph, GraphKind, Node, Ref
from agentcompile_core.stages.capture import language_model, unread
from agentcompile_core.stages.capture.between import Line, Unlike, between
from agentcompile_core.stages.capture.export import calls_of_prefill
from agentcompile_core.stages.capture.language_model import capture_language_model, kv_spec

ALL = {**CAPTURED, **EXPERTS, **WITHOUT_ITS_HELP}
LIKE_OTHERS = {"llama", "qwen2", "olmo2", "phi", "starcoder2", "cohere", "stablelm", "mixtral", "phimoe", "codegen", "nanochat"}  # here
MODELS = [name for name in ALL if name not in LIKE_OTHERS]
RANGES = [(3, 6, 10), (4, 20, CONTEXT)]  # on both sides of the window of 5; as long as the context
ONE_LAYER = {**SIZES, "num_hidden_layers": 1}  # for what is changed behind the last layer
TRACED = {"opt", "falcon"}  # what they call cannot be told without a trace


@pytest.fixture(autouse=True)
def _sizes_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    export_each_once(monkeypatch, language_model)


@pytest.fixture(autouse=True)
def _no_step_is_traced_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """But of models that only a step tells about: other configurations say what their caches hold, and chunks need no more."""
    none, plain = Graph(name="decode", kind=GraphKind.DECODE, values=(), nodes=(), inputs=(), outputs=()), language_model._capture_decode

    def told(deep: Any, workload: Any) -> tuple[Any, Graph]:
        told_by_a_step = deep.model.config.model_type in WITHOUT_ITS_HELP
        return plain(deep, workload) if told_by_a_step else (kv_spec(deep.model, workload, deep.held), none)

    monkeypatch.setattr(language_model, "_capture_decode", told)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of chunks that torch.export saw, in order."""
    seen: list[int] = []
    before = language_model.export_prefill

    def counted(model: nn.Module, kv: Any, tokens: int, *rest: Any) -> Any:
        seen.append(tokens)
        return before(model, kv, tokens, *rest)

    monkeypatch.setattr(language_model, "export_prefill", counted)
    return seen


def chunks(model: nn.Module, *sizes: int) -> dict[str, Graph]:
    graphs = capture_language_model(model, "m", evolve(WORKLOAD, prefill_chunks=sizes))
    assert not graphs.eager_reason
    return {graph.name: graph for graph in graphs.graphs}


@pytest.mark.parametrize(("model_type", "sizes"), [(name, RANGES[i % 2]) for i, name in enumerate(MODELS)])
def test_derived_graph_is_the_exported_one(model_type: str, sizes: tuple[int, ...], exports: list[int]) -> None:
    model, middle = tiny(model_type, ALL[model_type]), sizes[1]
    found = chunks(model, *sizes)
    assert exports == ([sizes[0], sizes[2]] if model_type not in TRACED else exports)
    wanted = chunks(model, middle)
    for name in (f"prefill_{middle}", f"prefill_{middle}_fresh"):
        assert found[name] == wanted[name]


def test_every_size_between_is_derived(exports: list[int]) -> None:
    model = tiny("gemma3_text", WINDOWED)
    found = chunks(model, 2, 3, 5, 8, 13, 21)
    assert exports == [2, 21]
    assert all(found[f"prefill_{size}"] == chunks(model, size)[f"prefill_{size}"] for size in (3, 5, 8, 13))


def doubled(x: Tensor, tokens: int) -> Tensor:
    return x * 2 if 5 < tokens < 9 else x


def other_way_round(x: Tensor, tokens: int) -> Tensor:
    one, two = x + 1, x + 2
    return one - two if tokens == 8 else two - one


def other_factor(x: Tensor, tokens: int) -> Tensor:
    return x * (3 if tokens == 8 else 2)


def other_literal(x: Tensor, tokens: int) -> Tensor:
    return x * torch.tensor(3.0 if tokens == 8 else 2.0)


def own_number(x: Tensor, tokens: int) -> Tensor:
    return x * float(tokens)


def padded(x: Tensor, tokens: int) -> Tensor:
    return nn.functional.pad(x, (0, 0, 0, -tokens % 4))[:, :tokens] if tokens != 8 else nn.functional.pad(x, (0, 0, 0, 3))[:, :tokens]


def cut_off(x: Tensor, tokens: int) -> Tensor:
    return torch.cat([x[:, : min(tokens, 10)], x[:, min(tokens, 10):]], 1)


def while_exported(x: Tensor, tokens: int) -> Tensor:
    return x * 2 if tokens == 8 and torch.compiler.is_exporting() else x


def halves(x: Tensor, tokens: int) -> Tensor:
    return x.unflatten(1, (2, tokens // 2)).flatten(1, 2) if tokens % 2 == 0 else x


@contextmanager
def changed(model: Any, change: Callable[[Tensor, int], Tensor]) -> Iterator[None]:
    """The last norm also does ``change`` to what it is given [1, T, hidden]."""
    norm = model.model.norm
    plain = norm.forward
    norm.forward = lambda x: change(plain(x), x.shape[1])
    try:
        yield
    finally:
        del norm.forward


@pytest.mark.parametrize("change", [
    doubled, other_way_round, other_factor, other_literal, own_number, padded, cut_off, while_exported, halves,
])
def test_size_that_is_another_case_is_traced(change: Callable[[Tensor, int], Tensor], exports: list[int]) -> None:
    model = tiny("llama", ONE_LAYER)
    with changed(model, change):
        found = chunks(model, 4, 8, 12)
        assert sorted(exports) == [4, 8, 12]
        assert found["prefill_8"] == chunks(model, 8)["prefill_8"]


def test_kept_tensor_is_not_guessed_at(exports: list[int]) -> None:
    """What a module keeps beside its parameters may be written between calls; it stays as it was."""
    model: Any = tiny("llama", ONE_LAYER)
    kept = model.model.norm.kept = torch.ones(1)
    with changed(model, lambda x, tokens: x * kept):
        chunks(model, 4, 8, 12)
    assert sorted(exports) == [4, 8, 12]
    assert model.model.norm.kept is kept and kept.item() == 1.0


def test_looking_at_calls_leaves_the_model_as_it_was() -> None:
    model: Any = tiny("llama", ONE_LAYER)
    weights, norm, memory = dict(model.named_parameters()), model.model.norm, dict[int, Tensor]()

    def remembers(x: Tensor, tokens: int) -> Tensor:
        memory[tokens] = norm.seen = x
        return x

    with changed(model, remembers):
        before = {path: dict(vars(part)) for path, part in model.named_modules()}
        calls = calls_of_prefill(model, kv_spec(model, WORKLOAD), 4)
        assert memory[4].is_meta and {path: dict(vars(part)) for path, part in model.named_modules()} == before
    assert any(call[0] == "agentcompile.attention.default" for call in calls)
    assert not torch.compiler.is_exporting()
    assert all(one is weights[name] and not one.is_meta for name, one in model.named_parameters())


@given(st.integers(-9, 9), st.integers(-999, 999), st.integers(2, 50), st.integers(1, 50), st.integers(1, 50))
def test_integers_on_a_line_are_found(slope: int, offset: int, low: int, up: int, further: int) -> None:
    def at(size: int) -> Node:
        return Node(name="n", op="o", kind="k", args=(Ref("x"), (slope * size + offset, 1.5, True, None)), outputs=("y",))

    middle, high = low + up, low + up + further
    assert between(at(low), at(high), Line(low=low, high=high, wanted=middle)) == at(middle)


@pytest.mark.parametrize(("low", "high"), [
    ((1,), (1, 1)), (1, 1.0), (1, True), (0, False), (0.0, -0.0), (1.0, 2.0), ("a4", "a8"), (Ref("a"), Ref("b")), (True, False),
    ((1,), [1]), (1, 2), (4, 7), (None, 0),
])
def test_anything_else_is_refused(low: Any, high: Any) -> None:
    with pytest.raises(Unlike):
        between(low, high, Line(low=4, high=8, wanted=6))


@pytest.mark.parametrize("setting", [unread.SETTING, "a_setting_that_torch_2_11_does_not_know"])
def test_no_operator_carries_its_stack_and_torch_is_as_before(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "SETTING", setting)
    module, x, before = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.ones(2, 4), torch.fx.proxy.CapturedTraceback

    def stacks() -> int:
        return sum(bool(node.stack_trace) for node in torch.export.export(module, (x,)).graph.nodes)

    with unread.without_what_nobody_reads():
        assert stacks() == 0
        program = torch.export.export(module, (x,))
    assert torch.equal(program.module()(x), module(x)) and "relu" in str(program)  # code is there where it is asked for
    with pytest.raises(ZeroDivisionError), unread.without_what_nobody_reads():
        1 / 0  # noqa: B018
    assert stacks() > 0 and torch.fx.proxy.CapturedTraceback is before


def test_layouts_are_noted_once_and_graphs_of_models_write_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """``val`` says what ``tensor_meta`` would; a graph that was not called has no code of its own; behind it torch is as before."""
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.ones(2, 4)
    with unread.without_what_nobody_reads():
        program = torch.export.export(module, (x,))
        assert type(program.graph_module)._needs_recompile()
    plain = torch.export.export(module, (x,))
    for found, wanted in zip(program.graph.nodes, plain.graph.nodes, strict=True):
        assert found.meta.get("tensor_meta") is None and (found.name, found.target) == (wanted.name, wanted.target)
        if "tensor_meta" in wanted.meta:
            assert found.meta["val"].stride() == wanted.meta["tensor_meta"].stride
    assert not hasattr(type(plain.graph_module), "_needs_recompile")


def test_records_that_nobody_writes_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes them of every tensor while its log has a handler, which an export that is quiet never asks."""
    module, x, made, handlers = nn.Linear(4, 4).eval(), torch.ones(2, 4), list[str](), [logging.NullHandler()]
    monkeypatch.setattr(unread.logs, "log_trace_structured_event", lambda name, record: made.append(name))
    monkeypatch.setattr(unread.logs.trace_log, "handlers", handlers)
    with unread.without_what_nobody_reads():
        torch.export.export(module, (x,))
    assert not made and unread.logs.trace_log.handlers is handlers
    torch.export.export(module, (x,))
    assert made


def test_symbols_of_data_are_bound_as_before() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nonzero(x)

    def bound() -> list[tuple[str, str]]:
        program = torch.export.export(Chosen(), (torch.ones(3),))
        return [(node.name, str(node.meta["unbacked_bindings"])) for node in program.graph.nodes if "unbacked_bindings" in node.meta]

    with unread.without_what_nobody_reads():
        found = bound()
    assert found == bound() and len(found) == 1
