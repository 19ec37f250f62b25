"""The list of faults: each injects one thing that goes wrong, checks that it is met, and returns what the user saw.

A fault is a function of a fresh folder. It raises where the fault is not detected, where the user is told nothing, or where something
is lost; else it returns the sentence that the user gets.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

AREAS = ("capture identity", "advice", "plugins", "compilers", "kernels", "timing", "storage", "bundles", "input", "signals")
REPOSITORY = Path(__file__).parents[2]  # whose own path is nobody else's business
HOST, DEVICE = "host", "device"
Run = Callable[[Path], str]


@frozen(kw_only=True)
class Fault:
    """One row to be. ``lost``: what is checked to be still there afterwards."""

    area: str
    name: str
    injected: str
    lost: str
    run: Run
    tier: str = HOST


FAULTS: dict[str, Fault] = {}


def add(area: str, name: str, injected: str, run: Run, lost: str, tier: str = HOST) -> None:
    """Put a fault on the list."""
    assert area in AREAS and name not in FAULTS, name
    FAULTS[name] = Fault(area=area, name=name, injected=injected, lost=f"nothing: {lost}", run=run, tier=tier)


def fault(area: str, injected: str, lost: str, tier: str = HOST) -> Callable[[Run], Run]:
    """Decorator: the function is a fault, named like it."""

    def decorated(run: Run) -> Run:
        add(area, run.__name__.strip("_").replace("_", " "), injected, run, lost, tier)
        return run

    return decorated


def result(one: Fault, folder: Path) -> dict[str, Any]:
    """Inject one fault; the row of the results. What is raised is an undetected fault, not an error of the list."""
    began, where, seen, detected = time.monotonic(), os.getcwd(), "", False
    try:
        seen = " ".join(str(one.run(folder)).split())
        detected = bool(seen) and "Traceback" not in seen
    except Exception as exc:
        seen = f"{type(exc).__name__}: {' '.join(str(exc).split())[:600]}"
    finally:
        os.chdir(where)
    return {"fault": one.name, "area": one.area, "injected": one.injected, "detected": detected,
            "seen": seen.replace(str(folder), "DIR").replace(f"{REPOSITORY}/", "")[:600], "lost": one.lost if detected else "unknown",
            "seconds": round(time.monotonic() - began, 2)}


def load() -> dict[str, Fault]:
    """Every fault of every area, by name."""
    from . import (  # noqa: F401  each adds its own
        advice,
        bundles,
        capture,
        compilers,
        device,
        edges,
        exchange,
        inputs,
        kernels,
        plugins,
        said,
        signals,
        storage,
        validators,
    )

    return FAULTS
