"""The table of sampling.json: what drawing a token adds to a step."""

from typing import Any

from markdown_table import table

LIKELY, DRAWN, HOST, EAGER = "most likely", "drawn", "drawn, by host", "drawn, eager"


def sampling(document: dict[str, Any]) -> str:
    """One row per model and settings."""
    head = ("model", "type", "settings", "most likely, ms per token", "drawn on the device", "adds us", "drawn by the host", "adds us",
            "eager, drawn", "over eager", "runs")
    cells = []
    for key in dict.fromkeys((row["model"], row["dtype"], row["settings"]) for row in document["rows"]):
        rows = {row["system"]: row for row in document["rows"] if (row["model"], row["dtype"], row["settings"]) == key}
        steps = {name: row["step_ms"] for name, row in rows.items()}
        cells.append((*key, f"{steps[LIKELY]:.3f}", f"{steps[DRAWN]:.3f}", _added(steps, DRAWN), f"{steps[HOST]:.3f}", _added(steps, HOST),
                      f"{steps[EAGER]:.2f}" if EAGER in steps else "-", f"{steps[EAGER] / steps[DRAWN]:.1f}x" if EAGER in steps else "-",
                      str(rows[DRAWN]["repetitions"])))
    return table(head, cells)


def _added(steps: dict[str, float], name: str) -> str:
    return f"{1e3 * (steps[name] - steps[LIKELY]):.0f}"
