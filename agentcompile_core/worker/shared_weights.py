"""Weights that the cases of a match share, on the host: drawn once, and widened once for the reference."""

import threading
from collections.abc import Callable, Hashable

from torch import Tensor

KEPT_BYTES = 1 << 30


class SharedWeights:
    """Tensors by what they are drawn from; the oldest are dropped beyond 1 GiB. Nobody may write to them. Safe in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Hashable, Tensor] = {}
        self._wide: dict[Hashable, Tensor] = {}

    def get(self, key: Hashable, draw: Callable[[], Tensor]) -> Tensor:
        """The weights under ``key``, drawn if they are not there."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = draw()
                self._drop()
            return self._kept[key]

    def widened(self, tensor: Tensor) -> Tensor:
        """The same numbers in float64, made once, of weights that came from here; any other tensor as it is."""
        with self._lock:
            key = next((key for key, kept in self._kept.items() if kept is tensor), None)
            if key is None:
                return tensor
            if key not in self._wide:
                self._wide[key] = tensor.double()
                self._drop()
            return self._wide.get(key, tensor)

    def _drop(self) -> None:
        while len(self._kept) > 1 and sum(t.nbytes for t in (*self._kept.values(), *self._wide.values())) > KEPT_BYTES:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._wide.pop(oldest, None)
