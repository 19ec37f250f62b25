"""The facts about a region and its matches that an advisor may see: numbers and operator names, nothing that identifies a model."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ...ir.graph import Graph
from ...ir.region import Match, MatchSummary, Region, RegionSummary, Role, SemanticLabel
from ...ops.aliasing import is_alias
from ...plugin.match_kind import MatchKind

_KNOWN = frozenset(SemanticLabel)


def summarize(region: Region, kinds: Mapping[str, MatchKind]) -> RegionSummary:
    """The summary of a merged region; ``kinds`` holds the kind of each of its matches by name."""
    graph = region.graph
    operators = Counter(node.kind for node in graph.nodes if not is_alias(graph, node))
    matches = tuple(summarize_match(match, graph, kinds[match.kind]) for match in region.matches)
    brought = {label for match in region.matches for label in kinds[match.kind].all_labels if label not in _KNOWN}
    return RegionSummary(
        signature=region.signature, label=region.label, operators=tuple(sorted(operators.items())), instances=len(region.instances),
        matches=matches, dominant=dominant(region.matches), labels=tuple(sorted(brought)),
        dynamic_shapes=any(operand.role is Role.LENGTH for match in region.matches for operand in match.operands),
    )


def summarize_match(match: Match, graph: Graph, kind: MatchKind) -> MatchSummary:
    """The summary of one match; shapes are its operands' in order, ``reduction_axis`` counts from the end, 0 for none."""
    nodes = [graph.node_by_name[name] for name in match.nodes]
    floats = [operand.spec.dtype for operand in match.operands if operand.spec.dtype.is_float]
    return MatchSummary(
        id=match.id, label=match.label, kind=match.kind, operators=tuple(n.kind for n in nodes if not is_alias(graph, n)),
        shapes=tuple(operand.spec.shape for operand in match.operands), dtype=floats[0].value if floats else "int64",
        reduction_axis=kind.reduction_axis(match, graph), flops=kind.flops(match, graph), bytes=match.bytes_moved,
    )


def dominant(matches: Sequence[Match]) -> str:
    """The label of the match that moves the most bytes; of equal ones, of the one with the fewest nodes."""
    if not matches:
        return SemanticLabel.MIXED
    best = max(matches, key=lambda match: (match.bytes_moved, -len(match.nodes), match.id))
    return best.label


def region_label(matches: Sequence[Match], graph: Graph) -> str:
    """The label of the match that covers the whole region, views aside; MIXED where none does."""
    work = {node.name for node in graph.nodes if not is_alias(graph, node)}
    whole = [match for match in matches if work <= set(match.nodes)]
    return whole[0].label if whole else SemanticLabel.MIXED
