"""The table of ablation.json, and beside it the paper's."""

from collections.abc import Mapping, Sequence
from typing import Any

from markdown_table import table
from sweep_tables import TYPES, lengths_of, place_of

Row = dict[str, Any]
ROLES = ("linear", "attention", "fused_ops", "kv_cache", "decode")
WORKLOADS = ("128/128", "2048/512", "8192/4096", "12288/8192", "20480/16384")
# Table 4 of the paper: Qwen3-4B, fp16, A800 80 GB, milliseconds of a whole generation; each row has what the one above it has.
PAPER = {"baseline (eager)": (3822, 15459, 124528, 295926, 498025),
         "+ CUDALinear and generated GEMV": (2828, 11370, 88024, 174539, 351178),
         "+ FlashAttention with KV-cache update, FlashKVCacheManager, fused QKV": (2699, 10818, 85913, 171693, 365678),
         "+ CUDA Graph replay": (1180, 4879, 42477, 89312, 197032),
         "+ LLM-advised candidates and fused kernels": (849, 3536, 32235, 68706, 155997)}


def ablation(document: dict[str, Any]) -> str:
    """Milliseconds by row and workload for each model, with who serves each role; the paper's rows below."""
    rows, parts = document["rows"], []
    for model, dtype in sorted({(row["model"], row["dtype"]) for row in rows}, key=lambda one: (place_of(one[0]), one[1])):
        mine = [row for row in rows if (row["model"], row["dtype"]) == (model, dtype)]
        workloads = sorted({row["workload"] for row in mine}, key=lengths_of)
        last = {workload: max(row["run"] for row in mine if row["workload"] == workload) for workload in workloads}
        mine = [row for row in mine if row["run"] == last[row["workload"]]]  # rows are compared within one command
        times: dict[str, dict[str, Row]] = {}
        for row in sorted(mine, key=lambda row: row["place"]):
            times.setdefault(_name(row), {})[row["workload"]] = row
        parts.append(f"{model}, {TYPES.get(dtype, dtype)}:\n\n{_rows(times, workloads)}{_reasons(mine)}")
    shown = {name: {w: {"e2e_ms": ms, "estimated": False, "why": ""} for w, ms in zip(WORKLOADS, values, strict=True)}
             for name, values in PAPER.items()}
    theirs = "The paper's Table 4 (Qwen3-4B, fp16, A800 80 GB: another GPU, and roles in another order):"
    return "\n\n".join([*parts, theirs, _rows(shown, WORKLOADS)])


def _rows(times: Mapping[str, Mapping[str, Row]], workloads: Sequence[str]) -> str:
    cells, above = [], dict[str, float]()
    for name, by in times.items():
        known = {workload: row["e2e_ms"] for workload, row in by.items() if not row["why"]}
        steps = [above[workload] / ms for workload, ms in known.items() if workload in above]
        mean = 1.0
        for step in steps:
            mean *= step ** (1 / len(steps))
        shown = [f"{known[w]:.0f}{' est.' if by[w]['estimated'] else ''}" if w in known else "-" for w in workloads]
        roles = next(iter(by.values())).get("roles", {})
        cells.append((name, *(roles[role] for role in ROLES if roles), *shown, f"{mean:.2f}x" if steps else "-"))
        above = {**above, **known}
    named = ROLES if cells and len(cells[0]) > len(workloads) + 2 else ()
    return table(("ms of a whole generation", *named, *workloads, "over the row above, geometric mean"), cells)


def _name(row: Row) -> str:
    steps = row.get("steps")
    added = ", ".join(f"{role} {kind}" for role, kind in row["adds"].items())
    launched = f" ({sum(steps.values()) - steps['framework nodes']} kernels per token)" if steps else ""
    return (f"+ {added}" if added else "baseline (eager)") + launched


def _reasons(rows: Sequence[Row]) -> str:
    reasons = dict.fromkeys(f"{row['workload']}: {row['why']}." for row in rows if row["why"])
    return "\n\n" + " ".join(reasons) if reasons else ""
