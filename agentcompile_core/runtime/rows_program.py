"""The program of several rows: attention by the steps that decode selected for it, once per row; the rest by the framework's operators."""

from attrs import evolve

from ..ir.graph import Graph
from ..ops.operator_names import ATTENTION
from ..ops.rows import RowsGraph, rows_graph
from .make_program import with_steps
from .program import Program, Segment, framework_program


def rows_program(decode: Program, rows: int) -> Program:
    """Of ``rows`` tokens of as many sequences, from the program of one; its graph is that of ``ops.rows``.

    Raises:
        NoRows: there is no such graph.
    """
    attending = [segment for segment in decode.segments if _attends(decode.graph, segment)]
    found = rows_graph(decode.graph, rows, {name for segment in attending for name in segment.nodes})
    steps = [_of_row(segment, found, row) for segment in attending for row in range(rows)]
    used = {segment.source for segment in attending}
    program = evolve(framework_program(found.graph), sources=tuple(s for s in decode.sources if s.key in used))
    return with_steps(program, steps)


def _attends(graph: Graph, segment: Segment) -> bool:
    """Whether it is a generated step with attention in it. What implementations bind has states of its own to answer for."""
    return bool(segment.source) and any(graph.node_by_name[name].op == ATTENTION for name in segment.nodes)


def _of_row(segment: Segment, found: RowsGraph, row: int) -> Segment:
    names = found.names[row]
    operands = tuple((name, tuple(names.get(value, value) for value in values)) for name, values in segment.operands)
    return evolve(segment, nodes=tuple(names[name] for name in segment.nodes), operands=operands)
