"""Two variants of a step compared by samples in pairs: how long one takes, in units of the other."""

import math
import statistics
from typing import Protocol

PAIRS = 7
QUICK = 1.01  # times the incumbent: what two quick ratios must be beyond for a challenger to be no winner


class Timed(Protocol):
    """What can be timed."""

    def sample_us(self) -> float:
        """Microseconds of one run, over some runs."""


def paired_ratio(challenger: Timed, best: Timed, margin: float) -> float:
    """The upper bound of their paired ratio; of one that is clearly slower, the smaller of two quick ratios.

    The first sample of a challenger comes after the device had nothing to do while it was captured, and any one sample may be disturbed:
    one alone rejects nothing. The challenger wins below 1 - ``margin``.
    """
    quick = challenger.sample_us() / best.sample_us()
    if quick > QUICK:
        quick = min(quick, challenger.sample_us() / best.sample_us())
        if quick > QUICK:
            return quick
    ratios: list[float] = []
    for pair in range(PAIRS):
        samples = (challenger.sample_us(), best.sample_us()) if pair % 2 else tuple(reversed((best.sample_us(), challenger.sample_us())))
        ratios.append(samples[0] / samples[1])
        if lower_bound(ratios) > 1.0 - margin:
            break  # more pairs would not make it win
    return upper_bound(ratios)


def upper_bound(ratios: list[float]) -> float:
    """Upper end of the 95 % confidence interval of the mean of paired ratios (normal approximation with t for few pairs)."""
    return statistics.mean(ratios) + _half_width(ratios)


def lower_bound(ratios: list[float]) -> float:
    """Its lower end."""
    return statistics.mean(ratios) - _half_width(ratios)


def _half_width(ratios: list[float]) -> float:
    if len(ratios) < 2:
        return math.inf
    t = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(ratios), 2.0)
    return t * statistics.stdev(ratios) / math.sqrt(len(ratios))
