"""A time line for people: as text, as a document, as a picture."""

import math
from collections.abc import Callable
from typing import Any
from xml.sax.saxutils import escape

from ..ir import serial
from ..ir.timeline import OUTSIDE, WORDS, Loss, PhaseTimes, TimeLine, TracedLaunch
from ..plugin.phases import PHASES
from .tables import table

NAMED = 3  # losses in the summary
WIDTH, LEFT, ROW, TOP, GAP = 1000, 260, 28, 76, 34  # of the picture
MARKS = {"first": "#1a9850", "last": "#f2a900", "merged": "#8e44ad"}
STEPS_US, MOST_LINES = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e9), 14  # between two lines, and how many


def trace_document(line: TimeLine) -> dict[str, Any]:
    """Everything as plain types; times in microseconds from the release of the layer's first step."""
    document: dict[str, Any] = serial.unstructure(line)
    return {**document, "meaning": {"losses": WORDS, "phases": list(PHASES)}}


def trace_text(line: TimeLine) -> str:
    """The layer's steps with their phases, what a layer takes beside what its bytes need, and the largest losses."""
    head = ("step", "blocks", "MB", "floor us", *(f"{phase} us" for phase in PHASES))
    rows = [(_name(launch, line), launch.blocks, round(launch.nbytes / 1e6, 2), round(launch.floor_us, 2),
             *(_cell(launch.at(phase), phase) for phase in PHASES)) for launch in line.launches]
    said = [
        f"{line.model}, {line.program} at position {line.position}: layer {line.layer} of {line.layers} takes {line.layer_us:.2f} us, "
        f"its bytes need {line.layer_floor_us:.2f} us; a step takes {line.token_us:.1f} us ({line.noted_us:.1f} us while it is noted, "
        f"the clock counts in {line.clock_ns} ns)",
        "",
        table(rows, head),
        "mean of the blocks from the release of the first step on; of starts and ends the first, the mean and the last block",
        "",
    ]
    if not line.losses:
        return "\n".join((*said, "nothing was lost that can be named"))
    return "\n".join((*said, f"the {min(NAMED, len(line.losses))} largest losses:", *map(_loss, line.losses[:NAMED])))


def _loss(loss: Loss) -> str:
    return f"  {loss.token_us:7.1f} us per token, {loss.us:.2f} us each: {loss.label} {loss.what} ({WORDS[loss.what]}; {loss.step})"


def _name(launch: TracedLaunch, line: TimeLine) -> str:
    where = {line.layer: "", OUTSIDE: " (behind the layers)"}.get(launch.layer, " (next layer)")
    return f"{launch.label}{where}"


def _cell(times: PhaseTimes | None, phase: str) -> str:
    if times is None:
        return "-"
    if phase in (PHASES[0], PHASES[-1]):
        return f"{times.least_us:.2f} {times.mean_us:.2f} {times.most_us:.2f}"
    return f"{times.mean_us:.2f}"


def trace_picture(line: TimeLine) -> str:
    """An SVG: a row per launch, from its first block's start to its last one's end, darker from the release on, with its phases. What
    lies behind the layers has a scale of its own."""
    layer = [launch for launch in line.launches if launch.layer != OUTSIDE]
    behind = [launch for launch in line.launches if launch.layer == OUTSIDE]
    first, y = _panel(layer, line, TOP)
    second, y = _panel(behind, line, y + GAP) if behind else ([], y)
    marks = [_text(LEFT + number * 110, 44, f"| {phase}", colour) for number, (phase, colour) in enumerate(MARKS.items())]
    named = [_text(12, y + 20 + 18 * number, f"{number + 1}. {loss.label}: {loss.what}, {loss.token_us:.0f} us per token")
             for number, loss in enumerate(line.losses[:NAMED])]
    height = y + 20 + 18 * NAMED
    title = f"{line.model}, layer {line.layer} at position {line.position}: {line.layer_us:.1f} us, its bytes {line.layer_floor_us:.1f} us"
    return "\n".join((f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
                      f"<title>{escape(title)}</title>", f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
                      _text(12, 22, title), *marks, *first, *second, *named, "</svg>")) + "\n"


def _panel(launches: list[TracedLaunch], line: TimeLine, top: int) -> tuple[list[str], int]:
    """Rows on one scale below an axis, and where they end."""
    times = [times for launch in launches for times in launch.phases]
    first, last = min((t.least_us for t in times), default=0.0), max((t.most_us for t in times), default=1.0)
    scale = (WIDTH - LEFT - 20) / max(last - first, 1e-9)

    def x(us: float) -> float:
        return LEFT + (us - first) * scale

    bottom = top + ROW * len(launches)
    parts, step = [], next(s for s in STEPS_US if (last - first) / s <= MOST_LINES)
    for number in range(math.ceil(first / step), math.floor(last / step) + 1):
        at = x(number * step)
        parts += [f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}" stroke="#ddd"/>',
                  _text(at, top - 5, f"{number * step:g}", "#555", "middle")]
    for index, launch in enumerate(launches):
        parts += _row(launch, _name(launch, line), top + ROW * index, x)
    return parts, bottom


def _row(launch: TracedLaunch, name: str, y: int, x: Callable[[float], float]) -> list[str]:
    start, released, end = launch.at("start"), launch.at("released"), launch.at("end")
    found = [_text(12, y + 18, name)]
    if start is not None and end is not None:
        found.append(_bar(x(start.least_us), x(end.most_us), y + 4, 18, "#cfe0f3"))
        found.append(_bar(x((released or start).mean_us), x(end.mean_us), y + 8, 10, "#2f6fb3"))
    for phase, colour in MARKS.items():
        times = launch.at(phase)
        if times is not None:
            found.append(f'<line x1="{x(times.mean_us):.1f}" y1="{y + 2}" x2="{x(times.mean_us):.1f}" y2="{y + 24}" stroke="{colour}" '
                         f'stroke-width="2"><title>{phase} {times.mean_us:.2f} us</title></line>')
    return found


def _text(x: float, y: int, text: str, colour: str = "#222", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-family="sans-serif" font-size="12" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'


def _bar(left: float, right: float, y: int, height: int, colour: str) -> str:
    return f'<rect x="{left:.1f}" y="{y}" width="{max(right - left, 1.0):.1f}" height="{height}" fill="{colour}"/>'
