"""Steps that run behind a request whose end the host saw while they were enqueued already: nobody waits for them but what runs next."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Trailing:
    """Of one session on ``device``. A host runs steps when they are made, so there nothing trails.

    What a session owns was allocated on the stream that was current when it was made, and torch may hand that memory out there as
    soon as the session is gone. So on any other stream a request does wait.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._home = None if device.type == "cpu" else self._stream()
        self._last: torch.Event | None = None

    def _stream(self) -> "torch.Stream":
        import torch

        return torch.accelerator.current_stream(self._device)

    def leave(self) -> None:
        """The request is over; what it has enqueued runs on."""
        import torch

        if self._home is None:
            return
        stream = self._stream()
        if stream != self._home:
            stream.synchronize()
            return
        self._last = torch.Event(self._device.type)
        self._last.record(stream)

    def follow(self) -> None:
        """What is enqueued from here on, on whatever stream, runs behind what was left."""
        if self._last is not None:
            self._stream().wait_event(self._last)
            self._last = None
