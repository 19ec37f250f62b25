"""How long a long generation takes, from short ones at its first, middle and last context (docs/performance.md says which rows)."""

from collections.abc import Callable, Sequence

SPAN = 64  # steps between the two requests whose difference is a step's time
Ask = Callable[[int, int], float]  # (tokens of the prompt, new tokens) -> milliseconds


def contexts(given: int, new_tokens: int) -> tuple[int, int, int]:
    """Lengths of prompts at the begin, in the middle and at the end of a generation; all of SPAN + 1 new tokens fit behind each."""
    last = given + new_tokens - SPAN - 1
    return given, (given + last) // 2, last


def estimated(ask: Ask, given: int, new_tokens: int) -> tuple[float, float]:
    """Milliseconds of the whole generation and of its first token.

    A step's time at a context is (t(SPAN + 1) - t(1)) / SPAN there; between contexts it is taken to change linearly.
    """
    first_ms, points = 0.0, []
    for context in contexts(given, new_tokens):
        one, more = ask(context, 1), ask(context, SPAN + 1)
        first_ms = first_ms or one
        points.append((context + (SPAN + 1) / 2, (more - one) / SPAN))  # its middle step leaves that many positions behind
    return first_ms + sum(_at(points, given + step) for step in range(1, new_tokens)), first_ms


def _at(points: Sequence[tuple[float, float]], position: float) -> float:
    (x0, y0), (x1, y1) = points[:2] if position <= points[1][0] else points[1:]
    return y0 + (y1 - y0) * (position - x0) / (x1 - x0)
