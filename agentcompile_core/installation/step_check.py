"""A decode step, kernel by kernel: each against the framework's operators of the same nodes, on the numbers that it really gets.

Whole results cannot tell an error from rounding where a model is chaotic: a router of experts that takes another one for the last bit of a
sum, a softmax of scores that are large. One kernel's can: what the kernels before it rounded is what both of them read.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from ..errors import AgentCompileError
from ..ir.graph import ValueKind
from ..ops.interpreter import Prepared, compile_nodes
from ..ops.operator_names import ATTENTION

if TYPE_CHECKING:
    import torch

    from ..runtime.bound_program import BoundProgram
    from ..runtime.program import Segment

    Differs = Callable[[torch.Tensor, torch.Tensor], str]

CHOICES = ("aten.topk.default",)  # what a step makes by one is another thing where two elements are equal
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
            if (why := differs(found, wanted)) and not _is_open(bound, segment, what, found):
                return f"{segment.name} of {', '.join(segment.nodes[:2])}: {what}: {why}"
    return ""


def _is_open(bound: "BoundProgram", segment: "Segment", name: str, found: "torch.Tensor") -> bool:
    """Whether integers that a step chose (the largest of many, the first k), and what it made by them, are as right as the framework's:
    within the errors that the step's own numbers may have, which make near ones change places."""
    from ..ops.reference import compare, oracle

    part = bound.graph.sub(segment.nodes, "step")
    if name not in bound.graph.producer or (found.is_floating_point() and not any(node.op in CHOICES for node in part.nodes)):
        return False
    if name not in part.outputs or any(node.mutates for node in part.nodes):
        return False
    values = {value.name: bound.environment[value.name] for value in part.values if value.name not in part.producer}
    try:
        return compare(found, oracle(part, values)[name]).ok
    except AgentCompileError:  # nothing is known of how an operator errs
        return False


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


def difference_of_pieces(ours: "BoundProgram", theirs: "BoundProgram", rows: slice, differs: "Differs") -> str:
    """The same of a program that reads prompts, piece by piece beside one of the framework's operators alone, over the same states.

    Behind each piece the other program goes on with what this one gave. ``rows``: those of the caches that the chunk writes.
    """
    if len(ours.parts) != len(theirs.parts) or [s.nodes for s in ours.segments] != [s.nodes for s in theirs.segments]:
        return "its pieces are not those of the framework's operators"
    mine, others = iter(ours.parts), iter(theirs.parts)
    for segment in ours.segments:
        node = ours.graph.node_by_name[segment.nodes[-1]]
        if node.op == ATTENTION:  # its rows are cached first, then it attends to all of them
            caches = {name: ours.environment[name][:, rows] for name in node.mutates}
            before = {name: cache.clone() for name, cache in caches.items()}
            next(others).run()
            wanted = {name: cache.clone() for name, cache in caches.items()}
            for name, cache in caches.items():
                cache.copy_(before[name])
            next(mine).run()
            if why := _first(caches, wanted, differs):
                return f"{node.name}: {why}"
        next(others).run()
        next(mine).run()
        made = [name for one in segment.nodes for name in ours.graph.node_by_name[one].outputs if name in theirs.environment]
        results = {name: ours.environment[name] for name in made if name in ours.environment}
        if why := _first(results, theirs.environment, differs):
            return f"{', '.join(segment.nodes[:2])}: {why}"
        for name, tensor in results.items():
            if node.op == ATTENTION:
                theirs.environment[name].copy_(tensor)  # where others look for it
            else:
                theirs.environment[name] = tensor
    return ""


def _first(found: "Mapping[str, torch.Tensor]", wanted: "Mapping[str, torch.Tensor]", differs: "Differs") -> str:
    return next((f"{name}: {why}" for name, tensor in found.items() if (why := differs(tensor, wanted[name]))), "")
