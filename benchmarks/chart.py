"""A bar chart of decode times as SVG, written by hand: no plotting library, the same bytes for the same results."""

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, BAR, GAP, TOP = 760, 130, 16, 18, 46
COLORS = {"eager": "#b0b7c3", "torch_compile": "#7f9cc5", "vllm": "#c59a7f", "agentcompile": "#2a8c5a"}


def decode_chart(rows: Sequence[dict[str, Any]], gpu: str) -> str:
    """Milliseconds per token of every system, grouped by model; bars in the order of ``rows``."""
    longest = max((r["step_ms"] for r in rows), default=1.0)
    scale = (WIDTH - LEFT - 90) / longest
    parts, y, seen = [], TOP, ""
    for row in rows:
        if row["model"] != seen:
            y += GAP if seen else 0
            seen = row["model"]
            parts.append(_text(LEFT - 8, y + 12, seen, "end"))
        color = COLORS.get(row["system"], "#999999")
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{row["step_ms"] * scale:.1f}" height="{BAR - 3}" fill="{color}"/>')
        parts.append(_text(LEFT + row["step_ms"] * scale + 6, y + 11, f"{row['step_ms']:.2f}", "start"))
        y += BAR
    height = y + 16
    head = _text(8, 18, f"Milliseconds per token, 128 tokens after a prompt of 128, fp16, batch 1, {gpu} (less is better)", "start")
    systems = list(dict.fromkeys(r["system"] for r in rows))
    legend = "".join(f'<rect x="{LEFT + 130 * i}" y="26" width="10" height="10" fill="{COLORS.get(s, "#999999")}"/>'
                     + _text(LEFT + 14 + 130 * i, 35, s.replace("_", "."), "start") for i, s in enumerate(systems))
    body = "\n".join([f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', head, legend, *parts])
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n')


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222">{escape(text)}</text>'
