"""Which kernels really ran: every launch that a backend prepares is counted when it is run."""

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from agentcompile_core.report.accounting import accounting
from agentcompile_core.runtime.make_program import without_steps
from agentcompile_core.runtime.program import Program

_PREPARE = ("prepare_launch", "prepare_moving")


class Launches:
    """Runs of kernels in this process by entry name (which holds the digest of the kernel's text)."""

    def __init__(self, backends: Iterable[Any]) -> None:
        self.count: Counter[str] = Counter()
        self._before = {(kind, name): getattr(kind, name) for kind in {type(backend) for backend in backends} for name in _PREPARE}
        for (kind, name), prepare in self._before.items():
            setattr(kind, name, self._counting(prepare))

    def stop(self) -> None:
        """Count no more."""
        for (kind, name), prepare in self._before.items():
            setattr(kind, name, prepare)

    def _counting(self, prepare: Any) -> Any:
        @functools.wraps(prepare)
        def prepared(backend: Any, handle: Any, launch: Any, *more: Any) -> Any:
            run = prepare(backend, handle, launch, *more)

            def counted(stream: int = 0, *addresses: int) -> None:
                run(stream, *addresses)
                self.count[launch.entry] += 1

            return run and counted

        return prepared

    def facts(self, program: Program | None) -> dict[str, Any]:
        """Bytes of the program by origin, where a step counts for its kernel only if each of its launches ran."""
        if program is None:
            return {"bytes": {}, "generated_share": 0.0, "kernels_run": 0, "steps": 0, "framework_operators": {}}
        entries = {source.key: {launch.entry for launch in source.launches} for source in program.sources}
        idle = {key for key, names in entries.items() if any(not self.count[name] for name in names)}
        found = accounting(without_steps(program, lambda segment: segment.source in idle))
        steps = sum(1 for s in program.segments if s.source and s.source not in idle)
        return {"bytes": found["bytes"], "generated_share": found["share"].get("generated", 0.0), "steps": steps,
                "kernels_run": sum(len(names) for key, names in entries.items() if key not in idle),
                "framework_operators": found["framework_operators"]}
