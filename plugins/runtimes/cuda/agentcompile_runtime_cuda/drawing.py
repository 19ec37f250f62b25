"""Drawing a token from 16-bit logits in three launches of ``draw.cu``, where transformers' processors sort the vocabulary.

Built on first use and compared there with the framework's formula, on the logits of that call and clocks of its own; what cannot be
built or draws other tokens is not used.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentcompile_cuda_kit import c_type, make_source

from agentcompile_core.plugin_api import (
    Access,
    AgentCompileError,
    Backend,
    DType,
    KernelArgument,
    Launch,
    Odds,
    Role,
    StepSource,
    Target,
    f32,
    i32,
    pointer,
    scores_of,
)

from .own_kernels import OwnKernels

if TYPE_CHECKING:
    import torch

log = logging.getLogger("agentcompile.runtime.cuda")

TEMPLATE = Path(__file__).with_name("draw.cu")
THREADS = 256  # of a block; one of those that look at logits has BLOCK_ELEMENTS of them
BLOCK_ELEMENTS = THREADS * 8
KEYS, ROWS = 1 << 16, 1 << 11
ROW_BLOCKS = 64  # over which rows of keys are dealt out
TALLY_WORDS, PART_WORDS = 5, 3  # of 32 and of 64 bits
ORDINARY = 2  # draws that are compared for each of the scores that are tried
AT_ONCE, NEAR = 1e-30, 1e-6
TEMPERATURES = (2.0**-10, 2.0**10)  # beyond them different scores may become equal, or infinite


def source(dtype: DType) -> StepSource:
    """The kernels for one element type; the grid of the first and the last, and all scalars, are those of a call."""
    def launch(entry: str, *arguments: Any) -> Launch:
        return Launch(entry=entry, grid=(1, 1, 1), block=(THREADS, 1, 1), pdl=True, arguments=arguments)

    logits, counts = pointer("logits", Role.INPUT, dtype), pointer("counts", Role.INPUT, DType.I32)
    tally = pointer("tally", Role.OUTPUT, DType.I32, Access.READ_WRITE)

    def made(name: str, of: DType) -> KernelArgument:
        return pointer(name, Role.OUTPUT, of, Access.READ_WRITE if name in ("counts", "numbers", "masses", "parts") else Access.WRITE)

    launches = (
        launch("draw_count", logits, made("counts", DType.I32), tally, i32("n", 0)),
        launch("draw_bounds", counts, tally, made("numbers", DType.I32), made("masses", DType.F64), made("bounds", DType.I32),
               made("refused", DType.BOOL), i32("n", 0), f32("scale", 0.0), i32("top_k", 0), f32("left_out", 0.0), f32("min_p", 0.0)),
        launch("draw_pick", logits, pointer("clocks", Role.INPUT, DType.F32), pointer("bounds", Role.INPUT, DType.I32), tally,
               made("parts", DType.I64), made("token", DType.I64), i32("n", 0), f32("scale", 0.0)))
    plan = {"T": c_type(dtype), "threads": THREADS, "row_blocks": ROW_BLOCKS, "pdl": True}
    return make_source(TEMPLATE, plan=plan, launches=launches)


class Drawing:
    """What ``Backend.draw`` offers, over kernels that ``backend`` builds and launches."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None], capturing: Callable[[], bool]) -> None:
        self._capturing, self._kernels = capturing, OwnKernels(backend, target, source)
        self._served: dict[Any, bool] = {}

    def __call__(self, logits: "torch.Tensor", odds: Odds, clocks: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor] | None":
        """See ``Backend.draw``."""
        import torch

        halves = logits.dtype in (torch.float16, torch.bfloat16) and logits.is_contiguous() and logits.dim() == 1
        alike = clocks.dtype is torch.float32 and clocks.is_contiguous() and clocks.shape == logits.shape and clocks.device == logits.device
        if not halves or not alike or not TEMPERATURES[0] <= odds.temperature <= TEMPERATURES[1]:
            return None
        key = (logits.device, logits.dtype, len(logits), odds.top_k > 0, odds.top_p < 1.0, odds.min_p > 0.0)
        if key not in self._served:
            if self._capturing():
                return None  # nothing can be built or compared now; who captures warms up first
            try:
                why = self._difference(logits, odds)
            except torch.OutOfMemoryError:  # another call may find more
                return None
            except (AgentCompileError, RuntimeError, ValueError, OSError) as exc:
                why = f"{type(exc).__name__}: {exc}"
            self._served[key] = not why
            if why:
                log.warning("the kernels that draw are not used for %s: %s", key, why)
        return self._drawn(logits, odds, clocks) if self._served[key] else None

    def _difference(self, logits: "torch.Tensor", odds: Odds) -> str:
        """How draws differ from the framework's formula, for scores of its own and those of a call; empty: they do not.

        Clocks that ring at once on the least likely token that is left, and on the likeliest that is not, tell the two apart.
        """
        import torch

        n, generator = len(logits), torch.Generator().manual_seed(len(logits))
        normal = torch.randn(n + 1, generator=generator) * 3.0
        spread, equals, broken = normal.to(logits), (2.0 * normal).round().div(2.0).to(logits), normal.to(logits)
        broken[n // 2] = float("nan")
        for scores in (spread[:n], spread[1:], equals[:n], equals[1:], logits):
            left = scores_of(scores, odds)
            likely = left.softmax(0)
            if bool(likely.isnan().any()):
                continue
            drawn = [torch.empty(n).exponential_(1, generator=generator).to(scores.device) for _ in range(ORDINARY)]
            for clocks in (*drawn, *_telling(scores, left, odds)):
                (token, refused), wanted = self._drawn(scores, odds, clocks), int((likely / clocks).argmax())
                if bool(refused) or int(token) != wanted:
                    return f"token {int(token)} was drawn and not {wanted}, refused {bool(refused)}"
        return "" if bool(self._drawn(broken[:n], odds, torch.ones_like(likely))[1]) else "a NaN was not refused"

    def _drawn(self, logits: "torch.Tensor", odds: Odds, clocks: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        n, device = len(logits), logits.device
        scale = float(torch.tensor(odds.temperature, dtype=torch.float32).reciprocal())  # by which torch multiplies on a device
        zeroed = torch.zeros(KEYS + TALLY_WORDS, dtype=torch.int32, device=device)
        counts, tally = zeroed[:KEYS], zeroed[KEYS:]
        blocks = -(-n // BLOCK_ELEMENTS)

        def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        numbers, masses = empty(ROWS, torch.int32), empty(ROWS, torch.float64)
        bounds, parts = empty(4, torch.int32), empty(blocks * PART_WORDS, torch.int64)
        refused, token = empty(1, torch.bool), empty(1, torch.int64)
        kept = (scale, min(odds.top_k, n), 1.0 - odds.top_p, odds.min_p)
        calls = ((blocks, (logits, counts, tally), (n,)),
                 (ROW_BLOCKS, (counts, tally, numbers, masses, bounds, refused), (n, *kept)),
                 (blocks, (logits, clocks, bounds, tally, parts, token), (n, scale)))
        for launch, (grid, tensors, scalars) in zip(self._kernels.launches(logits), calls, strict=True):
            self._kernels.run(logits, launch, grid, tensors, scalars)
        return token, refused


def _telling(scores: "torch.Tensor", left: "torch.Tensor", odds: Odds) -> "list[torch.Tensor]":
    """Clocks of which one rings at once, on either side of the bounds; none where the order of a sum decides what is left."""
    import torch

    rising = scores.double().mul(1.0 / odds.temperature).softmax(0).sort(stable=True)
    held = rising.values.cumsum(0)
    by_rank = left[rising.indices] > -torch.inf
    edge = int(by_rank.int().argmax())  # the least likely that is left
    near = odds.top_p < 1.0 and bool((held - held[-1] * (1.0 - odds.top_p)).abs().min() < NEAR)
    if near or float(rising.values[edge]) < NEAR:
        return []
    found = []
    for rank in {edge, max(0, edge - 1)}:
        clocks = torch.ones_like(left)
        clocks[rising.indices[rank]] = AT_ONCE
        found.append(clocks)
    return found
