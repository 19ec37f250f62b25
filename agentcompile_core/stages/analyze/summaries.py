"""The facts about a region and its matches that an advisor may see: numbers and operator names, nothing that identifies a model."""

from collections import Counter
from collections.abc import Sequence

from ...ir import match_kinds as kinds
from ...ir.graph import Graph
from ...ir.region import Match, MatchSummary, Region, RegionSummary, Role, SemanticLabel
from ...ops.aliasing import is_alias


def summarize(region: Region) -> RegionSummary:
    """The summary of a merged region."""
    graph = region.graph
    operators = Counter(node.kind for node in graph.nodes if not is_alias(graph, node))
    matches = tuple(summarize_match(match, graph) for match in region.matches)
    return RegionSummary(
        signature=region.signature, label=region.label, operators=tuple(sorted(operators.items())), instances=len(region.instances),
        matches=matches, dominant=dominant(region.matches), dynamic_shapes=any(m.operand("position") for m in region.matches),
    )


def summarize_match(match: Match, graph: Graph) -> MatchSummary:
    """The summary of one match; shapes are its operands' in order, ``reduction_axis`` counts from the end, 0 for none."""
    nodes = [graph.node_by_name[name] for name in match.nodes]
    floats = [operand.spec.dtype for operand in match.operands if operand.spec.dtype.is_float]
    return MatchSummary(
        id=match.id, label=match.label, kind=match.kind, operators=tuple(n.kind for n in nodes if not is_alias(graph, n)),
        shapes=tuple(operand.spec.shape for operand in match.operands), dtype=floats[0].value if floats else "int64",
        reduction_axis=-1 if match.kind in (kinds.LINEAR, kinds.NORM, kinds.ATTENTION, kinds.ARGMAX) else 0,
        flops=flops(match), bytes=match.bytes_moved,
    )


def flops(match: Match) -> int:
    """Floating point operations of a match, counting a multiply-add as two and a pointwise operation as one."""
    tail = len(match.epilogue.operations) if match.epilogue else 0
    if match.kind == kinds.LINEAR:
        n, k, pair = match.integer("n"), match.integer("k"), match.integer("pair", 1)
        return 2 * n * k * pair + n * tail + (4 * k if match.text("norm", "none") != "none" else 0)
    if match.kind == kinds.ATTENTION:
        row_bytes = 2 * match.integer("kv_heads") * match.integer("head_dim") * match.need("q").spec.dtype.bytes
        positions = match.integer("state_bytes") // row_bytes
        return 4 * match.integer("heads") * match.integer("head_dim") * positions
    written = sum(operand.spec.numel for operand in match.operands if operand.role is Role.OUTPUT)
    per_element = {kinds.NORM: 4, kinds.ROPE: 3, kinds.ROPE_TABLE: 2, kinds.GATHER: 0, kinds.ELEMENTWISE: max(1, tail)}
    if match.kind == kinds.ARGMAX:
        return match.integer("n")
    return written * per_element.get(match.kind, 1)


def dominant(matches: Sequence[Match]) -> SemanticLabel:
    """The label of the match that moves the most bytes; of equal ones, of the one with the fewest nodes."""
    if not matches:
        return SemanticLabel.MIXED
    best = max(matches, key=lambda match: (match.bytes_moved, -len(match.nodes), match.id))
    return best.label


def region_label(matches: Sequence[Match], graph: Graph) -> SemanticLabel:
    """The label of the match that covers the whole region, views aside; MIXED where none does."""
    work = {node.name for node in graph.nodes if not is_alias(graph, node)}
    whole = [match for match in matches if work <= set(match.nodes)]
    return whole[0].label if whole else SemanticLabel.MIXED
