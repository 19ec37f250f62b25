"""Programs: an immutable executable schedule over planned buffers, made from a graph and its selections, and its bound form."""

from typing import TYPE_CHECKING

from attrs import field, frozen

from ..errors import VerificationError
from ..ir.candidate import StepSource
from ..ir.graph import Graph
from ..ir.plan import Origin, Step
from ..ir.region import Match, Role, SemanticLabel
from ..ir.words import word
from ..ops.aliasing import is_alias

if TYPE_CHECKING:
    pass


@frozen(kw_only=True)
class Segment:
    """A run of framework nodes, or one step. ``operands`` maps operand names to graph values (several: side by side)."""

    nodes: tuple[str, ...]
    step: Step | None = None
    label: str = field(default=SemanticLabel.MIXED, converter=word)
    match: Match | None = None
    source: str = ""  # key of the StepSource; empty for framework nodes and bound callables
    operands: tuple[tuple[str, tuple[str, ...]], ...] = ()
    version: int = 0  # of the implementation that the step was validated with

    @property
    def origin(self) -> Origin:
        """Who wrote what runs here."""
        return self.step.origin if self.step else Origin.FRAMEWORK

    @property
    def is_call(self) -> bool:
        """Whether an implementation binds what runs here."""
        return self.step is not None and not self.source

    @property
    def name(self) -> str:
        """For people: the implementation, or the framework's nodes."""
        return self.step.implementation if self.step else ", ".join(self.nodes[:3]) + (", ..." if len(self.nodes) > 3 else "")

    def values(self, roles: tuple[Role, ...]) -> tuple[str, ...]:
        """Graph values of the operands with one of ``roles``."""
        if self.match is None:
            return ()
        wanted = {operand.name for operand in self.match.operands if operand.role in roles}
        return tuple(value for name, values in self.operands if name in wanted for value in values)


@frozen(kw_only=True)
class Program:
    """Segments in execution order over one graph, and the sources they launch. ``start``: the first position that it serves."""

    graph: Graph
    segments: tuple[Segment, ...]
    sources: tuple[StepSource, ...] = ()
    start: int = 0

    @property
    def name(self) -> str:
        """That of its graph, with where it begins if another program of that graph serves the positions before."""
        return f"{self.graph.name}_from_{self.start}" if self.start else self.graph.name

    def verify(self) -> "Program":
        """Check that every node runs exactly once (views may be folded into addresses); return self."""
        seen: set[str] = set()
        for segment in self.segments:
            for node in segment.nodes:
                if node in seen:
                    raise VerificationError(f"program {self.graph.name}: node {node} runs twice")
                seen.add(node)
        missing = [n.name for n in self.graph.nodes if n.name not in seen and not is_alias(self.graph, n)]
        if missing:
            raise VerificationError(f"program {self.graph.name}: nodes never run: {', '.join(missing[:5])}")
        return self


def framework_program(graph: Graph) -> Program:
    """The program that interprets every node."""
    return Program(graph=graph, segments=(Segment(nodes=tuple(n.name for n in graph.nodes)),))
