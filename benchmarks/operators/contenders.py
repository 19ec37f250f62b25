"""Who is timed beside the kernel that the compiler selected: the framework, torch.compile, and cuBLAS; and who is right."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from .cases import Case
from .clock import Run

AUTOTUNE = "max-autotune-no-cudagraphs"
WIDE_BYTES = 4 << 30  # of the operands in float64: beyond it float32 is the reference


@frozen(kw_only=True, eq=False)
class Copies:
    """The same operands several times at other addresses: inputs, then parameters."""

    operands: tuple[tuple[Tensor, ...], ...]


def copies(case: Case, inputs: Sequence[Tensor], parameters: Sequence[Tensor], count: int) -> Copies:
    """``count`` copies, the first of which is what is given."""
    first = (*inputs, *parameters)
    return Copies(operands=(first, *(tuple(tensor.clone() for tensor in first) for _ in range(count - 1))))


def peers(case: Case, made: Copies, autotune: bool) -> dict[str, list[Run]]:
    """The runs of every peer over all copies; torch.compile with ``autotune`` too, where it chooses among products.

    ``eager_fused`` is the framework's one operator where the module writes it out.

    ``cublas_*`` are calls of cuBLAS and cuBLASLt into results that are there already: the fastest of them is cuBLAS.
    """
    found = {"eager": _over(case.function, made), "torch_compile": _over(_compiled(case.function, None), made)}
    if case.fused is not None:
        found["eager_fused"] = _over(case.fused, made)
    if case.family == "gemm" and autotune:
        found["torch_compile_autotune"] = _over(_compiled(case.function, AUTOTUNE), made)
    if case.family in ("gemv", "gemm"):
        found |= _blas(case, made)
    return found


def _over(function: Callable[..., Any], made: Copies) -> list[Run]:
    def run(operands: tuple[Tensor, ...]) -> Run:
        return lambda: function(*operands)

    return [run(operands) for operands in made.operands]


def _compiled(function: Callable[..., Tensor], mode: str | None) -> Callable[..., Tensor]:
    torch._dynamo.reset()  # earlier shapes of the same function would make this one dynamic
    return torch.compile(function, dynamic=False, **({"mode": mode} if mode else {}))


def _blas(case: Case, made: Copies) -> dict[str, list[Run]]:
    on_device = made.operands[0][0].is_cuda
    found: dict[str, list[Run]] = {}
    for library in ("cublas", "cublaslt") if on_device else ("",):
        found[f"cublas_mm_{library}".rstrip("_")] = [_product(operands, case, library) for operands in made.operands]
    if case.family == "gemv":
        found["cublas_mv"] = [_vector(operands, case) for operands in made.operands]
    return found


def _product(operands: tuple[Tensor, ...], case: Case, library: str) -> Run:
    x, weight = operands
    out = torch.empty(case.result, dtype=case.dtype, device=x.device)

    def run() -> None:
        with preferred(library):
            torch.mm(x, weight.t(), out=out)

    return run


def _vector(operands: tuple[Tensor, ...], case: Case) -> Run:
    x, weight = operands
    out = torch.empty(case.result[-1], dtype=case.dtype, device=x.device)
    return lambda: torch.mv(weight, x.view(-1), out=out)


@contextmanager
def preferred(library: str) -> Iterator[None]:
    """Have torch call this BLAS library, empty: whichever it likes."""
    if not library:
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def errors(case: Case, operands: Sequence[Tensor], results: dict[str, Tensor]) -> dict[str, float]:
    """Root mean square of each result's error over that of the exact one.

    Of sums over what their terms add up to at random, if that is more: a single sum may be as near to 0 as it likes.
    """
    wide = torch.float64 if 4 * case.nbytes <= WIDE_BYTES or case.dtype is torch.float32 else torch.float32
    exact = (case.fused or case.function)(*(tensor.to(wide) for tensor in operands)).double().flatten()
    size = exact.square().mean().sqrt().clamp(min=1e-30)
    if case.terms > 1:
        size = torch.maximum(size, operands[0].double().square().mean().sqrt() * case.terms**0.5)
    return {name: float((found.double().flatten() - exact).square().mean().sqrt() / size) for name, found in results.items()}
