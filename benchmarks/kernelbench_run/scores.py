"""fast_p, a table and a picture of rows. Pure."""

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from markdown_table import table

Row = dict[str, Any]
THRESHOLDS = (1.0, 1.5, 2.0)


def speedup(row: Row) -> float:
    """Times the baseline; 1 where nothing of ours ran, whatever was measured, and 0 where the task is wrong or failed."""
    if not row.get("correct"):
        return 0.0
    return 1.0 if row["is_fallback"] else float(row.get("speedup", 1.0))


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Shares of *all* tasks: correct (fast_0), and faster than 1, 1.5 and 2 times the baseline; a fallback is never faster."""
    count = max(1, len(rows))
    won = [speedup(row) for row in rows if row.get("correct") and not row["is_fallback"]]
    found: dict[str, Any] = {"tasks": len(rows), "fast_0": sum(bool(row.get("correct")) for row in rows) / count}
    for threshold in THRESHOLDS:
        found[f"fast_{threshold:g}"] = sum(value > threshold for value in won) / count
    found["fallbacks"] = sum(bool(row.get("correct")) and row["is_fallback"] for row in rows)
    found["half_by_kernels"] = sum(row.get("generated_share", 0.0) >= 0.5 for row in rows)
    found["geometric_mean_of_kernels"] = math.exp(sum(map(math.log, won)) / len(won)) if won else None
    return found


def sentence(found: dict[str, Any], terms: dict[str, Any]) -> str:
    """A summary in words; ``terms``: the type and the baseline."""
    fast = ", ".join(f"fast_{t:g} {found[f'fast_{t:g}']:.0%}" for t in THRESHOLDS)
    return (f"{found['tasks']} tasks, {terms['dtype']}: {found['fast_0']:.0%} correct (fast_0), {fast} over {terms['baseline']}; "
            f"{found['fallbacks']} fallbacks (counted as 1.0), {found['half_by_kernels']} with half of their bytes or more through kernels")


def outcome(row: Row) -> str:
    """In a word: failed, wrong, fallback or right."""
    if "error" in row:
        return "failed"
    return "wrong" if not row["correct"] else "fallback" if row["is_fallback"] else "right"


def markdown(rows: Sequence[Row]) -> str:
    """One line per task."""
    head = ("task", "outcome", "our tolerance", "bytes by kernels", "us", "baseline us", "speedup", "compile s", "why not more")
    return table(head, [_line(row) for row in rows])


def _line(row: Row) -> tuple[str, ...]:
    name = f"{row['level']}/{row['number']} {row['name']}".lstrip("/")
    if "error" in row:
        return (name, "failed", "", "", "", "", "", f"{row['seconds']:.1f}", _cell(row["error"]))
    ours = {True: "within", False: "beyond", None: "not known"}[row["correct_ours"]]
    times = [f"{row[key]:.1f}" if key in row else "" for key in ("us", "baseline_us")]
    return (name, outcome(row), ours, f"{row['generated_share']:.0%}", *times, f"{speedup(row):.2f}x", f"{row['compile_s']:.1f}",
            _cell(row["why"] or row["reason"] or "; ".join(row["fallbacks"][:2])))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:160]


WIDTH, LEFT, BAR, TOP = 860, 300, 14, 40
COLORS = {"right": "#2a8c5a", "fallback": "#b0b7c3", "wrong": "#c0392b", "failed": "#c0392b"}


def chart(rows: Sequence[Row], baseline: str) -> str:
    """Speedup over the baseline per task as SVG, on a logarithmic scale from 1/4 to 16; grey: a fallback, red: wrong or failed."""
    ordered = sorted(rows, key=lambda row: (-speedup(row), row["name"]))
    low, high = math.log2(0.25), math.log2(16.0)
    scale = (WIDTH - LEFT - 70) / (high - low)
    one = LEFT + (0.0 - low) * scale
    parts = [f'<line x1="{one:.1f}" y1="{TOP - 6}" x2="{one:.1f}" y2="{TOP + BAR * len(ordered)}" stroke="#555555"/>']
    for i, row in enumerate(ordered):
        value, y = speedup(row), TOP + BAR * i
        end = LEFT + (min(high, max(low, math.log2(value))) - low) * scale if value else one
        parts.append(_text(LEFT - 8, y + 10, f"{row['number']} {row['name']}"[:44], "end"))
        width, color = max(2.0, abs(end - one)), COLORS[outcome(row)]
        parts.append(f'<rect x="{min(one, end):.1f}" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{color}"/>')
        parts.append(_text(max(one, end) + 6, y + 10, f"{value:.2f}x" if value else outcome(row), "start"))
    height = TOP + BAR * len(ordered) + 16
    colors = "green: with generated kernels, grey: fallback, counted as 1; red: wrong or failed"
    head = _text(8, 18, f"Speed over {baseline}, each task ({colors})", "start")
    body = "\n".join([f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', head, *parts])
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="sans-serif" font-size="11">\n{body}\n</svg>\n')


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222">{escape(text)}</text>'
