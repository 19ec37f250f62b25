"""Writes in place: what shares memory keeps its order and its place, and what only the result shows becomes a pure operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.ir.graph import Graph, GraphKind
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.region import Access, Operand, Role
from agentcompile_core.ops.aliasing import memory_roots, seen_changing, written_in_place
from agentcompile_core.ops.dependency import dependencies
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.runtime.buffers import buffer_plan
from agentcompile_core.runtime.program import Program, Segment
from agentcompile_core.stages.analyze.boundaries import partition
from agentcompile_core.stages.capture import functional
from agentcompile_core.stages.capture.export import export_forward
from agentcompile_core.stages.capture.importer import import_program
from agentcompile_core.stages.capture.normalize import normalize
from agentcompile_core.stages.capture.rewrite import rebuild
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import fake_match

ROW = (torch.linspace(-1.0, 2.0, 32).view(4, 8),)


class Of(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("total", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def captured(call: Callable[..., Any]) -> Graph:
    return normalize(import_program(export_forward(Of(call), ROW), "forward", GraphKind.FORWARD))


def run(graph: Graph, call: Callable[..., Any]) -> tuple[Tensor, ...]:
    env = {graph.inputs[0]: ROW[0].clone(), "total": torch.zeros(4, 8)}
    return compile_nodes(graph, device="cpu").bind(env)()


def slice_written(_: Of, x: Tensor) -> Tensor:
    y = x * 2
    before = y.exp()
    y[:, :3].zero_()
    return before + y


def test_a_read_waits_for_writes_through_a_slice_and_they_for_earlier_reads() -> None:
    graph = captured(slice_written)
    deps = dependencies(graph)
    at = {node.kind: deps.index[node.name] for node in graph.nodes}
    assert deps.ancestors[at["zero_"]] >> at["exp"] & 1
    assert deps.ancestors[at["add"]] >> at["zero_"] & 1


OPERATIONS = ("relu_", "mul_", "t", "slice", "add", "tanh", "zero_slice", "reshape", "dropout")


@settings(max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9)), min_size=1, max_size=8))
def test_any_order_that_the_dependencies_allow_computes_what_the_module_computes(steps: list[tuple[str, int]]) -> None:
    def call(_: Of, x: Tensor) -> Tensor:
        known = [x.exp()]
        for name, which in steps:
            known.append(_applied(name, known[which % len(known)]))
        return torch.cat([one.reshape(-1) for one in known])

    wanted = call(None, ROW[0].clone())  # type: ignore[arg-type]
    graph = captured(call)
    deps = dependencies(graph)
    done: set[int] = set()
    order = []
    while len(order) < len(graph.nodes):  # the latest node that may run: as far from the captured order as it gets
        ready = [i for i in range(len(graph.nodes)) if i not in done and all(j in done for j in range(i) if deps.ancestors[i] >> j & 1)]
        done.add(ready[-1])
        order.append(graph.nodes[ready[-1]])
    env = {graph.inputs[0]: ROW[0].clone(), "total": torch.zeros(4, 8)}
    assert torch.equal(compile_nodes(graph, order, device="cpu", outputs=graph.outputs).bind(env)()[0], wanted)


def _applied(name: str, x: Tensor) -> Tensor:
    if name == "zero_slice":
        x[..., :2].zero_()
        return x + 1
    return {
        "relu_": lambda: x.relu_(), "mul_": lambda: x.mul_(1.5), "t": lambda: x.t(), "slice": lambda: x[:, ::2], "add": lambda: x + 1,
        "tanh": x.tanh, "reshape": lambda: x.reshape(x.shape[1], x.shape[0]), "dropout": lambda: nn.functional.dropout(x, 0.5, False),
    }[name]()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from((*OPERATIONS, "mul_", "relu_", "tanh")), st.integers(0, 9)), min_size=1, max_size=10),
       st.integers(0, 9))
def test_writes_that_become_pure_together_are_those_that_would_one_after_the_other(steps: list[tuple[str, int]], shown: int) -> None:
    """So many of them that the model has as few writes as it can, whichever goes first."""
    def call(_: Of, x: Tensor) -> Tensor:
        known = [x.exp()]
        for name, which in steps:
            known.append(_applied(name, known[-1 - which % min(2, len(known))]))
        return known[-1] * 2, known[shown % len(known)]

    graph = one = import_program(export_forward(Of(call), ROW), "forward", GraphKind.FORWARD)
    while (found := [(i, pure) for i, n in enumerate(one.nodes) if (pure := functional._pure(one, functional._Memory(one), i, n))]):
        nodes = list(one.nodes)
        nodes[found[-1][0]] = found[-1][1]
        one = rebuild(one, nodes)
    assert functional.without_writes(graph) == one
    wanted = call(None, ROW[0].clone())  # type: ignore[arg-type]
    for mine, other in zip(run(functional.without_writes(graph), call), wanted, strict=True):
        assert torch.equal(mine, other)


def test_what_only_the_result_shows_becomes_pure() -> None:
    graph = captured(lambda _, x: torch.tanh(x).mul_(3.0).add_(x).relu_())
    assert [node.op for node in graph.nodes] == ["aten.tanh.default", "aten.mul.Tensor", "aten.add.Tensor", "aten.relu.default"]
    assert not written_in_place(graph)


@pytest.mark.parametrize("call", [
    lambda _, x: (lambda y: (y.t(), y.mul_(3.0))[0] * 2)(torch.tanh(x)),
    lambda m, x: m.total.add_(x) + 1,
    lambda _, x: x.relu_() + 1,
])
def test_what_somebody_else_sees_stays_a_write(call: Callable[..., Any]) -> None:
    graph = captured(call)
    assert any(node.mutates for node in graph.nodes)
    wanted = call(Of(call), ROW[0].clone())
    for one, other in zip(run(graph, call), wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("call", "reason"), [
    (lambda _, x: x.relu_() + 1, "writes to its arguments"),
    (lambda _, x: x.t()[:2].mul_(2.0) + 1, "writes to its arguments"),
    (lambda m, x: (m.total.add_(x), x + 1)[1], "writes to its own buffers"),
    (lambda m, x: m.total.add_(x) + 1, "called with before"),
])
def test_a_module_that_changes_what_is_not_its_own_runs_as_it_is(call: Callable[..., Any], reason: str) -> None:
    module, twin = Of(call), Of(call)
    mine = ac.compile(module, example_inputs=(ROW[0].clone(),), device="cpu", run_on="framework", store=Store(None), validators=[],
                      origins=[])
    assert reason in mine.graphs.eager_reason
    for _ in range(2):
        mine_given, given_ = ROW[0].clone(), ROW[0].clone()
        assert torch.equal(mine(mine_given), twin(given_)) and torch.equal(mine_given, given_)


def test_a_buffer_lives_as_long_as_a_slice_of_it_is_read() -> None:
    """The transposed view is read after a later step has written; their memory must not be the same."""
    graph = captured(lambda _, x: (lambda h, k: h.t().reshape(4, 8) + k)(x.exp(), x.tanh()))
    names = {node.kind: node for node in graph.nodes}
    exp, tanh = names["exp"], names["tanh"]
    view = next(node for node in graph.nodes if exp.outputs[0] in node.inputs)
    others = tuple(n.name for n in graph.nodes if n.name not in (exp.name, tanh.name, view.name))
    program = Program(graph=graph, segments=(step_of(graph, exp.name), Segment(nodes=(view.name,)), step_of(graph, tanh.name),
                                             Segment(nodes=others)))
    offsets, _ = buffer_plan(program, program.segments)
    assert offsets[exp.outputs[0]] != offsets[tanh.outputs[0]]
    assert memory_roots(graph)[view.outputs[0]] == memory_roots(graph)[exp.outputs[0]]


def step_of(graph: Graph, name: str) -> Segment:
    node = graph.node_by_name[name]
    match, _ = fake_match()
    operands = tuple(Operand(name=label, role=role, spec=graph.spec(value), values=(value,), access=access)
                     for label, role, value, access in (("x", Role.INPUT, node.inputs[0], Access.READ),
                                                        ("out", Role.OUTPUT, node.outputs[0], Access.WRITE)))
    step = Step(match_id="m", implementation="test/one", origin=Origin.GENERATED, schedule=Schedule({}))
    return Segment(nodes=(name,), step=step, match=evolve(match, nodes=(name,), operands=operands, epilogue=None),
                   operands=tuple((o.name, o.values) for o in operands))


def test_no_kernel_reads_memory_that_is_seen_changing() -> None:
    graph = captured(slice_written)
    changing = seen_changing(graph)
    assert {node.kind for node in graph.nodes if {*node.inputs, *node.outputs} & changing} >= {"mul", "exp", "zero_", "add"}
    inside = {name for part in partition(graph) for name in part.nodes}
    assert not any({*graph.node_by_name[name].inputs, *graph.node_by_name[name].outputs} & changing for name in inside)
