"""What every call of a module's session asks before it runs."""

from typing import TYPE_CHECKING

from .executables import Executables

if TYPE_CHECKING:
    from .weights import WeightStore


class BeforeCalls:
    """Whether the module is still the one that was bound, and in which order streams come. For one call at a time."""

    def __init__(self, weights: "WeightStore", model: str, executables: Executables) -> None:
        import torch

        self._weights, self._model, self._wait = weights, model, torch.accelerator.synchronize
        self.is_recording = getattr(torch.get_device_module(executables.device), "is_current_stream_capturing", lambda: False)
        self._stream = executables.backend.stream if executables.backend is not None else lambda: 0
        self._last_stream: int | None = None

    def __call__(self) -> int:
        """The stream that the call runs on.

        Raises:
            UsageError: the module was changed since.
        """
        self._weights.check_unchanged(self._model)
        return self.order_streams()

    def order_streams(self) -> int:
        """Wait for what an earlier call enqueued on another stream: both use the program's own buffers. The stream of this call.

        Whoever records this call in a graph has waited before, and must not be made to wait while recording.
        """
        stream = self._stream()
        if self._last_stream != stream:
            if self._last_stream is not None and not self.is_recording():
                self._wait()
            self._last_stream = stream
        return stream
