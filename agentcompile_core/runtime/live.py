"""Attention of prompt chunks over the live length of the cache: outside of captured graphs, since a graph has fixed shapes.

Of each call the rows are appended inside the graph before it; what attends runs from Python, with the position that the host
knows (docs/decisions/0022). A chunk that begins at position 0 has one length only and stays inside of them.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, frozen

from ..ir.graph import Graph, GraphKind, Node, Ref
from ..ops.operator_names import ATTENTION
from ..ops.schema import named
from ..plugin.running import Scoring
from .bound_program import Piece
from .device import at_any_length
from .head_rows import HeadRows
from .pieces import outer
from .program import Segment

if TYPE_CHECKING:
    import torch

    from ..ops.operators import AttentionCall
    from ..plugin.interfaces import Backend

    Tensors = MutableMapping[str, "torch.Tensor"]

NAME = "attention over what is cached"
LENGTH = 2  # which input of a prompt chunk says how many of its tokens are no padding
APPENDED = ("q", "k", "v")  # arguments that nothing reads behind the append


@define
class HostPosition:
    """What the host knows of the chunk that runs now: its first position, and its last row that is no padding (-1: not known)."""

    start: int = 0
    last_row: int = -1


def live_nodes(graph: Graph) -> tuple[str, ...]:
    """The calls of attention of a prompt chunk."""
    return tuple(node.name for node in graph.nodes if graph.kind is GraphKind.PREFILL and node.op == ATTENTION)


def begins(node: Node) -> bool:
    """Whether a call of attention is one of a chunk at position 0, so that its length never changes."""
    return named(node.op, node.args, dict(node.kwargs)).get("fresh") is True


def is_read_in_the_last_row(graph: Graph, node: Node) -> bool:
    """Whether of a call of attention nothing but the last row of a chunk that is no padding is read (``stages/capture/one_row.py``)."""
    readers = graph.users.get(node.outputs[0], ())
    if node.outputs[0] in graph.outputs or len(readers) != 1 or readers[0].op != "aten.index_select.default":
        return False
    taken = named(readers[0].op, readers[0].args, dict(readers[0].kwargs))
    index = taken["index"]
    maker = graph.producer.get(index.value) if isinstance(index, Ref) else None
    of_length = maker is not None and maker.op == "aten.sub.Tensor" and maker.args == (Ref(graph.inputs[LENGTH]), 1) and not maker.kwargs
    return of_length and taken["dim"] == 1


@frozen(kw_only=True)
class Outside:
    """What a call needs that attends between two graphs: ``out`` [1, T, H, Dv], where the result goes, and ``queries`` [1, H, T, D], where
    they wait for it, shared by all calls of one program.

    ``last_row_only``: nothing but the last row that is no padding is read of ``out``, and nothing else is written where the host knows it.
    """

    out: "torch.Tensor"
    queries: "torch.Tensor"
    last_row_only: bool = False


class LiveAttention:
    """One call of attention of a bound program, in two parts: rows into the cache, and attention over what is cached.

    Args:
        environment: tensors of the program by value name.
        heads: what makes its operands.
        library: the backend of the device, which may attend and merge; None: the operator's own formula.
        outside: of a call that attends between two graphs; None: a graph may hold it, and each run makes a new tensor.
    """

    def __init__(self, node: Node, environment: "Tensors", position: HostPosition, heads: HeadRows, library: "Backend | None",
                 outside: Outside | None = None) -> None:
        self._arguments: Mapping[str, Any] = named(node.op, node.args, dict(node.kwargs))
        self._name, self._environment, self._position = node.outputs[0], environment, position
        self._outside, self._heads = outside, heads
        self._held: torch.Tensor | None = None  # queries between the two parts of a chunk at position 0
        self._part = library.attend if library is not None else None
        self._merged = library.merge if library is not None else None
        self._over_all = None if library is None else partial(_over_all, library)
        self._around = partial(at_any_length, library)

    def _call(self, **others: Any) -> "AttentionCall":
        from ..ops.operators import AttentionCall

        environment = self._environment
        found: dict[str, Any] = {
            name: environment[given.value] if isinstance(given, Ref) else given
            for name, given in self._arguments.items() if name not in others}
        return AttentionCall(**found, **others)

    def _unmade(self) -> "AttentionCall":
        """The call before its rows are made."""
        return self._call(**dict.fromkeys(APPENDED))

    def append(self) -> None:
        """Write K and V to the caches, and the queries to where ``attend`` finds them; a graph may hold it."""
        import torch

        from ..ops.live_attention import append_rows

        with torch.no_grad():
            assert self._outside is not None
            if self._heads.placed(self._unmade(), self._outside.queries):
                return
            self._heads.make()
            call = self._call()
            append_rows(call)
            self._outside.queries.copy_(call.q)

    def attend(self) -> None:
        """Attend from Python, at the host's position."""
        import torch

        from ..ops.live_attention import attend

        assert self._outside is not None
        q, out, start, row = self._outside.queries, self._outside.out, self._position.start, self._position.last_row
        if self._outside.last_row_only and row >= 0:
            q, out, start = q[:, :, row : row + 1], out[:, row : row + 1], start + row
        with torch.no_grad():
            attend(self._call(q=q, k=q, v=q), start, out, self._part, self._merged, self._over_all, self._around)

    def append_inside(self) -> None:
        """As ``append``, of a chunk at position 0."""
        import torch

        from ..ops.live_attention import append_rows

        with torch.no_grad():
            self._held = self._heads.empty_queries()
            if not self._heads.placed(self._unmade(), self._held):
                self._heads.make()
                call = self._call()
                append_rows(call)
                self._held = call.q

    def attend_inside(self) -> None:
        """Attend at position 0; a graph may hold it."""
        import torch

        from ..ops.live_attention import attend

        q, self._held = self._held, None
        with torch.no_grad():
            self._environment[self._name] = attend(self._call(q=q, k=q, v=q), 0, part=self._part, over_all=self._over_all,
                                                   around=self._around)

    def pieces(self, dropped: Callable[[], None]) -> tuple[Piece, Piece]:
        """What appends, then what attends; ``dropped`` forgets what nothing reads any more."""
        if self._outside is None:
            return Piece(run=_then(self.append_inside, dropped), names=(NAME,)), Piece(run=self.attend_inside, names=(NAME,))
        return (Piece(run=_then(self.append, dropped), names=(NAME,)), Piece(run=self.attend, capturable=False, names=(NAME,)))


