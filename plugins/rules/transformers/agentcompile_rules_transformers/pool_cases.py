"""Cases of pools."""

from collections.abc import Sequence

from agentcompile_core.plugin_api import Argument, DType, Graph, Match
from agentcompile_core.testing.matching import matched

from .draft import Draft
from .pool import PoolRule


def pool_case(*, shape: Sequence[int], windows: Sequence[Sequence[int]], op: str = "mean", before: Sequence[str] = (),
              dtype: DType = DType.F16) -> tuple[Match, Graph]:
    """What is ``largest`` in windows of the last axes of ``shape``, their ``mean``, or that of what lies ``inside`` of them.

    ``windows``: for each axis how many elements, the step, the padding and how far the elements are apart; what is left out is the number
    of elements, 0 and 1. ``before``: pointwise operators of one operand.
    """
    draft, whole, axes = Draft(), tuple(shape), len(windows)
    sizes = [(*one, *(one[0], 0, 1)[len(one) - 1:]) for one in map(tuple, windows)]
    x = draft.given("x", whole, dtype)
    for name in before:
        x = draft.one(f"aten.{name}.default", (x,), whole, dtype)
    made = tuple((extent + 2 * p - d * (w - 1) - 1) // s + 1 for extent, (w, s, p, d) in zip(whole[len(whole) - axes:], sizes, strict=True))
    window, step, pad, apart = (tuple(one) for one in zip(*sizes, strict=True))
    rest: tuple[Argument, ...] = (apart,) if op == "largest" else (False, op == "mean")
    name = f"aten.{'max' if op == 'largest' else 'avg'}_pool{axes}d.default"
    out = draft.one(name, (x, window, step, pad, *rest), (*whole[: len(whole) - axes], *made), dtype)
    return matched(PoolRule(), draft.graph(out))
