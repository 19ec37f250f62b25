"""Cross entropies of rows of scores and the class of each: the kind and its rule."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from agentcompile_core.plugin_api import (
    CROSS_ENTROPY,
    KERNEL_TYPES,
    READS,
    AttributeKind,
    Case,
    DType,
    Graph,
    Match,
    MatchKind,
    Node,
    Operand,
    OperandKind,
    Prologue,
    RegionRule,
    RegionView,
    Role,
    Scalar,
    Target,
    argument,
    has_one_rounding,
    is_contiguous,
    prologues,
    ref,
)

LOSS = "aten.cross_entropy_loss.default"
REDUCTIONS = ("none", "mean", "sum")  # as torch numbers them
MOST_INPUTS = 3
LEFT_OUT = 7  # of so many rows one is ignored
BESIDE_CLASS = "infinite_beside_class"  # every second row has an infinite score, which is not that of its class


class CrossEntropy(MatchKind):
    """Classes are drawn among those that there are, and some are the one that is left out."""

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """A single infinity that is drawn anywhere may be the score of its row's class, or stand in a row that is left out."""
        return (BESIDE_CLASS,) if match.integer("columns") > 1 else ()

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """The classes, and scores of the one family; others are drawn as everywhere."""
        rows, columns = match.integer("rows"), match.integer("columns")
        beside = case.family == BESIDE_CLASS
        if operand.name != "classes":
            if not beside or operand.spec.numel != rows * columns or not operand.spec.dtype.is_float:
                return None
            scores = torch.randn(rows, columns, generator=generator, device=device)
            number = torch.arange(0, rows, 2, device=device)
            scores[number, (number + 1) % columns] = torch.inf
            return scores.reshape(operand.spec.shape)
        drawn = torch.randint(0, columns, (rows,), generator=generator, device=device)
        drawn = torch.arange(rows, device=device) % columns if beside else drawn
        left_out = torch.arange(rows, device=device) % LEFT_OUT == LEFT_OUT - 1
        return torch.where(left_out, match.integer("ignored"), drawn).reshape(operand.spec.shape)


CROSS_ENTROPIES = CrossEntropy(
    name=CROSS_ENTROPY,
    doc="log sum exp(row) - row[class] of each row of epilogue(in0, in1, ...) whose class is not the ignored one: 0 there, their mean or"
        " their sum; element i reads element i modulo its size of every input",
    operands=(OperandKind("in", READS, repeated=True, doc="scores [rows, columns]; what is computed with them"),
              OperandKind("classes", READS, doc="i64 [rows]"), OperandKind("out", (Role.OUTPUT,), doc="[rows], or one element")),
    attributes=(AttributeKind("rows"), AttributeKind("columns"), AttributeKind("op", str, doc="none, mean or sum"),
                AttributeKind("ignored", int, -100)),
)


class CrossEntropyRule(RegionRule):
    """``cross_entropy`` matches: cross entropies of contiguous rows by class, without weights or smoothing."""

    name = "cross_entropy"
    version = 1
    kinds = (CROSS_ENTROPIES,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Each alone, then with growing prologues."""
        view = RegionView(graph=graph)
        return [match for node in graph.nodes if node.op == LOSS for match in _matches(view, node)]


def _matches(view: RegionView, node: Node) -> Iterator[Match]:
    x, classes, reduction = ref(argument(node, "self")), ref(argument(node, "target")), argument(node, "reduction")
    if x is None or classes is None or reduction not in (0, 1, 2) or not _is_plain(view, node, x, classes):
        return
    shape, out = view.graph.spec(x).shape, node.outputs[0]
    ignored = argument(node, "ignore_index")
    assert isinstance(ignored, int)
    attributes: tuple[tuple[str, Scalar], ...] = (
        ("rows", view.graph.spec(classes).numel), ("columns", shape[-1]), ("op", REDUCTIONS[reduction]), ("ignored", ignored))
    for prologue in prologues(view, x, frozenset({node.name}), limit=MOST_INPUTS):
        nodes = (*prologue.nodes, node.name)
        if has_one_rounding(view, nodes, out):
            yield _match(view, prologue, nodes, (classes, out), attributes)


def _match(view: RegionView, prologue: Prologue, nodes: tuple[str, ...], ends: tuple[str, str],
           attributes: tuple[tuple[str, Scalar], ...]) -> Match:
    reads = tuple(view.read(f"in{j}", value) for j, value in enumerate(prologue.inputs))
    return Match(kind=CROSS_ENTROPY, label=CROSS_ENTROPY, nodes=view.deps.members(view.deps.mask(nodes)),
                 operands=(*reads, view.read("classes", ends[0]), view.write("out", ends[1])), attributes=attributes,
                 epilogue=prologue.expression)


def _is_plain(view: RegionView, node: Node, x: str, classes: str) -> bool:
    """Rows of floats and a class for each, nothing else."""
    scores, chosen, made = (view.graph.spec(name) for name in (x, classes, node.outputs[0]))
    rows = len(scores.shape) in (1, 2) and chosen.dtype is DType.I64 and chosen.shape == scores.shape[:-1]
    plain = argument(node, "weight") is None and argument(node, "label_smoothing") == 0.0
    floats = scores.dtype in KERNEL_TYPES and made.dtype is scores.dtype
    return rows and plain and floats and bool(scores.numel) and is_contiguous(scores) and is_contiguous(chosen)
