"""Steps that run behind a request whose end the host saw while they were enqueued already: nobody waits for them but what runs next."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Trailing:
    """Of one session on ``device``. A host runs steps when they are made, so there nothing trails.

    What a session owns was allocated on the stream that was current when it was made, and torch may hand that memory out there as
    soon as the session is gone. So on any other stream a request does wait, and everywhere if some of it was ``allocated`` on another one.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._home = None if device.type == "cpu" else self._stream()
        self._waits = False
        self._last: torch.Event | None = None

    def _stream(self) -> "torch.Stream":
        import torch

        return torch.accelerator.current_stream(self._device)

    def allocated(self) -> None:
        """Something is allocated for the session now, on the current stream."""
        self._waits = self._waits or (self._home is not None and self._stream() != self._home)

    @contextmanager
    def behind(self) -> Iterator[None]:
        """What is enqueued within runs behind all that was enqueued within before, on whatever stream; however it ends, nobody waits."""
        if self._last is not None:
            self._stream().wait_event(self._last)
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        import torch

        if self._home is None:
            return
        stream = self._stream()
        if self._waits or stream != self._home:
            stream.synchronize()
        event = torch.Event(self._device.type)
        event.record(stream)
        self._last = event
