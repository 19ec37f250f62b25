"""Cases of pools."""

from collections.abc import Sequence

from agentcompile_core.plugin_api import Argument, DType, Graph, Match
from agentcompile_core.testing.matching import matched

from .draft import Draft
from .pool import PoolRule


def pool_case(*, shape: Sequence[int], window: Sequence[int], step: Sequence[int] = (), pad: Sequence[int] = (), apart: Sequence[int] = (),
              largest: bool = False, inside: bool = False, before: Sequence[str] = (), dtype: DType = DType.F16) -> tuple[Match, Graph]:
    """The mean, or the ``largest`` element, of windows of the last axes of ``shape``, as many as ``window`` names.

    ``inside``: only elements inside count in a mean. ``apart``: of the elements of a window of which the largest is taken. ``before``:
    pointwise operators of one operand.
    """
    draft, whole, axes = Draft(), tuple(shape), len(window)
    step, pad, apart = tuple(step) or tuple(window), tuple(pad) or (0,) * axes, tuple(apart) or (1,) * axes
    x = draft.given("x", whole, dtype)
    for name in before:
        x = draft.one(f"aten.{name}.default", (x,), whole, dtype)
    made = tuple((extent + 2 * p - d * (w - 1) - 1) // s + 1
                 for extent, w, s, p, d in zip(whole[len(whole) - axes:], window, step, pad, apart, strict=True))
    rest: tuple[Argument, ...] = (apart,) if largest else (False, not inside)
    op = f"aten.{'max' if largest else 'avg'}_pool{axes}d.default"
    out = draft.one(op, (x, tuple(window), step, pad, *rest), (*whole[: len(whole) - axes], *made), dtype)
    return matched(PoolRule(), draft.graph(out))
