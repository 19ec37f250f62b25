"""How long a long generation takes, from short ones at its first, middle and last context (docs/performance.md says which rows)."""

from collections.abc import Callable, Sequence
from statistics import median

SPAN = 64  # steps between the two requests whose difference is a step's time
MOST_PAIRS, PAIRS_MS = 5, 3_000.0  # of such requests at a context: so many, or until they took so long; never none
Ask = Callable[[int, int], float]  # (tokens of the prompt, new tokens) -> milliseconds


def contexts(given: int, new_tokens: int) -> tuple[int, int, int]:
    """Lengths of prompts at the begin, in the middle and at the end of a generation; all of SPAN + 1 new tokens fit behind each."""
    last = given + new_tokens - SPAN - 1
    return given, (given + last) // 2, last


def estimated(ask: Ask, given: int, new_tokens: int) -> tuple[float, float]:
    """Milliseconds of the whole generation and of its first token.

    A step's time at a context is (t(SPAN + 1) - t(1)) / SPAN there, of several such pairs the median: where a step is fast the prompt is
    longer than SPAN of them, and one prompt that takes 5 % more or less would be 0.1 ms a step. Between contexts it is taken to change
    linearly.
    """
    first_ms, points = 0.0, []
    for context in contexts(given, new_tokens):
        took, spans = 0.0, []
        while not spans or (took < PAIRS_MS and len(spans) < MOST_PAIRS):
            one, more = ask(context, 1), ask(context, SPAN + 1)
            first_ms = first_ms or one
            took += one + more
            spans.append(more - one)
        points.append((context + (SPAN + 1) / 2, median(spans) / SPAN))  # its middle step leaves that many positions behind
    return first_ms + sum(_at(points, given + step) for step in range(1, new_tokens)), first_ms


def cost_ms(one_ms: float, step_ms: float) -> float:
    """How long the requests at a context take at most, where one of one token takes ``one_ms``."""
    pair_ms = 2 * one_ms + SPAN * step_ms
    return pair_ms + min(PAIRS_MS, (MOST_PAIRS - 1) * pair_ms)


def _at(points: Sequence[tuple[float, float]], position: float) -> float:
    (x0, y0), (x1, y1) = points[:2] if position <= points[1][0] else points[1:]
    return y0 + (y1 - y0) * (position - x0) / (x1 - x0)
