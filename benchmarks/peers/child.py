"""The parent's side of a peer: a process that is asked by lines of JSON, with deadlines; its end is one sentence and nothing more."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PeerDied(Exception):
    """A peer did not start, ended, failed or did not answer; the message is one sentence for its rows."""


class Child:
    """A process in a session and, unless named, a folder of its own. It begins to start at once; ``ready`` waits for it."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], *, start_s: float, cwd: Path | None = None) -> None:
        self.name, self._start_s, self._began = name, start_s, time.monotonic()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the child
        self._folder = tempfile.TemporaryDirectory(prefix="peer-") if cwd is None else None
        self._process = subprocess.Popen(command, env=environment, cwd=cwd or self._folder.name, stdin=subprocess.PIPE, text=True,
                                         stdout=subprocess.PIPE, stderr=self._log, start_new_session=True)
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")  # the end

    def ready(self) -> dict[str, Any]:
        """The facts that the child says once it can be asked.

        Raises:
            PeerDied: it cannot.
        """
        return self._answer(max(0.0, self._began + self._start_s - time.monotonic()), "did not start", f"within {self._start_s:.0f} s")

    def ask(self, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            PeerDied: there is none.
        """
        with contextlib.suppress(OSError):  # it has ended: what it said last follows
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer(within_s, "ended while it was measured", f"no answer within {within_s:.0f} s")

    def _answer(self, seconds: float, failed: str, late: str) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise PeerDied(f"{self.name} {failed}: {late}, so it was ended") from None
        try:
            answer: dict[str, Any] = json.loads(line)
            reason = answer.get("error", "")
        except ValueError:
            reason = self._last_words()
        if reason:
            self.close()
            raise PeerDied(f"{self.name} {failed}: {reason}")
        return answer

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"exit code {self._process.returncode}{': ' + lines[-1][:300] if lines else ', without a word'}"

    def close(self) -> None:
        """End the child and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def log(self) -> str:
        """What the child wrote to its error output so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")
