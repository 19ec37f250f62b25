"""The core's checks of a proposed match: what it may cover, and whether its operands tell the truth about it."""

from attrs import evolve

from ...errors import ContractError
from ...ir.graph import Graph, ValueKind
from ...ir.region import PROMISED_BYTES, Match, Operand, Role
from ...ops.aliasing import alias_roots, written_in_place
from ...ops.dependency import Dependencies
from ...plugin.match_kind import MatchKind

_READABLE_EARLY = (ValueKind.WEIGHT, ValueKind.CONSTANT)  # what a kernel may read before the dependency wait


def normalized(match: Match, deps: Dependencies, rule: str) -> Match:
    """The same match with its nodes in graph order and its rule's qualified name.

    Raises:
        KeyError: it names a node that the region does not have.
    """
    return evolve(match, nodes=deps.members(deps.mask(match.nodes)), rule=rule)


def kind_problem(match: Match, kind: MatchKind) -> str:
    """Why a match is not what its kind says; empty if it is. What the kind has a default for may be missing."""
    names = [operand.name for operand in match.operands]
    if len(set(names)) < len(names):
        return f"it has two operands called {next(n for n in names if names.count(n) > 1)!r}"
    missing = [o.name for o in kind.operands if not (o.optional or o.repeated or o.name in names)]
    if missing:
        return f"its operand {missing[0]!r} is missing"
    if match.label not in kind.all_labels:
        return f"its label {match.label!r} is none of {', '.join(kind.all_labels)}"
    return next((reason for reason in (_operand(o, kind) for o in match.operands) if reason), "") or _attributes(match, kind)


def _operand(operand: Operand, kind: MatchKind) -> str:
    said = kind.operand(operand.name)
    if said is None:
        return f"the kind has no operand {operand.name!r}; it has {', '.join(o.name for o in kind.operands)}"
    if operand.role not in said.roles:
        return f"operand {operand.name} has role {operand.role.value}; the kind allows {', '.join(role.value for role in said.roles)}"
    return ""


def _attributes(match: Match, kind: MatchKind) -> str:
    given = dict(match.attributes)
    for name, value in given.items():
        said = kind.attribute(name)
        if said is None:
            return f"the kind has no attribute {name!r}; it has {', '.join(a.name for a in kind.attributes) or 'none'}"
        if type(value) is not said.type and not (said.type is float and type(value) is int):
            return f"attribute {name} is {value!r}; the kind wants {said.type.__name__}"
    missing = [a.name for a in kind.attributes if a.default is None and not a.repeated and a.name not in given]
    return f"its attribute {missing[0]!r} is missing" if missing else ""


def completed(match: Match, kind: MatchKind, graph: Graph) -> Match:
    """The match with the defaults of its kind, and with the bytes that the kind counts where they are not those of its operands.

    Raises:
        ContractError: the kind counts bytes or names positions that cannot be.
        Exception: whatever a method of the kind raises for a match that it cannot count.
    """
    given = dict(match.attributes)
    left_out = [(a.name, a.default) for a in kind.attributes if a.default is not None and not a.repeated and a.name not in given]
    whole = evolve(match, attributes=(*match.attributes, *left_out))
    moved = kind.bytes_moved(whole, graph)
    # What raises in these would raise in later stages, where nobody expects it.
    counts = (moved, kind.flops(whole, graph), *kind.positions(whole, False), *kind.positions(whole, True))
    kind.reduction_axis(whole, graph)
    if any(type(count) is not int or count < 0 for count in counts):
        raise ContractError(f"kind {kind.name} counts bytes, FLOPs and positions {counts}; all must be integers from 0 on")
    return whole if moved == whole.bytes_moved else evolve(whole, attributes=(*whole.attributes, ("bytes_moved", moved)))


def problem(match: Match, graph: Graph, deps: Dependencies) -> str:
    """Why a match of at least one node of the graph is refused; empty if it may be used."""
    unknown = [v for operand in match.operands for v in operand.values if v not in graph.by_name]
    if unknown:
        return f"its operands name {unknown[0]!r}, which is no value of the region"
    if not deps.is_convex(deps.mask(match.nodes)):
        return "it is not convex: something outside it lies between its nodes"
    return _mutation(match, graph) or _outputs(match, graph) or _beside(match, graph) or _inputs(match, graph) or _roles(match, graph)


def _values(match: Match, *roles: Role) -> set[str]:
    return {value for operand in match.operands if operand.role in roles for value in operand.values}


def _mutation(match: Match, graph: Graph) -> str:
    states = _values(match, Role.STATE)
    for name in match.nodes:
        for value in graph.node_by_name[name].mutates:
            if value not in states:
                return f"node {name} writes {value!r}, which is no state operand of it"
    return ""


def _outputs(match: Match, graph: Graph) -> str:
    inside = set(match.nodes)
    produced = {out for name in match.nodes for out in graph.node_by_name[name].outputs}
    declared = _values(match, Role.OUTPUT)
    stray = sorted(declared - produced)
    if stray:
        return f"its output {stray[0]!r} is not produced by its nodes"
    roots = alias_roots(graph)
    reachable = {roots[value] for value in declared}
    for value in sorted(produced):
        leaves = value in graph.outputs or any(user.name not in inside for user in graph.users.get(value, ()))
        if leaves and value not in declared and roots[value] not in reachable:
            return f"it hides {value!r}, which others read"
    return ""


def _beside(match: Match, graph: Graph) -> str:
    """Results that lie side by side may not bring one that is whole vectors to an address that no vector begins at."""
    for operand in match.operands:
        begin = 0
        for value in operand.values if operand.role is Role.OUTPUT and len(operand.values) > 1 else ():
            nbytes = graph.spec(value).nbytes
            if begin % PROMISED_BYTES and nbytes % PROMISED_BYTES == 0:
                return f"its output {value!r} would lie {begin} bytes behind the others, where no kernel may read it by vectors"
            begin += nbytes
    return ""


def _inputs(match: Match, graph: Graph) -> str:
    produced = {out for name in match.nodes for out in graph.node_by_name[name].outputs}
    operands = _values(match, *(role for role in Role if role not in (Role.OUTPUT, Role.WORKSPACE)))
    inner = sorted(operands & produced)
    if inner:
        return f"its operand {inner[0]!r} is produced inside it"
    read = {value for name in match.nodes for value in graph.node_by_name[name].inputs} - produced
    missing = sorted(read - operands)
    if missing:
        return f"it reads {missing[0]!r}, which is no operand of it"
    return ""


def _roles(match: Match, graph: Graph) -> str:
    mutated = {value for node in graph.nodes for value in node.mutates} | written_in_place(graph)
    for operand in match.operands:
        if operand.role in (Role.WEIGHT, Role.CONSTANT):
            for value in operand.values:
                if graph.kind_of(value) not in _READABLE_EARLY or value in mutated:
                    return f"operand {operand.name} has role {operand.role.value}, but {value!r} changes while the program runs"
    return ""
