"""A decode step, kernel by kernel: each against the framework's operators of the same nodes, on the numbers that it really gets.

Whole results cannot tell an error from rounding where a model is chaotic: a router of experts that takes another one for the last bit of a
sum, a softmax of scores that are large. One kernel's can: what the kernels before it rounded is what both of them read.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from ..ir.graph import ValueKind
from ..ops.interpreter import Prepared, compile_nodes

if TYPE_CHECKING:
    import torch

    from ..runtime.bound_program import BoundProgram
    from ..runtime.program import Segment

    Differs = Callable[[torch.Tensor, torch.Tensor], str]

# Token, position and history: which of two equal logits is taken is open, so whole results hold these to each other.
OF_THE_LOOP = "session."


def difference(bound: "BoundProgram", position: int, differs: "Differs") -> str:
    """One clause on the first step of ``bound`` that gives or leaves something else than its nodes do; empty where none does.

    The program runs once, at ``position``, with its states and inputs as they are; ``differs`` says how far two results are apart.
    """
    if len(bound.segments) != len(bound.parts):
        return "its steps cannot be run one by one"
    for segment, part in zip(bound.segments, bound.parts, strict=True):
        if segment.step is None:
            part.run()
            continue
        for found, wanted, what in _step(bound, segment, position, part.run):
            if why := differs(found, wanted):
                return f"{segment.name} of {', '.join(segment.nodes[:2])}: {what}: {why}"
    return ""


@frozen
class _State:
    """What a step may change of a state: of a cache the row at the position, of others all."""

    name: str
    changed: "torch.Tensor"
    compared: bool


def _step(bound: "BoundProgram", segment: "Segment", position: int,
          run: "Callable[[], None]") -> "Iterator[tuple[torch.Tensor, torch.Tensor, str]]":
    """Results and changed states of one step: the program's, the framework's, and what they are."""
    import torch

    environment = bound.environment
    with torch.no_grad():
        framework = compile_nodes(bound.graph, segment.nodes, device=next(iter(environment.values())).device)
        states = [_state(bound, name, position) for name in framework.mutates]
        before = [one.changed.clone() for one in states]
        wanted = {name: tensor.clone() for name, tensor in _run(framework, environment).items()}
        left = [one.changed.clone() for one in states]
        for one, was in zip(states, before, strict=True):
            one.changed.copy_(was)
        run()
    for name, tensor in wanted.items():
        yield environment[name].view(tensor.shape), tensor, name
    for one, tensor in zip(states, left, strict=True):
        if one.compared:
            yield one.changed, tensor, one.name


def _run(framework: Prepared, environment: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    return framework.run({name: environment[name] for name in framework.inputs})


def _state(bound: "BoundProgram", name: str, position: int) -> _State:
    tensor, source = bound.environment[name], bound.graph.by_name[name].source
    is_state = bound.graph.kind_of(name) is ValueKind.STATE
    changed = tensor[:, position : position + 1] if is_state and source.startswith("kv.") else tensor
    return _State(name, changed, not source.startswith(OF_THE_LOOP))
