"""The tables of mutants.json: what became of wrong kernels, by class of mistake and by where it was made; and every one that is right."""

from typing import Any

from markdown_table import table

REFUSED = ("killed by numerics", "killed by emulation", "killed in execution")
HEAD = ("judged", "refused by numerics", "by emulation", "while it ran", "same machine code", "right, by proof", "within the budget",
        "wrong and eligible", "did not compile")


def _cells(counts: dict[str, int]) -> tuple[str, ...]:
    judged = counts["generated"] - counts["not compiling"]
    rest = (counts[name] for name in (*REFUSED, "identical machine code", "equivalent by proof", "within the budget by proof",
                                      "wrong and eligible", "not compiling"))
    return tuple(str(n) for n in (judged, *rest))


def by_class(document: dict[str, Any]) -> str:
    """One row per class of mistake, and all of them."""
    rows = {**document["by_class"], "all": document["total"]}
    return table(("class", *HEAD), [(name, *_cells(counts)) for name, counts in rows.items()])


def by_family(document: dict[str, Any]) -> str:
    """One row per family and one for the device library."""
    return table(("text of", *HEAD), [(name, *_cells(counts)) for name, counts in document["by_family"].items()])


def right(document: dict[str, Any]) -> str:
    """One row per mutant that is right: why, and what was compared."""
    rows = [(f"`{row['file']}`", row["operator"], f"`{row['after']}`", row["proof"],
             f"{row['cases']:,}" + (", within the budget" if row["outcome"] == "within the budget" else ", bit for bit"))
            for row in document["rows"] if row.get("proof")]
    rows += [(f"`{row['file']}`", row["operator"], f"`{row['after']}`", "the same machine code", "-")
             for row in document["rows"] if row["outcome"] == "identical machine code"]
    return table(("file", "operator", "became", "why it is right", "random cases that agree"),
                 [tuple(cell.replace("|", "\\|") for cell in row) for row in sorted(rows)])
