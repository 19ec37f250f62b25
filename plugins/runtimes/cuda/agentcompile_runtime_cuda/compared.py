"""Kernels of this package's own beside the framework: each kind of call is compared once, on the numbers of its first call."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentcompile_core.plugin_api import Backend, BuildError

if TYPE_CHECKING:
    import torch

    Tensors = Sequence[torch.Tensor]

log = logging.getLogger("agentcompile.runtime.cuda")

CLOSE, CLOSE_PRODUCTS = 2.0, 4.0  # units in the last place of the largest element beside which a kernel may differ from the framework
CLOSE_RECURRENCES = 512.0  # the same of float32, where each of many tokens rounds what the one before left


class Compared:
    """``served``: by kind of call whether the kernel is used. ``starts``: what else begins to be built when the first kernel is."""

    def __init__(self, backend: Backend, capturing: Callable[[], bool], starts: "Sequence[Callable[[torch.Tensor], None]]" = ()) -> None:
        self._backend, self._capturing, self._starts = backend, capturing, starts
        self.served: dict[Any, bool] = {}

    def agreed(self, key: Any, launch: Callable[[], None], results: "Callable[[], Tensors]", framework: "Callable[[], Tensors]",
                close: float = CLOSE) -> bool:
        """Whether ``launch`` ran; False where the kernel is not to be used, since its results were not the framework's."""
        if key not in self.served:
            if self._capturing():
                return False  # nothing can be built or compared now; who captures warms up first
            for start in () if self.served else self._starts:
                start(results()[0])
            self.served[key] = self._agrees(key, launch, results, framework(), close)
        if self.served[key]:
            launch()
        return self.served[key]

    def _agrees(self, key: Any, launch: Callable[[], None], results: "Callable[[], Tensors]", wanted: "Tensors", close: float) -> bool:
        import torch

        try:
            launch()
            self._backend.synchronize()
        except (BuildError, RuntimeError, ValueError) as exc:
            log.info("the kernel of %s is not used: %s", key, exc)
            return False
        for out, right in zip(results(), wanted, strict=True):
            one, other = out.float().nan_to_num(), right.float().nan_to_num()
            is_finite = bool((out.isfinite() | ~right.isfinite()).all())  # wherever the framework's is: NaN is not 0
            apart = float((one - other).abs().max()) if is_finite else math.inf
            if apart > close * torch.finfo(out.dtype).eps * float(other.abs().max()):
                log.warning("the kernel of %s is not used: it differs from the framework by %g", key, apart)
                return False
        return True
