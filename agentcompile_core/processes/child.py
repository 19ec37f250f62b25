"""One child process as the parent sees it: messages with a deadline, the end of its error output, kill of the whole group."""

import contextlib
import json
import os
import queue
import selectors
import signal
import tempfile
import threading
import time
from typing import Any

from .fork_server import Forked, ForkServer

POLL_S = 0.25
LOG_BYTES = 4000
MAX_LINE_BYTES = 256 << 20


class ChildEnded(Exception):
    """The child is gone, or wrote something that is no message."""


class Child:
    """A worker that ``server`` forks, which is told the ``settings`` of its plugins first. Not thread-safe."""

    def __init__(self, server: ForkServer, catalog: str, builders: int, memory_bytes: int, settings: dict[str, Any] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the child
        self._memory_bytes = memory_bytes
        self._server = server
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self._input, self._output = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")
        try:  # a session of its own: one kill reaches all its children
            arguments = ("--catalog", catalog, "--builders", str(builders))
            self._process: Forked | None = server.fork(arguments, theirs_in, theirs_out, self._log.fileno())
        except OSError:  # the server ended meanwhile; ``receive`` will say so
            self._process = None
        os.close(theirs_in)
        os.close(theirs_out)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._buffer = bytearray()
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._write, daemon=True).start()
        self.send({"settings": settings or {}})

    def _write(self) -> None:
        # On a thread: a hung child does not read, and a full pipe must not hang the parent.
        with contextlib.suppress(OSError, ValueError):
            while (line := self._outbox.get()) is not None:
                self._input.write(line)
                self._input.flush()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message, without waiting for it to be read."""
        self._outbox.put(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def receive(self, deadline_s: float) -> dict[str, Any] | None:
        """The next message, or None after ``deadline_s``.

        Raises:
            ChildEnded: the child died, used too much memory, or broke the protocol.
        """
        end = time.monotonic() + deadline_s
        while True:
            newline = self._buffer.find(b"\n")
            if newline >= 0:
                line = bytes(self._buffer[:newline])
                del self._buffer[: newline + 1]
                return self._parsed(line)
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._check_memory()
            if self._selector.select(min(left, POLL_S)):
                data = os.read(self._output.fileno(), 1 << 20)
                if not data:
                    raise ChildEnded(self._last_words())
                self._buffer += data
                if len(self._buffer) > MAX_LINE_BYTES:
                    raise ChildEnded("the worker wrote a message without end")

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ChildEnded(f"the worker wrote something that is no message: {line[:80]!r}")
        return message

    def _check_memory(self) -> None:
        try:
            with open(f"/proc/{self._pid}/statm", encoding="ascii") as file:
                resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return
        if resident > self._memory_bytes:
            raise ChildEnded(f"the worker used {resident >> 20} MiB of memory; at most {self._memory_bytes >> 20} MiB are allowed")

    @property
    def _pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def _last_words(self) -> str:
        if self._process is None or not self._pid:
            return f"what it would be forked from ended; {self._server.last_words(LOG_BYTES)[-1000:]}".rstrip("; ")
        try:
            code = self._process.wait(5.0)
        except TimeoutError:
            return "the worker closed its output"
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        lost = f"; what it was forked from ended: {self._server.last_words(LOG_BYTES)[-500:]}" if self._server.ended else ""
        return f"the worker {how}{lost}; {self.log()}".rstrip("; ")

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self._process is None or self._process.poll() is not None

    @property
    def signal_number(self) -> int:
        """The signal that ended it, 0 if none did."""
        code = self._process.poll() if self._process is not None else None
        return -code if code is not None and code < 0 else 0

    def log(self) -> str:
        """The end of what it wrote to its standard error."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_BYTES))
        return self._log.read().decode(errors="replace").strip()[-1000:]

    def kill(self) -> None:
        """End it and every process of its group, and wait for it."""
        self._outbox.put(None)
        if self._process is not None:
            self._process.kill_group()
        self._selector.close()
        self._output.close()
        self._log.close()
        with contextlib.suppress(OSError, ValueError):
            self._input.close()
