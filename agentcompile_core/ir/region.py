"""Regions of a graph, the matches inside them, and the facts about them that an advisor may see."""

import enum
from functools import cached_property

from attrs import field, frozen

from .expression import Expression
from .graph import Graph, TensorSpec
from .words import word

Scalar = bool | int | float | str


class SemanticLabel(enum.StrEnum):
    """The core's words for what a match computes. Any other lower_snake_case word is a label too: a kind brings its own."""

    GEMV = "gemv"
    GEMM = "gemm"
    QKV_PROJECTION = "qkv_projection"
    GATED_MLP = "gated_mlp"
    NORM = "norm"
    NORM_GEMV = "norm_gemv"
    RESIDUAL_NORM = "residual_norm"
    ROPE = "rope"
    ROPE_TABLE = "rope_table"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    REDUCTION_POINTWISE = "reduction_pointwise"
    SOFTMAX = "softmax"
    GATHER = "gather"
    ARGMAX = "argmax"
    MIXED = "mixed"


class Role(enum.Enum):
    """What an operand of a step is, seen from the chain: what may be read before the dependency wait, what must be poisoned."""

    WEIGHT = "weight"
    CONSTANT = "constant"
    INPUT = "input"
    STATE = "state"
    OUTPUT = "output"
    WORKSPACE = "workspace"
    LENGTH = "length"  # the device position or length; written in the chain, so read after the wait


class Access(enum.Enum):
    """How a kernel touches an operand."""

    READ = "read"
    WRITE = "write"
    READ_WRITE = "read_write"


PROMISED_BYTES = 16  # that addresses are multiples of, ragged operands aside


@frozen(kw_only=True)
class Operand:
    """One named operand of a match.

    ``name`` is the operand's name in its match kind (``x``, ``weight``, ``out``; see MatchKind). ``values`` are
    region-local value names; more than one means that they lie behind each other in memory, in this order: weights
    that the WeightStore concatenates along rows, or outputs that the buffer planner places side by side. ``spec`` is
    that of the concatenation.
    """

    name: str
    role: Role  # whose memory it is
    access: Access  # what a kernel does with it
    values: tuple[str, ...]
    spec: TensorSpec

    @property
    def is_ragged(self) -> bool:
        """Whether its address is promised no better than its elements need: activations lie side by side, and a size that is no
        multiple of 16 bytes puts the next one beside them. Every other address is a multiple of 16."""
        return self.role in (Role.INPUT, Role.OUTPUT) and self.spec.nbytes % PROMISED_BYTES != 0


@frozen(kw_only=True)
class Match:
    """A convex set of nodes that an implementation may replace; matches overlap and nest.

    ``kind`` is the word families dispatch on: the name of a MatchKind that a rule offers. ``label`` is one of the words
    that the kind allows. ``attributes`` are the scalars of the kind; ``epilogue`` its pointwise tail.
    """

    kind: str
    label: str = field(converter=word)
    nodes: tuple[str, ...]  # names, in graph order
    operands: tuple[Operand, ...]
    attributes: tuple[tuple[str, Scalar], ...] = ()  # names and values, as the kind declares them
    epilogue: Expression | None = None  # pointwise operators behind the main one; None: none
    rule: str = ""  # qualified name of the rule that found it; the core fills it in

    @property
    def id(self) -> str:
        """Readable and unique inside its region: kind and first and last node and count."""
        return f"{self.kind}:{self.nodes[0]}+{len(self.nodes)}:{self.nodes[-1]}"

    @cached_property
    def _attributes(self) -> dict[str, Scalar]:
        return dict(self.attributes)

    @cached_property
    def _operands(self) -> dict[str, Operand]:
        return {operand.name: operand for operand in self.operands}

    def attribute(self, name: str, default: Scalar | None = None) -> Scalar:
        """The attribute called ``name``; ``default`` where it is absent.

        Raises:
            KeyError: it is absent and there is no default.
        """
        if default is None:
            return self._attributes[name]
        return self._attributes.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """``attribute`` as an int."""
        return int(self.attribute(name, default))

    def number(self, name: str, default: float | None = None) -> float:
        """``attribute`` as a float."""
        return float(self.attribute(name, default))

    def text(self, name: str, default: str | None = None) -> str:
        """``attribute`` as text."""
        return str(self.attribute(name, default))

    def flag(self, name: str) -> bool:
        """``attribute`` as a bool; absent means False."""
        return bool(self._attributes.get(name, False))

    def operand(self, name: str) -> Operand | None:
        """The operand called ``name``, or None."""
        return self._operands.get(name)

    def need(self, name: str) -> Operand:
        """The operand called ``name``.

        Raises:
            KeyError: the match has none.
        """
        return self._operands[name]

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that must cross device memory, as the kind said (attribute ``bytes_moved``) when the match was found.

        Without that: each operand once, states by ``state_bytes``, less ``unread_bytes``.
        """
        if "bytes_moved" in self._attributes:
            return int(self._attributes["bytes_moved"])
        total = 0
        for operand in self.operands:
            if operand.role is not Role.STATE:
                total += operand.spec.nbytes
        return total + int(self._attributes.get("state_bytes", 0)) - int(self._attributes.get("unread_bytes", 0))


@frozen(kw_only=True)
class Instance:
    """One occurrence of a region in its graph: the region-local names of nodes and values, mapped to the graph's."""

    nodes: tuple[tuple[str, str], ...]
    values: tuple[tuple[str, str], ...]

    @cached_property
    def node(self) -> dict[str, str]:
        """Region-local to graph node names."""
        return dict(self.nodes)

    @cached_property
    def value(self) -> dict[str, str]:
        """Region-local to graph value names."""
        return dict(self.values)


@frozen(kw_only=True)
class Region:
    """The largest convex part between hard boundaries, at most one instance of a repeated layer.

    ``graph`` is the region as a graph of its own with the names of its first instance; equal regions are merged by
    ``signature``, and ``instances`` lists them in graph order, the first one included.
    """

    name: str
    signature: str
    graph: Graph
    instances: tuple[Instance, ...]
    matches: tuple[Match, ...] = ()
    label: str = field(default=SemanticLabel.MIXED, converter=word)

    @cached_property
    def match_by_id(self) -> dict[str, Match]:
        """Matches by id."""
        return {match.id: match for match in self.matches}


@frozen(kw_only=True)
class MatchSummary:
    """The facts about one match that leave the process: no names of files, models or modules."""

    id: str
    label: str = field(converter=word)
    kind: str
    operators: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of operands, in elements
    dtype: str
    reduction_axis: int  # counted from the end; 0: none
    flops: int
    bytes: int  # the fewest that must cross device memory

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / max(1, self.bytes)


@frozen(kw_only=True)
class RegionSummary:
    """Structured facts about a region: what an advisor sees of it.

    ``labels`` are those of the kinds of its matches that the core has no word for: an advisor may use them beside the
    core's own.
    """

    signature: str
    label: str = field(converter=word)
    operators: tuple[tuple[str, int], ...] = field()  # kinds and how often they occur
    instances: int  # how often the region occurs in the model
    matches: tuple[MatchSummary, ...]
    dominant: str = field(converter=word)  # label of the match that moves most bytes
    dynamic_shapes: bool = False
    labels: tuple[str, ...] = ()


@frozen(kw_only=True)
class Analysis:
    """What analyze found in one graph: merged regions in graph order (by their first instance), and a summary of each."""

    graph: str
    regions: tuple[Region, ...]
    summaries: tuple[RegionSummary, ...]

    @property
    def instances(self) -> int:
        """Regions before merging equal ones."""
        return sum(len(region.instances) for region in self.regions)
