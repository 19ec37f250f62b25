"""The table of models in bfloat16 beside each other: how far a token is from its floor, and from eager."""

from typing import Any

from markdown_table import table


def architectures(document: dict[str, Any]) -> str:
    """One row per model, ours beside eager in the same process where it was measured."""
    rows = []
    for ours in (r for r in document["rows"] if r["system"] == "agentcompile"):
        same = [r for r in document["rows"] if (r["model"], r["workload"]) == (ours["model"], ours["workload"])]
        eager = next((r for r in same if r["system"] == "eager"), None)
        beside = ("-", "-") if eager is None else (f"{eager['step_ms']:.3f}", f"{eager['step_ms'] / ours['step_ms']:.2f}x")
        rows.append((ours["model"], ours["workload"], f"{ours['step_ms']:.3f}", f"{ours['floor_step_ms']:.3f}",
                     f"{ours['step_ms'] / ours['floor_step_ms']:.2f}x", f"{ours['generated_share']:.1%}",
                     str(ours.get("generated_calls", "-")),
                     _operators(ours), f"{ours['prefill_ms']:.2f}", *beside, str(ours["repetitions"])))
    return table(("model", "prompt/new", "ms per token", "floor ms", "over the floor", "bytes through generated kernels",
                  "kernels", "operators of the framework", "prefill ms", "eager ms per token", "eager over ours", "runs"), sorted(rows))


def _operators(row: dict[str, Any]) -> str:
    """How many of the framework's operators a step still calls, and which: ``48 topk, 1 index``."""
    if "framework_operators" not in row:
        return "-"
    most = sorted(row["framework_operators"].items(), key=lambda item: (-item[1], item[0]))
    said = [f"{count} {op.removeprefix('aten.').rpartition('.')[0]}" for op, count in most]
    return ", ".join((*said[:3], *([f"{len(said) - 3} more"] if len(said) > 3 else [])))
