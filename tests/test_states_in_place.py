"""Operators with a state write the next one over the last one only where nobody can tell."""

from typing import Any

import pytest
import torch

from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, TensorSpec, Value, ValueKind
from agentcompile_core.ops import operators as operators  # registers the operators of namespace agentcompile
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.joint_products import Memory
from agentcompile_core.ops.operator_names import CONVOLUTION, COPY

STATE, X, WEIGHT, COLUMN = (TensorSpec(shape=shape, dtype=DType.F32) for shape in ((1, 4, 3), (1, 4, 1), (4, 3), (1, 4, 1)))
CALL = (CONVOLUTION, ("state", "x", "weight"), ("y", "last"), ())
NEG, VIEW = "aten.neg.default", "aten.view.default"
COPIED = (COPY, ("state", "last"), ("copied",), ("state",))
GIVEN = {"state": (STATE, ValueKind.STATE), "other": (STATE, ValueKind.STATE), "x": (X, ValueKind.INPUT),
         "weight": (WEIGHT, ValueKind.WEIGHT)}


def graph_of(*steps: tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], outputs: tuple[str, ...] = ("y",)) -> Graph:
    specs = {"y": COLUMN, "last": STATE, "copied": STATE}
    values = [Value(name=name, spec=spec, kind=kind, source=name * (kind is not ValueKind.INPUT)) for name, (spec, kind) in GIVEN.items()]
    values += [Value(name=name, spec=specs.get(name, STATE)) for _, _, made, _ in steps for name in made]
    nodes = []
    for i, (op, args, made, mutates) in enumerate(steps):
        shape = [STATE.shape] if op == VIEW else []
        nodes.append(Node(name=f"n{i}", op=op, kind=op.split(".")[1], args=(*map(Ref, args), *shape), outputs=made, mutates=mutates))
    return Graph(name="decode", kind=GraphKind.DECODE, values=tuple(values), nodes=tuple(nodes), inputs=("x",), outputs=outputs)


def ran(graph: Graph, in_place: bool, wanted: dict[str, torch.Tensor] | None = None) -> tuple[list[str], dict[str, torch.Tensor], Any]:
    """Which bodies were called, and the environment behind two runs; it is that of the graph without any body."""
    calls: list[str] = []
    convolution = torch.ops.agentcompile.causal_convolution.default

    def alone(*args: Any) -> Any:
        calls.append("alone")
        return convolution(*args)

    def placed(state: torch.Tensor, *args: Any, into: torch.Tensor | None = None) -> torch.Tensor | None:
        calls.append("in place" if in_place else "refused")
        if not in_place:
            return None
        y, last = convolution(state, *args)
        state.copy_(last)
        return y if into is None else into.copy_(y)

    def bodies(*ops: str) -> Any:
        return {(CONVOLUTION,): alone, (CONVOLUTION, COPY): placed}.get(ops)

    def environment() -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {name: torch.randn(spec.shape, generator=generator) for name, (spec, _) in GIVEN.items()}

    ours, theirs = environment(), environment()
    prepared = compile_nodes(graph, device="cpu", outputs=graph.outputs, bodies=bodies, memory=Memory(results=wanted or {}, joins=False))
    plain = compile_nodes(graph, device="cpu", outputs=graph.outputs)
    for _ in range(2):
        found, right = prepared.run(ours), plain.run(theirs)
        assert all(torch.equal(found[name], right[name]) for name in graph.outputs) and torch.equal(ours["state"], theirs["state"])
    return calls, found, prepared


@pytest.mark.parametrize("in_place", [True, False])
def test_a_state_that_is_only_copied_back_is_written_in_place(in_place: bool) -> None:
    calls, _, _ = ran(graph_of(CALL, COPIED), in_place)
    assert calls == (["in place"] * 2 if in_place else ["refused", "alone"] * 2)


@pytest.mark.parametrize("in_place", [True, False])
def test_states_are_seen_through_views(in_place: bool) -> None:
    """Of the state, and of the one behind it."""
    steps = ((VIEW, ("state",), ("seen",), ()), (CONVOLUTION, ("seen", "x", "weight"), ("y", "last"), ()),
             (VIEW, ("last",), ("v",), ()), (COPY, ("state", "v"), ("copied",), ("state",)))
    calls, _, _ = ran(graph_of(*steps), in_place)
    assert calls == (["in place"] * 2 if in_place else ["refused", "alone"] * 2)
    read = (NEG, ("seen",), ("w",), ())
    assert ran(graph_of(*steps, read, outputs=("y", "w")), True)[0] == ["alone"] * 2


@pytest.mark.parametrize("in_place", [True, False])
def test_results_lie_where_they_are_wanted(in_place: bool) -> None:
    place = torch.zeros(COLUMN.shape)
    _, found, prepared = ran(graph_of(CALL, COPIED), in_place, {"y": place})
    assert found["y"] is place and prepared.written == {"y"}




@pytest.mark.parametrize(("steps", "outputs"), [
    ((CALL, COPIED), ("y", "last")),  # the caller wants the last state
    ((CALL, COPIED), ("y", "copied")),  # or the copy
    ((CALL, (NEG, ("state",), ("v",), ()), COPIED), ("y", "v")),  # the state before it is read behind the operator
    ((CALL, COPIED, (NEG, ("last",), ("v",), ())), ("y", "v")),  # the last state is read by another one
    ((CALL, COPIED, (NEG, ("copied",), ("v",), ())), ("y", "v")),
    (((VIEW, ("other",), ("seen",), ()), CALL, (NEG, ("state",), ("v",), ()), COPIED), ("y", "v")),
    (((CONVOLUTION, ("other", *CALL[1][1:]), *CALL[2:]), COPIED), ("y",)),  # it is the state behind another one
    ((CALL,), ("y", "last"))])
def test_what_somebody_would_notice_stays_as_it_is(steps: tuple[Any, ...], outputs: tuple[str, ...]) -> None:
    calls, _, _ = ran(graph_of(*steps, outputs=outputs), True)
    assert calls == ["alone"] * 2
