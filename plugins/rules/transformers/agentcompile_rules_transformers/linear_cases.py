"""Cases of linear layers whose input, or what is added behind them, is float32 beside narrower weights, and of those whose normed input
others read as well."""

from collections.abc import Sequence

from agentcompile_core.plugin_api import DType, Graph, Match, UsageError
from agentcompile_core.testing.matching import matched

from .draft import Draft
from .linear import LinearRule

FORMS = ("rounded", "normed", "weighted")


def wide_linear_case(*, n: int, k: int, form: str, norm: str = "rms", residual: bool = False,
                     dtype: DType = DType.BF16) -> tuple[Match, Graph]:
    """A linear layer of one token, ``n`` outputs from ``k`` inputs of ``dtype`` that are made of float32 ones.

    ``form``: ``rounded``, as they are; ``normed``, rounded and then normed; ``weighted``, normed without weights, rounded, and then
    multiplied with weights. ``residual``: float32, added behind the layer.
    """
    if form not in FORMS:
        raise UsageError(f"unknown form {form!r}; allowed are {', '.join(FORMS)}")
    draft, shape = Draft(), (1, 1, k)
    x = draft.given("x", shape, DType.F32)
    if form == "weighted":
        rounded = draft.cast(draft.norm("norm", x, "rms_bare", shape, DType.F32), shape, dtype)
        x = draft.one("aten.mul.Tensor", (draft.weight("norm.weight", k, dtype=dtype), rounded), shape, dtype)
    else:
        x = draft.cast(x, shape, dtype)
        x = draft.norm("norm", x, norm, shape, dtype) if form == "normed" else x
    out = draft.linear("linear", x, n, k, dtype)
    if residual:
        out = draft.one("aten.add.Tensor", (draft.given("residual", (1, 1, n), DType.F32), out), (1, 1, n), DType.F32)
    return matched(LinearRule(), draft.graph(out))


def summed_case(*, n: int | Sequence[int], k: int, post: str = "rms", norm: str = "none", shared: bool = True, swapped: bool = False,
                dtype: DType = DType.F16) -> tuple[Match, Graph]:
    """A linear layer, or several, of one token over the ``norm`` of residual + ``post`` norm of ``k`` elements (``swapped``: of the norm +
    residual), a sum that others read as well where ``shared``."""
    draft, sizes, shape = Draft(), [n] if isinstance(n, int) else list(n), (1, 1, k)
    normed = draft.norm("post", draft.given("x", shape, dtype), post, shape, dtype)
    residual = draft.given("residual", shape, dtype)
    total = draft.one("aten.add.Tensor", (normed, residual) if swapped else (residual, normed), shape, dtype)
    row = draft.norm("norm", total, norm, shape, dtype) if norm != "none" else total
    outs = [draft.linear(f"linear{i}", row, size, k, dtype) for i, size in enumerate(sizes)]
    return matched(LinearRule(), draft.graph(*outs, *((total,) if shared else ())))


def shared_norm_case(*, n: int | Sequence[int], k: int, norm: str = "rms", bias: bool = False,
                     dtype: DType = DType.F16) -> tuple[Match, Graph]:
    """A linear layer, or several, of one token over a norm of ``k`` elements that others read as well, as a view of it."""
    draft, sizes = Draft(), [n] if isinstance(n, int) else list(n)
    normed = draft.norm("norm", draft.given("x", (1, 1, k), dtype), norm, (1, 1, k), dtype)
    row = draft.one("aten.view.default", (normed, (1, 1, k)), (1, 1, k), dtype, kind="view")
    outs = [draft.linear(f"linear{i}", row, size, k, dtype, bias) for i, size in enumerate(sizes)]
    return matched(LinearRule(), draft.graph(*outs, row))
