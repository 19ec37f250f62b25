"""The tables of sweep.json: whole generations beside peers. Ratios are taken within one command, which the column ``run`` of rows names."""

import re
from typing import Any

from harness import MODELS
from markdown_table import table

OURS = "agentcompile"
SYSTEMS = (OURS, "vllm", "torch_compile_loop", "torch_compile", "eager")
TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
Row = dict[str, Any]


def sweep(document: dict[str, Any]) -> str:
    """Every system on every workload, and below it why some have no times."""
    rows = sorted(document["rows"], key=_order)
    head = ("model", "type", "prompt/new", "system", "total ms", "spread ms", "first token ms", "ms per token", "floor ms", "bandwidth",
            "ours is faster", "runs")
    cells = []
    for row in rows:
        named = (row["model"], TYPES.get(row["dtype"], row["dtype"]), row["workload"], row["system"])
        if row["why"]:
            cells.append((*named, *"----", f"{row['floor_step_ms']:.3f}", "-", "-", "0"))
            continue
        times = (f"{row['e2e_ms']:.1f}", f"{row['spread_ms']:.1f}", f"{row['prefill_ms']:.2f}", f"{row['step_ms']:.3f}")
        cells.append((*named[:3], row["system"] + (" (estimated)" if row["estimated"] else ""), *times, f"{row['floor_step_ms']:.3f}",
                      f"{row['floor_step_ms'] / row['step_ms']:.0%}", _said(_ratio(rows, row)), str(row["repetitions"])))
    reasons = dict.fromkeys(f"{row['model']} {row['workload']}: {row['why']}." for row in rows if row["why"])
    return "\n\n".join([table(head, cells), *([" ".join(reasons)] if reasons else [])])


def ratios(document: dict[str, Any]) -> str:
    """How many times faster ours is end to end, by model, peer and workload, with the geometric mean."""
    rows = sorted(document["rows"], key=_order)
    workloads = list(dict.fromkeys(row["workload"] for row in sorted(rows, key=lambda row: lengths_of(row["workload"]))))
    found: dict[tuple[str, str, str], dict[str, tuple[float, bool]]] = {}
    for row in sorted(rows, key=lambda row: row["run"]):  # the last command that measured both
        ratio = _ratio(rows, row)
        if ratio is not None and row["system"] != OURS:
            found.setdefault((row["model"], row["dtype"], row["system"]), {})[row["workload"]] = (ratio, row["estimated"])
    cells = []
    for (model, dtype, system), by in sorted(found.items(), key=lambda item: (*place_of(item[0][0]), _system(item[0][2]))):
        mean = 1.0
        for ratio, _ in by.values():
            mean *= ratio ** (1 / len(by))
        shown = [_said(by[name][0]) + (" est." if by[name][1] else "") if name in by else "-" for name in workloads]
        cells.append((model, TYPES.get(dtype, dtype), system, *shown, f"{mean:.2f}x"))
    return table(("model", "type", "ours over", *workloads, "geometric mean"), cells)


def _ratio(rows: list[Row], row: Row) -> float | None:
    """How many times longer a row's system takes than ours in the same command; None where one of both was not timed."""
    same = ("model", "dtype", "workload", "run")
    ours = [other for other in rows if other["system"] == OURS and not other["why"] and all(other[key] == row[key] for key in same)]
    return row["e2e_ms"] / ours[0]["e2e_ms"] if ours and not row["why"] else None


def _said(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def lengths_of(workload: str) -> list[int]:
    """The numbers in a workload's name, to sort by."""
    return [int(number) for number in re.findall(r"\d+", workload)]


def place_of(name: str) -> tuple[int, str]:
    """Where a model stands in tables."""
    return (MODELS.index(name) if name in MODELS else len(MODELS), name)


def _system(name: str) -> int:
    return SYSTEMS.index(name) if name in SYSTEMS else len(SYSTEMS)


def _order(row: Row) -> tuple[Any, ...]:
    return (*place_of(row["model"]), row["dtype"], lengths_of(row["workload"]), row["run"], _system(row["system"]))
