"""One budget of seconds with one deadline, from the first question to the advisor to the last pair of the chain."""

import time
from collections.abc import Callable

# Of a budget of FIRST_S nothing is kept, from 21 s on all of it: with less a kernel for every step is worth more than the best of some.
FIRST_S, RAMP = 8.0, 1.6
CHAIN_SHARE = 0.27
RANGES_SHARE, RANGES_LEAST_S = 0.13, 1.5  # for steps at later positions, where a model has some
# Of a search of LONG_S or more as much for these as for the first positions, at which the winners are among the first hundred trials.
LONG_S, EVEN_SHARE = 40.0, 0.2
WINNERS_SHARE = 0.1
SPARE_SHARE = 0.05  # of the total at the most, and of what is left, for validators of winners that need not be asked
ADVICE_SHARE = 0.5  # of what is left for the search when a round begins


class Budget:
    """``total_s`` seconds that begin with ``start``. What a later purpose reserved, an earlier one cannot use up.

    A search takes at most ``total_s`` and the grace of what is running when it ends: one measurement of the chain, or
    one answer of an advisor that does not keep its own deadline.
    """

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_s = total_s
        self._clock = clock
        self._end: float | None = None
        self._reserved: dict[str, float] = {}

    def start(self) -> None:
        """The clock runs from here; starting again changes nothing."""
        if self._end is None:
            self._end = self._clock() + self.total_s

    def delay(self, seconds: float) -> None:
        """Move the deadline by the seconds for which the search could not begin: its worker was still starting."""
        self.start()
        assert self._end is not None
        self._end += seconds

    def reserve(self, purpose: str, share: float, least_s: float = 0.0) -> None:
        """Keep ``share`` of the total, of a small one less, for ``purpose``, which comes later; ``least_s`` at least, but of the smallest
        nothing."""
        least_s = least_s if self.total_s > FIRST_S else 0.0
        self._reserved[purpose] = max(least_s, share * min(self.total_s, max(0.0, RAMP * (self.total_s - FIRST_S))))

    def now(self) -> float:
        """The time on its clock."""
        return self._clock()

    def left_s(self, purpose: str = "") -> float:
        """Seconds that ``purpose`` may use now: until the deadline, less what others reserved, and no more than it reserved itself."""
        self.start()
        assert self._end is not None
        others = sum(kept for name, kept in self._reserved.items() if name != purpose)
        left = max(0.0, self._end - self._clock() - others)
        return min(left, self._reserved.get(purpose, left))

    def stop_at(self, purpose: str = "") -> float:
        """When ``purpose`` has to end, on the budget's clock (``time.monotonic``)."""
        return self._clock() + self.left_s(purpose)

    def done(self, purpose: str) -> None:
        """What ``purpose`` reserved and did not use is free for what comes after it."""
        self._reserved.pop(purpose, None)
