"""The tables of steps.json and capacities.json: a decode step by how much is cached, and by how much may be."""

from typing import Any

from markdown_table import table


def steps(document: dict[str, Any]) -> str:
    """One row per position."""
    head = ("model", "type", "context", "position", "us per step", "spread us", "floor us", "over the floor", "program from position",
            "us with the first range's program", "runs")
    rows = sorted(document["rows"], key=lambda r: (r["model"], r["context"], r["position"]))
    return table(head, [(r["model"], r["dtype"], str(r["context"]), str(r["position"]), f"{r['us']:.1f}", f"{r['spread_us']:.1f}",
                         f"{r['floor_us']:.1f}", f"{r['us'] / r['floor_us']:.2f}x", str(r["from_position"]), f"{r['us_first']:.1f}",
                         str(r["repetitions"])) for r in rows])


def capacities(document: dict[str, Any]) -> str:
    """One row per position and capacity."""
    head = ("model", "type", "position", "capacity", "us per step", "spread us", "capacity of the compilation", "us per step there",
            "apart", "runs")
    rows = sorted(document["rows"], key=lambda r: (r["model"], r["capacity"], r["position"]))
    return table(head, [(r["model"], r["dtype"], str(r["position"]), str(r["capacity"]), f"{r['us']:.1f}", f"{r['spread_us']:.1f}",
                         str(r["context"]), f"{r['us_context']:.1f}", f"{abs(r['us_context'] / r['us'] - 1):.1%}",
                         str(r["repetitions"])) for r in rows])
