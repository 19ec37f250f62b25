"""The kind of pools: what is largest, or the mean, of every window of the last one to three axes."""

import math

from agentcompile_core.plugin_api import POOL, READS, AttributeKind, Graph, Match, MatchKind, OperandKind, Role

AXES = 3


class Pool(MatchKind):
    """Pools do an addition or a comparison for every element of every window."""

    def flops(self, match: Match, graph: Graph) -> int:
        """One operation per element of a window, and what is computed before it."""
        window = math.prod(match.integer(f"window{axis}") for axis in range(AXES))
        before = len(match.epilogue.operations) if match.epilogue is not None else 0
        return match.need("out").spec.numel * window + before * match.need("in0").spec.numel


POOLS = Pool(
    name=POOL,
    doc="out[o, i] = largest, or mean, of epilogue(in0, in1, ...) at [o, i * step - pad + j * apart] over the j of the window, for each of"
        " three axes; what lies outside counts as nothing, in a mean as zero. Element e reads element e modulo its size of every input",
    operands=(OperandKind("in", READS, repeated=True, doc="[outer, extent0, extent1, extent2]; what is computed with them"),
              OperandKind("out", (Role.OUTPUT,), doc="[outer, made0, made1, made2]")),
    attributes=(AttributeKind("outer"), AttributeKind("op", str, doc="max or mean"),
                *(AttributeKind(name, int, repeated=True, doc=doc) for name, doc in (
                    ("extent", "elements along an axis"), ("made", "results along it"), ("window", "elements that one looks at"),
                    ("step", "from one to the next"), ("pad", "before the first element"), ("apart", "between those of a window"))),
                AttributeKind("divisor", int, 0, doc="of a mean; 0: how many elements of the window lie inside")),
)
