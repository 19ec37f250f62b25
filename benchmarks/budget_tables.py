"""The table of budgets.json: budget over error of the framework's own results, by family, element type and size."""

from typing import Any

from markdown_table import table

EXACT = "exact: no error is allowed, and none was seen"


def budgets(document: dict[str, Any]) -> str:
    """One row per family and element type; a cell is size: median (least) of the budget over the error."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in document["rows"]:
        groups.setdefault((row["family"], row["dtype"]), []).append(row)
    rows = []
    for (family, dtype), some in groups.items():
        cells = "; ".join(f"{r['size']}: {r['median']:.1f} ({r['least']:.1f})" for r in some if r["median"])
        rows.append((family, dtype, cells or EXACT, str(min(r["draws"] for r in some)), str(sum(r["outside"] for r in some))))
    return table(("family", "type", "budget over error: median (least)", "draws each", "outside"), rows)
