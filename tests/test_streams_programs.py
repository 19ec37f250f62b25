"""Whatever programs do to tensors of which they show and write parts, their graphs do the same, and lay it out as they say."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from stream_programs import Of, Program, programs
from torch import Tensor

from agentcompile_core.ir.graph import Graph, GraphKind
from agentcompile_core.ops.agreement import disagreement
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.stages.capture.export import export_forward
from agentcompile_core.stages.capture.importer import import_program, spec_of
from agentcompile_core.stages.capture.normalize import normalize


def copies(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one.clone() for one in given)


def imported(call: Callable[..., object], given: tuple[Tensor, ...]) -> Graph:
    return import_program(export_forward(Of(call), copies(given)), "forward", GraphKind.FORWARD, 1)


def results(graph: Graph, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return compile_nodes(graph, device="cpu").bind(dict(zip(graph.inputs, copies(given), strict=True)))()


def mislaid(graph: Graph, given: tuple[Tensor, ...]) -> list[str]:
    """Values that lie otherwise than the graph says."""
    made = compile_nodes(graph, device="cpu").run(dict(zip(graph.inputs, copies(given), strict=True)))
    return [out for node in graph.nodes for out in node.outputs if out in made and spec_of(made[out]) != graph.spec(out)]


@settings(deadline=None, max_examples=80)
@given(program=programs())
def test_drawn_programs_are_what_they_were(program: Program) -> None:
    graph = imported(program, program.given)
    wanted, found = results(graph, program.given), normalize(graph)
    if program.mixes:
        assert not disagreement(results(found, program.given), wanted)
    else:
        assert all(map(torch.equal, results(found, program.given), wanted))
    assert not mislaid(found, program.given)


# ---- what drawn programs seldom do

def result_of_a_second_write(x: Tensor) -> Tensor:
    made = x * 2
    written = made[1:].copy_(made[1:].add_(1))
    made.mul_(3)
    return written.sum() + made.sum()


def view_of_a_result(x: Tensor) -> Tensor:
    made = x * 2
    row = made[1:].add_(1)[0]
    made.mul_(3)
    return row + made.sum()


def write_through_a_view_of_a_result(x: Tensor) -> Tensor:
    made = x * 2
    made[1:].add_(1)[0].mul_(5)
    return made + 1


def source_of_a_repetition(x: Tensor) -> Tensor:
    made = x[:1] * 2
    row, repeated = made[0], made.repeat(4, 1)
    row.add_(1)
    return repeated * x + made


def repetition_that_is_written(x: Tensor) -> Tensor:
    repeated = (x[:1] * 2).repeat(4, 1)
    repeated[1].add_(1)
    return repeated * x


def _mixed(x: Tensor) -> Tensor:
    factors = x.reshape(-1)[:16].reshape(1, 1, 4, 4).permute(0, 1, 3, 2)
    return torch.matmul(x.reshape(4, 1, 1, -1).permute(1, 2, 3, 0), factors).permute(3, 0, 1, 2)


def copy_of_mixed_streams(x: Tensor) -> Tensor:
    mixed = _mixed(x)
    flat = mixed.reshape(-1)
    flat.add_(1)
    return flat.sum() * 3 + mixed.sum()


def mixed_streams_in_one_piece(x: Tensor) -> Tensor:
    mixed = _mixed(x)
    copied = mixed.contiguous()
    copied.add_(1)
    return copied.sum() * 3 + mixed.sum()


@pytest.mark.parametrize("call", [
    result_of_a_second_write, view_of_a_result, write_through_a_view_of_a_result, source_of_a_repetition, repetition_that_is_written,
    copy_of_mixed_streams, mixed_streams_in_one_piece])
def test_what_is_written_later_shows_where_it_did_and_nowhere_else(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(20.0).reshape(4, 5) - 7
    assert torch.equal(results(normalize(imported(call, (x,))), (x,))[0], call(x.clone()))
