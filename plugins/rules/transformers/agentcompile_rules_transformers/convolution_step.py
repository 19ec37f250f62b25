"""One token of a short causal convolution whose last columns are written in place."""

from collections.abc import Iterable, Iterator

from agentcompile_core.plugin_api import (
    CONVOLUTION_STEP,
    KERNEL_TYPES,
    Graph,
    Match,
    Node,
    Ref,
    RegionRule,
    RegionView,
    Target,
    argument,
    is_contiguous,
    operator_names,
    ref,
)

from . import recurrence_kinds
from .peeling import Peel
from .state_write import state_write


class ConvolutionStepRule(RegionRule):
    """``convolution_step`` matches: convolutions of one column whose last columns go over the first."""

    name = "convolution_step"
    version = 1
    kinds = (recurrence_kinds.CONVOLUTION_STEPS,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Each with the views around it."""
        view = RegionView(graph=graph)
        return [match for node in graph.nodes if node.op == operator_names.CONVOLUTION for match in _matches(view, node)]


def _matches(view: RegionView, node: Node) -> Iterator[Match]:
    write, bias = state_write(view, node), ref(argument(node, "bias"))
    made = view.graph.spec(node.outputs[0]).shape
    if write is None or made[2] != 1 or argument(node, "valid") is not None:
        return
    inside = frozenset({node.name, *write.nodes})
    x, weight = (Peel(view, str(ref(argument(node, name))), inside).viewed() for name in ("x", "weight"))
    channels, width = made[1], view.graph.spec(weight.value).numel // made[1]
    operands = [("x", x.value), ("weight", weight.value), *([("bias", bias)] if bias is not None else [])]
    if any(view.graph.spec(value).dtype not in KERNEL_TYPES or not is_contiguous(view.graph.spec(value)) for _, value in operands):
        return
    if not all(view.is_weight(Ref(value)) for name, value in operands if name != "x"):
        return
    out, behind = view.forward(node.outputs[0])
    state = view.state("state", write.state)
    yield Match(
        kind=CONVOLUTION_STEP, label=CONVOLUTION_STEP,
        nodes=view.deps.members(view.deps.mask((node.name, *write.nodes, *x.nodes, *weight.nodes, *behind))),
        operands=(state, *(view.read(name, value) for name, value in operands), view.write("out", out)),
        attributes=(("channels", channels), ("width", width), ("silu", argument(node, "silu") is True),
                    ("state_bytes", 2 * state.spec.nbytes)))