def _over_all(library: "Backend", q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", out: "torch.Tensor", *, scale: float,
              **more: Any) -> bool:
    """``Backend.attend_cached`` in the words of ``ops.live_attention``."""
    return library.attend_cached(q, k, v, out, scale=scale, scoring=Scoring(**more) if more else None)


def _then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        first()
        second()

    return run


def last_reads(graph: Graph, segments: Sequence[Segment], outside: Callable[[Segment], bool]) -> tuple[tuple[str, ...], ...]:
    """Per segment the values of framework segments that nothing reads behind it, so that their memory may be used again.

    Not among them: what a segment reads that runs outside of graphs, at every replay, and what the graph returns.
    """
    made = {o for s in segments if s.step is None for n in s.nodes for o in graph.node_by_name[n].outputs}
    last: dict[str, int] = {}
    held = set(graph.outputs)
    for index, segment in enumerate(segments):
        for name in segment.nodes:
            node = graph.node_by_name[name]
            last.update(dict.fromkeys((*node.inputs, *node.outputs), index))
        if outside(segment):
            held.update(value for node in outer(graph, segment) for value in _read_later(node))
        for _, values in segment.operands:
            held.update(values)
    found: list[list[str]] = [[] for _ in segments]
    for value, index in last.items():
        if value in made and value not in held:
            found[index].append(value)
    return tuple(map(tuple, found))


def _read_later(node: Node) -> tuple[str, ...]:
    """What of a node that is cut out is read, or written, from Python."""
    if node.op != ATTENTION:
        return (*node.inputs, *node.outputs)
    given = evolve(node, args=(), kwargs=tuple((k, v) for k, v in named(node.op, node.args, dict(node.kwargs)).items()
                                               if k not in APPENDED))
    return (*given.inputs, *node.outputs)
