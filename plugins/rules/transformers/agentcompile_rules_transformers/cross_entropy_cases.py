"""Cases of cross entropies."""

from agentcompile_core.plugin_api import DType, Graph, Match
from agentcompile_core.testing.matching import matched

from .cross_entropy import LOSS, REDUCTIONS, CrossEntropyRule
from .draft import Draft


def cross_entropy_case(*, rows: int, columns: int, reduction: str = "mean", before: str = "",
                       dtype: DType = DType.F16) -> tuple[Match, Graph]:
    """The cross entropy of [rows, columns] scores; ``before``: a pointwise operator on them."""
    draft, shape = Draft(), (rows, columns)
    x = draft.given("x", shape, dtype)
    if before:
        x = draft.one(f"aten.{before}.default", (x,), shape, dtype)
    classes = draft.given("classes", (rows,), DType.I64)
    out = draft.one(LOSS, (x, classes, None, REDUCTIONS.index(reduction)), (rows,) if reduction == "none" else (), dtype)
    return matched(CrossEntropyRule(), draft.graph(out))
