"""Progress of long work on standard error: a line per stage, one changing line of candidates on a terminal."""

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from ..errors import UsageError


class Progress:
    """A report callable for the pipeline; also writes the log of evaluations."""

    def __init__(self, quiet: bool = False, log: str | None = None, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet, self._began, self._count = quiet, time.monotonic(), 0
        self._live = not quiet and self._stream.isatty()
        try:
            self._log = Path(log).open("a") if log else None  # noqa: SIM115  it lives as long as the run
        except OSError as exc:
            raise UsageError(f"cannot write the log {log}: {exc.strerror}; name a file in a folder that exists") from exc

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        """Show one event."""
        if event == "candidate":
            self._candidate(facts)
        elif event == "chain":
            self._say(f"chain: {facts['step']}", transient=True)
        elif event == "workload":
            self._say(f"workload: batch 1, context {facts['max_context']}, {facts['dtype']}, prompts in chunks of {facts['chunks']}")
        elif event == "stage_started":
            self._say(f"{facts['stage']} ...", transient=True)
        elif event == "stage_finished":
            self._say(f"{facts['stage']}: {facts['seconds']:.1f} s")
        elif event == "capture_done":
            reason = facts["eager_reason"]
            self._say(f"capture: {facts['seconds']:.1f} s, {facts['graphs']} graphs" + (f"; {reason}" if reason else ""))
        elif event in ("loaded", "prepare", "failure", "advice"):
            self._other(event, facts)

    def _other(self, event: str, facts: dict[str, Any]) -> None:
        if event == "loaded":
            self._say(f"model {facts['name']}: loaded in {facts['seconds']:.1f} s")
        elif event == "prepare":
            self._say(f"preparing {facts['graph']}", transient=True)
        elif event == "failure":
            self._say(f"note: {facts['failure']}")
        elif facts["rejected"] or facts["error"]:
            refused = f"{facts['rejected']} items refused ({', '.join(facts['refused'][:3])})" if facts["rejected"] else ""
            self._say(f"advice for {facts['region']}: {'; '.join(part for part in (refused, facts['error']) if part)}")

    def _candidate(self, facts: dict[str, Any]) -> None:
        self._count += 1
        if self._log is not None:
            self._log.write(json.dumps(facts, sort_keys=True) + "\n")
            self._log.flush()
        took = f" {facts['us']:.2f} us" if facts.get("us") else ""
        what = f"{facts.get('implementation', '')} on {facts.get('match', '')}"
        self._say(f"candidate {self._count}: {what}: {facts.get('verdict', '')}{took}", transient=True)

    def _say(self, text: str, transient: bool = False) -> None:
        if self._quiet or (transient and not self._live):
            return
        head = f"[{time.monotonic() - self._began:6.1f} s] {text}"
        self._stream.write(("\r\033[K" if self._live else "") + head[:160] + ("" if transient else "\n"))
        self._stream.flush()
