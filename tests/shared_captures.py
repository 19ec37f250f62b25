"""Graphs that another test of this run captured of an equal model, for tests of what lies behind a capture: they are compared anew."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentcompile_core.context import Context
from agentcompile_core.ir import serial
from agentcompile_core.ir.graph import GraphSet, Workload
from agentcompile_core.plugin.interfaces import Frontend, LoadedModel
from agentcompile_core.stages.capture.identity import identity
from agentcompile_core.store import keys


def captured_once(folder: Path, traced: Callable[..., GraphSet]) -> Callable[..., GraphSet]:
    """``traced``, asked once for all processes that share ``folder``; the key is the one that a store keeps captures under."""

    def captured(loaded: LoadedModel, workload: Workload, ctx: Context, frontend: Frontend | None) -> Any:
        known = identity(loaded)
        if known.unstable:
            return traced(loaded, workload, ctx, frontend)
        path = folder / keys.capture_key(known.capture, workload, (keys.code_of(type(frontend)),))
        with suppress(FileNotFoundError):
            return serial.loads(path.read_text(encoding="utf-8"), GraphSet)
        graphs = traced(loaded, workload, ctx, frontend)
        if graphs.graphs:
            with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", delete=False) as file:
                file.write(serial.dumps(graphs))
            os.replace(file.name, path)
        return graphs

    return captured
