"""The tables of coverage.json: what is supported, and one row per model type and module."""

from collections import Counter
from typing import Any

from markdown_table import table

Rows = dict[str, list[dict[str, Any]]]  # the rows of both orders by name


def _rows(document: dict[str, Any], kind: str) -> Rows:
    found: Rows = {}
    for row in document["rows"]:
        if row["kind"] == kind:
            found.setdefault(row["name"], []).append(row)
    return found


def _is_ok(rows: list[dict[str, Any]]) -> bool:
    return all(row["outcome"] == "ok" for row in rows)


def supported(document: dict[str, Any]) -> str:
    """Model types by how they run; only those that gave HuggingFace's tokens and logits in both orders."""
    right = {name: rows for name, rows in _rows(document, "model").items() if _is_ok(rows)}
    captured = sorted(name for name, rows in right.items() if rows[0]["path"] == "captured")
    rest = sorted(name for name, rows in right.items() if rows[0]["path"] != "captured")
    seeing = sorted(name for name, rows in _rows(document, "image").items() if _is_ok(rows) and rows[0]["path"] == "captured")
    return table(("how it runs", "model types of transformers"),
                 [("compiled: captured, kernels where one is better", ", ".join(f"`{name}`" for name in captured)),
                  *([("the same, with prompts of images", ", ".join(f"`{name}`" for name in seeing))] if seeing else []),
                  ("HuggingFace's own loop, with the reason shown", ", ".join(f"`{name}`" for name in rest))])


def counts(document: dict[str, Any]) -> str:
    """Outcomes by kind and order."""
    rows = []
    for kind in ("model", "image", "module"):
        for order in (1, 2) if _rows(document, kind) else ():
            some = [row for row in document["rows"] if (row["kind"], row["order"]) == (kind, order)]
            found = Counter(row["outcome"] for row in some)
            run = sum(1 for row in some if row.get("kernels_run"))
            captured = sum(1 for row in some if row.get("path") == "captured")
            rows.append((f"{kind}s, order {order}", *(str(n) for n in (len(some), found["ok"], found["wrong"], found["raised"],
                                                                       captured, run))))
    return table(("", "judged", "ok", "wrong", "raised", "captured", "with generated kernels that ran"), rows)


def planned(document: dict[str, Any]) -> str:
    """One row per model type at its real size: how many reach the bar, then each."""
    rows = []
    for row in document["rows"]:
        left = ", ".join(f"{count} {op}" for op, count in list(row.get("framework_operators", {}).items())[:4])
        size = f"{row['parameters'] / 1e9:.2f}" if row.get("parameters") else ""
        rows.append((f"`{row['name']}`", size, f"{row['share']:.2%}", str(sum(row.get("kernels", {}).values())), f"{row['seconds']:.1f}",
                     row["reason"] or left))
    head = ("model type", "billions of parameters", "decode bytes that plans cover", "kernels", "seconds", "what is left, or why not")
    text = table(head, [tuple(cell.replace("|", "\\|") for cell in row) for row in rows])
    return f"{document['planned']} of {len(rows)} types are planned with at least {document['bar']:.0%} of their decode bytes.\n\n{text}"


def models(document: dict[str, Any]) -> str:
    """One row per model type."""
    return _each(_rows(document, "model"), "model type")


def images(document: dict[str, Any]) -> str:
    """One row per model type that reads images."""
    found = _rows(document, "image")
    return _each(found, "model type") if found else "No images were judged here."


def modules(document: dict[str, Any]) -> str:
    """One row per module."""
    return _each(_rows(document, "module"), "module")


def _each(found: Rows, what: str) -> str:
    rows = []
    for name, (first, *others) in sorted(found.items()):
        outcome = "ok" if _is_ok([first, *others]) else "; ".join(f"{r['outcome']}: {r['why']}" for r in (first, *others) if r["why"])
        seconds = " / ".join(f"{row['seconds']:.1f}" for row in (first, *others))
        note = first.get("reason", "").partition(" runs on the framework: ")[2]
        rows.append((f"`{name}`", outcome, first.get("path", ""), f"{first.get('generated_share', 0.0):.0%}",
                     str(first.get("kernels_run", 0)), seconds, note))
    head = (what, "outcome", "path", "bytes through generated kernels", "kernels that ran", "seconds, order 1 / 2", "why not captured")
    return table(head, [tuple(cell.replace("|", "\\|") for cell in row) for row in rows])
