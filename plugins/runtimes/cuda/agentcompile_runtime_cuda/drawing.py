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
    Backend,
    BuildError,
    DType,
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
THREADS, BOUNDING = 256, 512  # of a block, and of the one that finds the bounds
KEYS = 1 << 16
TRIALS = 8  # draws that are compared
TEMPERATURES = (2.0**-10, 2.0**10)  # beyond them different scores may become equal, or infinite


def source(dtype: DType) -> StepSource:
    """The kernels for one element type; the grid of the first and the last, and all scalars, are those of a call."""
    def launch(entry: str, threads: int, *arguments: Any) -> Launch:
        return Launch(entry=entry, grid=(1, 1, 1), block=(threads, 1, 1), arguments=arguments)

    logits = pointer("logits", Role.INPUT, dtype)
    launches = (
        launch("draw_count", THREADS, logits, pointer("counts", Role.OUTPUT, DType.I32, Access.READ_WRITE), i32("n", 0)),
        launch("draw_bounds", BOUNDING, logits, pointer("counts", Role.INPUT, DType.I32),
               pointer("bounds", Role.OUTPUT, DType.I32, Access.WRITE), pointer("refused", Role.OUTPUT, DType.I32, Access.WRITE),
               i32("n", 0), f32("temperature", 0.0), i32("top_k", 0), f32("top_p", 0.0), f32("min_p", 0.0)),
        launch("draw_pick", THREADS, logits, pointer("clocks", Role.INPUT, DType.F32), pointer("bounds", Role.INPUT, DType.I32),
               pointer("best", Role.OUTPUT, DType.I64, Access.READ_WRITE), pointer("counter", Role.OUTPUT, DType.I32, Access.READ_WRITE),
               pointer("token", Role.OUTPUT, DType.I64, Access.WRITE), i32("n", 0), f32("temperature", 0.0)))
    return make_source(TEMPLATE, plan={"T": c_type(dtype), "threads": THREADS, "bounding": BOUNDING}, launches=launches)


class Drawing:
    """What ``Backend.draw`` offers, over kernels that ``backend`` builds and launches."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None], capturing: Callable[[], bool]) -> None:
        self._capturing, self._kernels = capturing, OwnKernels(backend, target, source)
        self._served: dict[Any, bool] = {}

    def __call__(self, logits: "torch.Tensor", odds: Odds, clocks: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor] | None":
        """See ``Backend.draw``."""
        import torch

        halves = logits.dtype in (torch.float16, torch.bfloat16) and logits.is_contiguous() and logits.dim() == 1
        if not halves or clocks.dtype is not torch.float32 or not clocks.is_contiguous() or clocks.shape != logits.shape:
            return None
        if not TEMPERATURES[0] <= odds.temperature <= TEMPERATURES[1]:
            return None
        key = (logits.dtype, len(logits), odds.top_k > 0, odds.top_p < 1.0, odds.min_p > 0.0)
        if key not in self._served:
            if self._capturing():
                return None  # nothing can be built or compared now; who captures warms up first
            self._served[key] = self._agrees(key, logits, odds)
        return self._drawn(logits, odds, clocks) if self._served[key] else None

    def _agrees(self, key: Any, logits: "torch.Tensor", odds: Odds) -> bool:
        import torch

        generator = torch.Generator(device=logits.device).manual_seed(len(logits))
        try:
            for _ in range(TRIALS):
                clocks = torch.empty(len(logits), dtype=torch.float32, device=logits.device).exponential_(1, generator=generator)
                token, refused = self._drawn(logits, odds, clocks)
                likely = scores_of(logits, odds).softmax(0)
                if bool(likely.isnan().any()):
                    agrees = bool(refused)
                else:
                    agrees = not bool(refused) and int(token) == int((likely / clocks).argmax())
                if not agrees:
                    log.warning("the kernels that draw are not used for %s: they drew %d, refused %s", key, int(token), bool(refused))
                    return False
        except (BuildError, RuntimeError, ValueError) as exc:
            log.info("the kernels that draw are not used for %s: %s", key, exc)
            return False
        return True

    def _drawn(self, logits: "torch.Tensor", odds: Odds, clocks: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        n, device = len(logits), logits.device
        zeroed = torch.zeros(KEYS + 4, dtype=torch.int32, device=device)  # counts, then the best and the counter of blocks
        counts, best, counter = zeroed[:KEYS], zeroed[KEYS : KEYS + 2], zeroed[KEYS + 2 :]
        bounds = torch.empty(4, dtype=torch.int32, device=device)
        refused, token = torch.empty(1, dtype=torch.int32, device=device), torch.empty(1, dtype=torch.int64, device=device)
        all_of_it = -(-n // (THREADS * 8))
        calls = ((all_of_it, (logits, counts), (n,)),
                 (1, (logits, counts, bounds, refused), (n, odds.temperature, odds.top_k, odds.top_p, odds.min_p)),
                 (all_of_it, (logits, clocks, bounds, best, counter, token), (n, odds.temperature)))
        for launch, (blocks, tensors, scalars) in zip(self._kernels.launches(logits.dtype), calls, strict=True):
            self._kernels.run(logits.dtype, launch, blocks, tensors, scalars)
        return token, refused.bool()
