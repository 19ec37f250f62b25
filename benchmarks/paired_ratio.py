"""The ratio of two times that were taken in turns, with the bound that "no slower" is decided by."""

import math
import statistics
from collections.abc import Sequence

NO_SLOWER = 1.03  # the upper bound of the ratio, at most
HALF_WIDTH = 2.1  # standard errors: 95 % of Student's distribution for about 20 pairs


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean of ours[i] / theirs[i], and half the width of its 95 % confidence interval; at least two pairs."""
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    return statistics.mean(ratios), HALF_WIDTH * statistics.stdev(ratios) / math.sqrt(len(ratios))
