"""A region rule from outside, with a match kind of its own: a cumulative sum along the last axis, times one factor per column."""

from collections.abc import Iterable, Mapping

import torch

from agentcompile_core.plugin_api import (
    WEIGHTS,
    AttributeKind,
    Bounded,
    Case,
    Graph,
    Match,
    MatchKind,
    Operand,
    OperandKind,
    RegionRule,
    RegionView,
    Role,
    Target,
    hookimpl,
)

DRIFT = "drift"  # an input family: all of one sign, so that the sums grow and nothing cancels


class CumulativeScale(MatchKind):
    """What is special about this kind; the rest (FLOPs, bytes, positions, other inputs) follows from operators and operands."""

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> torch.Tensor | None:
        """The inputs of the family ``drift``."""
        if case.family != DRIFT or operand.role is not Role.INPUT:
            return None
        return torch.rand(operand.spec.shape, generator=generator, device=device)

    def reference(self, match: Match, graph: Graph, values: Mapping[str, torch.Tensor], depth: int) -> dict[str, Bounded]:
        """Instead of the core's rules: in float64, with 2 sqrt(n) roundoffs of float32 and one of each value stored."""
        x, factor = (values[match.need(name).values[0]].double() for name in ("x", "factor"))
        columns = match.integer("columns")
        stored = torch.finfo(values[match.need("x").values[0]].dtype).eps
        error = 2.0 * columns**0.5 * 2.0**-24 * x.abs().cumsum(-1) + stored * x.cumsum(-1).abs()
        value = x.cumsum(-1) * factor
        return {match.need("out").values[0]: Bounded(value, error * factor.abs() + stored * value.abs())}


CUMULATIVE_SCALE = CumulativeScale(
    name="cumulative_scale", doc="out = cumsum(x, last axis) * factor",
    operands=(OperandKind("x", (Role.INPUT,), doc="[.., columns]"), OperandKind("factor", WEIGHTS, doc="[columns]"),
              OperandKind("out", (Role.OUTPUT,), doc="[.., columns]")),
    attributes=(AttributeKind("columns", int),), families=(DRIFT,),
)


class CumulativeRule(RegionRule):
    """``cumulative_scale`` matches: a cumsum along the last axis that only a multiplication by a weight reads."""

    name = "cumulative_scale"
    kinds = (CUMULATIVE_SCALE,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """One match per such pair of operators."""
        view = RegionView(graph=graph)
        for total in (node for node in graph.nodes if node.kind == "cumsum"):
            (x, out), columns = (total.inputs[0], total.outputs[0]), graph.spec(total.inputs[0]).shape[-1]
            axis, rank = total.args[1], len(graph.spec(x).shape)
            for scale in view.users(out) if axis in (-1, rank - 1) else ():
                factors = [a for a in scale.args if view.is_weight(a, columns)]
                if scale.kind == "mul" and len(factors) == 1 and view.only_used_by(out, {scale.name}):
                    operands = (view.read("x", x), view.read("factor", factors[0].value), view.write("out", scale.outputs[0]))
                    yield Match(kind="cumulative_scale", label="cumulative_scale", nodes=(total.name, scale.name),
                                operands=operands, attributes=(("columns", columns),))


@hookimpl
def agentcompile_region_rules() -> list[RegionRule]:
    """What this distribution offers."""
    return [CumulativeRule()]
