"""Chunks of a recurrence and its state: which take padding, and which begin with zeros where a prompt goes on, and get the state instead.

Such a model is only right for whole prompts. What it computes for one is what chunks that hand on the state compute one after the other;
``comparison.py`` finds out whether they do.
"""

from collections.abc import Mapping

from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref, Symbol, Value, ValueKind, map_refs
from ...ops.aliasing import memory_roots
from ...ops.operator_names import RECURRENCE
from ...ops.schema import argument as argument_of
from ...ops.schema import with_argument
from .rewrite import eliminate_dead_code, rebuild
from .states import Held, StateSpec
from .unsupported import Unsupported

_STEPS = ("aten.add.Tensor", "aten.mul.Tensor", "aten.addcmul.default")
_ZEROS = ("aten.zeros.default", "aten.new_zeros.default", "aten.zeros_like.default")


def continue_states(graph: Graph, held: Held) -> Graph:
    """The chunk ``graph`` with every state read.

    Before: ``s1 = add(mul(a0, zeros), b0)``; ``s2 = add(mul(a1, s1), b1)``; ``copy_(state, s2)``. After: ``s1 = add(mul(a0, state), b0)``.

    Raises:
        Unsupported: a state is written and not read, and what is written does not begin with zeros.
    """
    roots = memory_roots(graph)
    for state in held.states:
        if not _is_read(graph, state, roots):
            graph = _continued(graph, state)
    return graph


def takes_padding(graph: Graph, held: Held) -> bool:
    """Whether the chunk ``graph`` leaves its recurrent states alone behind its tokens: each is made by an operator that is told of them."""
    made = [_recurrence_of(graph, state) for state in held.states if state.part != "conv"]
    return all(node is not None and argument_of(node, "valid") is not None for node in made)


def _written(graph: Graph, state: StateSpec) -> Argument:
    """What is written to ``state``; None: nothing is."""
    writer = next((node for node in graph.nodes if state.source in node.mutates), None)
    return writer.args[1] if writer is not None and len(writer.args) > 1 else None


def _recurrence_of(graph: Graph, state: StateSpec) -> Node | None:
    """The operator whose last state is written to ``state``, through views and casts."""
    written = _written(graph, state)
    while isinstance(written, Ref) and (node := graph.producer.get(written.value)) is not None:
        if node.op == RECURRENCE:
            return node if written.value == node.outputs[1] else None
        if node.kind not in ("view", "copy", "cast"):
            return None
        written = node.args[0]
    return None


def _begun(graph: Graph, node: Node, state: StateSpec) -> Graph:
    """``graph`` in which the recurrence ``node``, which begins with zeros, begins with ``state``: its numbers as [1, H, P, N] in f32."""
    wanted, name = graph.spec(node.outputs[1]), f"{node.name}.begins"
    if wanted.numel != state.spec.numel:
        raise Unsupported(f"a chunk makes a state of {wanted.shape} for the {state.part} state {state.spec.shape} of layer {state.layer}")
    shaped = Node(name=f"{name}.shaped", op="aten.reshape.default", kind="view", args=(Ref(state.source), wanted.shape),
                  outputs=(f"{name}.shaped",), module=node.module, layer=node.layer)
    cast = Node(name=name, op="aten.to.dtype", kind="cast", args=(Ref(shaped.name), Symbol("dtype", wanted.dtype.value)), outputs=(name,),
                module=node.module, layer=node.layer)
    made = [shaped] if state.spec.dtype is wanted.dtype else [shaped, cast]
    values = [Value(name=one.name, spec=evolve(wanted, dtype=wanted.dtype if one is cast else state.spec.dtype)) for one in made]
    begun, at = with_argument(node, "state", Ref(made[-1].name)), graph.nodes.index(node)
    nodes = [*graph.nodes[:at], *made, begun, *graph.nodes[at + 1:]]
    return eliminate_dead_code(rebuild(evolve(graph, values=(*graph.values, *values)), nodes))


def _is_read(graph: Graph, state: StateSpec, roots: Mapping[str, str]) -> bool:
    own = {name for name, root in roots.items() if root == roots.get(state.source)}
    return any(own & (set(node.inputs) - set(node.mutates)) for node in graph.nodes if node.kind != "view")


def _continued(graph: Graph, state: StateSpec) -> Graph:
    recurrence = _recurrence_of(graph, state)
    if recurrence is not None and argument_of(recurrence, "state") is None:
        return _begun(graph, recurrence, state)
    begins = _beginnings(graph, _written(graph, state), state)
    if len(begins) != 1:
        raise Unsupported(f"a chunk forgets the {state.part} state of layer {state.layer}")
    first, zeros = begins[0]
    place = {zeros: state.source}
    node = evolve(first, args=tuple(map_refs(argument, place) for argument in first.args))
    return eliminate_dead_code(rebuild(graph, [node if one.name == first.name else one for one in graph.nodes]))


def _beginnings(graph: Graph, written: object, state: StateSpec) -> list[tuple[Node, str]]:
    """The nodes of the recurrence that read zeros of the shape of the state, and these; from what is written back to the first step."""
    found, waiting, seen = [], [written], set[str]()
    while waiting:
        argument = waiting.pop()
        node = graph.producer.get(argument.value) if isinstance(argument, Ref) else None
        if node is None or node.name in seen or node.op not in _STEPS or graph.spec(node.outputs[0]).shape != state.spec.shape:
            continue
        seen.add(node.name)
        for one in node.args:
            if isinstance(one, Ref) and _is_zero(graph, one, state):
                found.append((node, one.value))
            else:
                waiting.append(one)
    return found


def _is_zero(graph: Graph, argument: Ref, state: StateSpec) -> bool:
    node, spec = graph.producer.get(argument.value), graph.spec(argument.value)
    if node is None or graph.kind_of(argument.value) is not ValueKind.INTERMEDIATE or spec.shape != state.spec.shape:
        return False
    return node.op in _ZEROS or (node.op == "aten.full.default" and argument_of(node, "fill_value") == 0)
