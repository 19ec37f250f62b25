"""Cases of running sums and products."""

from collections.abc import Sequence

from agentcompile_core.plugin_api import DType, Graph, Match
from agentcompile_core.testing.matching import matched

from .draft import Draft
from .scan import ScanRule

BINARY = ("add", "sub", "mul", "div")


def scan_case(*, shape: Sequence[int], axis: int = -1, product: bool = False, reverse: bool = False, before: Sequence[str] = (),
              dtype: DType = DType.F16) -> tuple[Match, Graph]:
    """A cumulative sum of ``shape`` along ``axis``, or a ``product``; ``reverse``: from the end of the axis, between two flips.

    ``before``: pointwise operators on the operand; add, sub, mul and div take another full input each.
    """
    draft, whole = Draft(), tuple(shape)
    x = draft.given("x", whole, dtype)
    for i, name in enumerate(before):
        other = (draft.given(f"other{i}", whole, dtype),) if name in BINARY else ()
        x = draft.one(f"aten.{name}.{'Tensor' if other else 'default'}", (x, *other), whole, dtype)
    turn = (axis,)
    if reverse:
        x = draft.one("aten.flip.default", (x, turn), whole, dtype)
    x = draft.one(f"aten.{'cumprod' if product else 'cumsum'}.default", (x, axis), whole, dtype)
    if reverse:
        x = draft.one("aten.flip.default", (x, turn), whole, dtype)
    return matched(ScanRule(), draft.graph(x))
