"""A decode step, kernel by kernel: each against the framework's operators of the same nodes, on the numbers that it really gets.

Whole results cannot tell an error from rounding where a model is chaotic: a router of experts that takes another one for the last bit of a
sum, a softmax of scores that are large. One kernel's can: what the kernels before it rounded is what both of them read.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from ..errors import AgentCompileError
from ..ir.graph import Graph, ValueKind
from ..ops.decisions import behind, decisions
from ..ops.interpreter import Prepared, compile_nodes
from ..ops.operator_names import ATTENTION
from ..runtime.live import is_read_in_the_last_row

if TYPE_CHECKING:
    import torch

    from ..ops.reference import Bounded
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
        why = next((f"{what}: {why}" for found, wanted, what in _step(bound, segment, position, part.run)
                    if (why := differs(found, wanted))), "")
        if why and (why := _by_its_decisions(bound, segment, why, differs)):
            return f"{segment.name} of {', '.join(segment.nodes[:2])}: {why}"
    return ""


def _by_its_decisions(bound: "BoundProgram", segment: "Segment", why: str, differs: "Differs") -> str:
    """One clause on how a step that differs (``why``) is wrong all the same: its decisions (which experts, which token) are none that
    the errors of its own numbers leave open, or what it made by them is not what the framework's operators make by the same ones."""
    from ..ops.reference.choice import may_be_chosen

    environment, nodes = bound.environment, [bound.graph.node_by_name[name] for name in segment.nodes]
    made = [one for one in decisions(nodes) if one.index in environment]
    if not made or any(node.mutates for node in nodes):
        return why
    decided = behind(bound.graph.sub(segment.nodes, "step"), made)
    given = {**environment, **{one.index: environment[one.index].view(decided.spec(one.index).shape) for one in made}}
    for one in made:
        scores = _bounded(decided, one.scores, given)
        if scores is None:
            return why
        if not may_be_chosen(scores, given[one.index], one.dim, largest=one.largest, first=one.first):
            return f"{one.index}: {given[one.index].flatten().tolist()[:8]} are not the best of {one.scores}, nor may roundings make them"
    wanted = _run(compile_nodes(decided, device=given[made[0].index].device), given)
    return next((f"{name}: {why}" for name, tensor in wanted.items() if (why := differs(given[name].view(tensor.shape), tensor))), "")


def _bounded(graph: Graph, name: str, values: "Mapping[str, torch.Tensor]") -> "Bounded | None":
    """A value of ``graph`` with the errors that it may have; None where nothing is known of how an operator errs."""
    from ..ops.reference import exact, oracle

    needed, nodes = {name}, list[str]()
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            nodes.append(node.name)
    if not nodes:
        return exact(values[name])
    part = graph.sub(tuple(nodes), "scores", outputs=(name,))
    try:
        return oracle(part, {value.name: values[value.name] for value in part.values if value.name not in part.producer})[name]
    except AgentCompileError:
        return None


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

    Behind each piece the other program goes on with what this one gave. ``rows``: those of the caches that the chunk, no row of which is
    padding, writes. Of attention that is read in the last row alone nothing else need be there.
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
        found, wanted = results, {name: theirs.environment[name] for name in results}
        if node.op == ATTENTION and is_read_in_the_last_row(ours.graph, node):
            found, wanted = ({name: attended[:, -1:] for name, attended in one.items()} for one in (found, wanted))
        if why := _first(found, wanted, differs):
            return f"{', '.join(segment.nodes[:2])}: {why}"
        for name, tensor in results.items():
            if node.op == ATTENTION:
                theirs.environment[name].copy_(tensor)  # where others look for it
            else:
                theirs.environment[name] = tensor
    return ""


def _first(found: "Mapping[str, torch.Tensor]", wanted: "Mapping[str, torch.Tensor]", differs: "Differs") -> str:
    return next((f"{name}: {why}" for name, tensor in found.items() if (why := differs(tensor, wanted[name]))), "")
