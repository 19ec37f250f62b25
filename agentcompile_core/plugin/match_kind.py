"""What a match kind is: one value that a rule offers beside the matches it finds, and that everything else asks about them."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from ..ir.graph import Graph
from ..ir.region import Match, Operand, Role, Scalar
from ..ir.verdict import Case
from ..ir.words import word, words
from ..ops.work import flops_of, reduction_axis_of

if TYPE_CHECKING:  # heavy or above this layer
    import torch

    from ..ops.reference import Bounded

READS = (Role.INPUT, Role.WEIGHT, Role.CONSTANT)
WEIGHTS = (Role.WEIGHT, Role.CONSTANT)
STANDARD = {"state_bytes": int, "unread_bytes": int, "bytes_moved": int}  # attributes that a match of any kind may have
UNKNOWN_CAPACITY = 4096  # positions that are tried where neither an attribute nor a state says how many there are
TIMED_POSITIONS = 512  # as ``state_bytes`` of the project's attention counts them
EMULATED_POSITIONS, EMULATED_TIMED = 272, 40  # emulation is slow; 33 splits of tiles of 8 are no one round of merging
_EDGES = (0, 1, 31, 32, 33)


@frozen
class OperandKind:
    """An operand of a kind.

    Args:
        name: of the operand in a match; with ``repeated`` its stem: ``in`` stands for in0, in1, ...
        roles: those it may have.
        optional: whether a match may lack it (one that is repeated may always).
        index_of: of integers: the operand whose rows (first axis) they index; they are drawn inside it. Integers without
            it are drawn as zeros, those of role LENGTH as the position of the case.
        filled_along: of a state: the axis along which it holds data up to the position; behind it the trial puts NaN.
        grows: of a state: every run appends one element, so that repeated timing needs room behind it.
        moves: of a state: every run goes on from where the last one left it, so that it is put back before a result is looked at.
        mean, deviation: of a weight; None: 0, and 1/sqrt(fan-in) of a matrix, 0.1 of a vector.
        doc: shape and meaning.
    """

    name: str = field(converter=word)
    roles: tuple[Role, ...] = READS
    optional: bool = field(default=False, kw_only=True)
    repeated: bool = field(default=False, kw_only=True)
    index_of: str = field(default="", kw_only=True)
    filled_along: int | None = field(default=None, kw_only=True)
    grows: bool = field(default=False, kw_only=True)
    moves: bool = field(default=False, kw_only=True)
    mean: float = field(default=0.0, kw_only=True)
    deviation: float | None = field(default=None, kw_only=True)
    doc: str = field(default="", kw_only=True)


@frozen
class AttributeKind:
    """A scalar attribute of a kind; one without a ``default`` must be there, others are filled in where a rule left them out."""

    name: str = field(converter=word)
    type: type = int
    default: Scalar | None = None
    repeated: bool = field(default=False, kw_only=True)
    doc: str = field(default="", kw_only=True)


@frozen(kw_only=True, slots=False)
class MatchKind:
    """What the matches of one name are: operands, attributes, labels, work, inputs, reference.

    Name, meaning and operands are enough: FLOPs and the reduction axis come from the operators of the match, bytes from
    its operands, positions are tried where it reads a length, inputs are drawn by role and type, and the reference runs
    the match's graph in float64. A subclass overrides what differs. A whole kind, and the rule that offers it::

        FLIP_SCALE = MatchKind(
            name="flip_scale", doc="out = x backwards along its last axis, times one factor",
            operands=(OperandKind("x", (Role.INPUT,)), OperandKind("factor", WEIGHTS), OperandKind("out", (Role.OUTPUT,))),
            attributes=(AttributeKind("columns", int),),
        )

        class FlipScaleRule(RegionRule):
            name, kinds = "flip_scale", (FLIP_SCALE,)

            def find(self, graph, target):
                ...  # Match(kind="flip_scale", label="flip_scale", operands=..., attributes=(("columns", 64),), ...)

    ``labels`` are those that its matches may carry (none: the kind's own name); ``families`` names input families of its
    own, which ``make`` draws; ``version`` rises when the same match is tried, counted or judged in another way.
    """

    name: str = field(converter=word)
    doc: str
    operands: tuple[OperandKind, ...]
    attributes: tuple[AttributeKind, ...] = ()
    labels: tuple[str, ...] = field(default=(), converter=words)
    families: tuple[str, ...] = field(default=(), converter=words)
    version: int = 1

    @cached_property
    def all_labels(self) -> tuple[str, ...]:
        """The labels that a match of this kind may carry."""
        return self.labels or (self.name,)

    def operand(self, name: str) -> OperandKind | None:
        """What the kind says of the operand called ``name``; None if it has no such operand."""
        return _called(name, self.operands)

    def attribute(self, name: str) -> AttributeKind | None:
        """What the kind says of the attribute called ``name``; None if it has no such attribute."""
        own = _called(name, self.attributes)
        return AttributeKind(name, STANDARD[name], 0) if own is None and name in STANDARD else own

    def flops(self, match: Match, graph: Graph) -> int:
        """Floating point operations of a match in the graph of its region; by default, those of its operators."""
        return flops_of((graph.node_by_name[name] for name in match.nodes), graph)

    def bytes_moved(self, match: Match, graph: Graph) -> int:
        """The fewest bytes that must cross device memory.

        By default each operand once, but states as the attribute ``state_bytes`` says (0 without it), less
        ``unread_bytes``. What an override says is kept in the match as the attribute ``bytes_moved``.
        """
        return match.bytes_moved

    def reduction_axis(self, match: Match, graph: Graph) -> int:
        """The axis that is reduced, counted from the end (-1: the last); 0 for none."""
        return reduction_axis_of((graph.node_by_name[name] for name in match.nodes), graph)

    def capacity(self, match: Match) -> int:
        """How many positions there are: the attribute ``capacity``, else the first long axis of its states, else 4096."""
        given = match.attribute("capacity", 0)
        if isinstance(given, int) and given > 0:
            return given
        states = [operand.spec.shape for operand in match.operands if operand.role is Role.STATE]
        return min((next(e for e in shape if e > 1) for shape in states if max(shape, default=1) > 1), default=UNKNOWN_CAPACITY)

    def span(self, match: Match) -> int:
        """How many positions a schedule may deal out in rounds, which makes more positions worth a try; 0: a length is not read.

        By default the capacity, where the match reads a length and a state that is filled along an axis.
        """
        filled = any(said.filled_along is not None for said in map(self.operand, (o.name for o in match.operands)) if said is not None)
        return self.capacity(match) if filled and any(o.role is Role.LENGTH for o in match.operands) else 0

    def positions(self, match: Match, emulated: bool) -> tuple[int, ...]:
        """The positions to try, the one to time first; by default the edges of ``capacity`` where it reads a length, else 0."""
        if all(operand.role is not Role.LENGTH for operand in match.operands):
            return (0,)
        return position_edges(self.capacity(match), emulated)

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """Further input families that ``make`` draws, each tried once, at the last position: where all that a sum may add is there."""
        return ()

    def make(self, match: Match, operand: Operand, case: Case, generator: "torch.Generator", device: str) -> "torch.Tensor | None":
        """The values of one operand that is not an output, in its shape (any dtype that converts); None: the core draws them."""
        return None

    def weight_scale(self, match: Match, operand: Operand) -> tuple[float, float]:
        """Mean and deviation of a weight's values (of every input family but ``integers``)."""
        said = self.operand(operand.name)
        if said is not None and said.deviation is not None:
            return said.mean, said.deviation
        shape = operand.spec.shape
        return (said.mean if said else 0.0), (0.1 if len(shape) < 2 else shape[-1] ** -0.5)

    def part_read(self, match: Match, operand: Operand) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
        """First element, extents and strides (in elements) of what is read of an operand of which a part is read; None: all of it."""
        return None

    def reference(self, match: Match, graph: Graph, values: "Mapping[str, torch.Tensor]", depth: int) -> "dict[str, Bounded] | None":
        """Reference and error budget by value name, outputs and states; None: from the match's graph, operator by operator.

        ``values`` are the graph's tensors by value name in their own dtypes, not to be changed; ``depth`` is the kernel's
        declared reduction depth (0: the framework's). Needed only where the graph has an operator without an error rule.
        """
        return None


def position_edges(capacity: int, emulated: bool, more: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Positions below ``capacity`` where kernels go wrong: first the timed one, the ends, around a warp, and ``more``."""
    last = (min(capacity, EMULATED_POSITIONS) if emulated else capacity) - 1
    timed = max(0, min(capacity // 2, EMULATED_TIMED if emulated else TIMED_POSITIONS) - 1)
    return tuple(dict.fromkeys(p for p in (timed, *_EDGES, last // 2, last, *more) if 0 <= p <= last))


def plain_kind(name: str) -> MatchKind:
    """A kind that says nothing of its own: for trials that no rule proposed, such as the controls of a validator."""
    return MatchKind(name=name, doc="nothing is known of this kind", operands=())


def _called(name: str, offered: tuple[Any, ...]) -> Any:
    """The entry of that name; a repeated one stands for its name with a number behind it."""
    exact = next((entry for entry in offered if entry.name == name and not entry.repeated), None)
    stem = name.rstrip("0123456789")
    return exact or next((entry for entry in offered if entry.repeated and entry.name == stem != name), None)
