"""What a program says of its steps, against its graph: sources that exist, operands that are there and as large as kernels expect."""

from ..errors import ContractError, VerificationError
from ..ir.candidate import StepSource
from ..ir.graph import Graph
from ..ir.source_check import check_source
from ..ir.target import Target
from .program import Program, Segment

MAX_WORKSPACE_BYTES = 1 << 34


def check_program(program: Program, target: Target) -> Program:
    """Check every segment; return ``program``.

    Raises:
        VerificationError: a segment names nodes, sources, operands or values that do not exist or do not fit.
    """
    program.verify()
    sources = {source.key: source for source in program.sources}
    for segment in program.segments:
        unknown = [name for name in segment.nodes if name not in program.graph.node_by_name]
        if unknown:
            raise VerificationError(f"program {program.graph.name}: there is no node {unknown[0]!r}")
        if segment.step is not None:
            _check_step(program.graph, segment, sources, target)
        elif segment.source or segment.operands:
            raise VerificationError(f"program {program.graph.name}: a segment of framework nodes has a source or operands")
    return program


def _check_step(graph: Graph, segment: Segment, sources: dict[str, StepSource], target: Target) -> None:
    where, match = f"program {graph.name}: step {segment.name}", segment.match
    if match is None:
        raise VerificationError(f"{where} has no match")
    operands = {operand.name: operand for operand in match.operands}
    named = [name for name, _ in segment.operands]
    if len(operands) != len(match.operands) or sorted(named) != sorted(operands):
        raise VerificationError(f"{where} has the operands {named}; its match has {list(operands)}")
    for name, values in segment.operands:
        if not values or any(value not in graph.by_name for value in values):
            raise VerificationError(f"{where}: operand {name} is none of the graph's values")
        specs, wanted = [graph.spec(value) for value in values], operands[name].spec
        if any(spec.dtype is not wanted.dtype for spec in specs) or sum(spec.numel for spec in specs) != wanted.numel:
            raise VerificationError(f"{where}: operand {name} is not of the size and type that its match gives it")
    if segment.source:
        _check_source(where, segment, sources, target)


def _check_source(where: str, segment: Segment, sources: dict[str, StepSource], target: Target) -> None:
    source = sources.get(segment.source)
    if source is None:
        raise VerificationError(f"{where} launches {segment.source!r}, which the program does not hold")
    if any(workspace.nbytes > MAX_WORKSPACE_BYTES for workspace in source.workspaces):
        raise VerificationError(f"{where} asks for a workspace of more than {MAX_WORKSPACE_BYTES} bytes")
    assert segment.match is not None
    try:
        check_source(segment.match, source, target)
    except ContractError as exc:
        raise VerificationError(f"{where}: {exc}") from None
