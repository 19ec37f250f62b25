"""The table of batches.json: what rows that share one reading of the weights win over rows one by one."""

from typing import Any

from markdown_table import table

TOGETHER, ALONE, EAGER = "together", "one by one", "eager"


def batches(document: dict[str, Any]) -> str:
    """One row per model and number of rows; of a batch that ran row after row it says why."""
    head = ("model", "type", "rows x prompt/new", "a step of all, us", "steps one by one, us", "whole, ms", "one by one, ms", "faster",
            "eager, ms", "over eager", "runs")
    cells = []
    for key in dict.fromkeys((row["model"], row["dtype"], row["workload"]) for row in document["rows"]):
        rows = {row["system"]: row for row in document["rows"] if (row["model"], row["dtype"], row["workload"]) == key}
        first, whole = rows[TOGETHER], {name: row["e2e_ms"] for name, row in rows.items()}
        steps = (f"{first['together_us']:.0f}", f"{first['batch'] * first['single_us']:.0f}") if first["together_us"] else ("-", "-")
        cells.append((*key, *steps, f"{whole[TOGETHER]:.1f}", f"{whole[ALONE]:.1f}", f"{whole[ALONE] / whole[TOGETHER]:.2f}x",
                      *((f"{whole[EAGER]:.0f}", f"{whole[EAGER] / whole[TOGETHER]:.1f}x") if EAGER in whole else ("-", "-")),
                      str(first["repetitions"])))
    reasons = dict.fromkeys(f"{row['model']} {row['workload']}: {row['why']}." for row in document["rows"] if row["why"])
    return "\n\n".join([table(head, cells), *([" ".join(reasons)] if reasons else [])])
