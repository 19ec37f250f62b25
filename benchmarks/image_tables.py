"""The table of images.json: prompts with an image, ours beside eager."""

from typing import Any

from markdown_table import table

OURS, EAGER = "agentcompile", "eager"


def images(document: dict[str, Any]) -> str:
    """One row per model and workload."""
    head = ("model", "type", "prompt/new", "first token, ms", "eager, ms", "ms per token", "floor ms", "over the floor", "eager, ms",
            "whole, ms", "eager, ms", "over eager", "runs")
    cells = []
    for key in dict.fromkeys((row["model"], row["dtype"], row["workload"]) for row in document["rows"]):
        rows = {row["system"]: row for row in document["rows"] if (row["model"], row["dtype"], row["workload"]) == key}
        ours, eager = rows[OURS], rows[EAGER]
        cells.append((*key, f"{ours['prefill_ms']:.1f}", f"{eager['prefill_ms']:.1f}", f"{ours['step_ms']:.3f}",
                      f"{ours['floor_step_ms']:.3f}", f"{ours['step_ms'] / ours['floor_step_ms']:.2f}x", f"{eager['step_ms']:.2f}",
                      f"{ours['e2e_ms']:.1f}", f"{eager['e2e_ms']:.0f}", f"{eager['e2e_ms'] / ours['e2e_ms']:.1f}x",
                      str(ours["repetitions"])))
    return table(head, cells)
