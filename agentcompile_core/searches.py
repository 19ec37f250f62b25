"""Remembers which searches ended, so that a warm run repeats their outcome instead of going on where time ran out."""

from collections.abc import Iterable
from typing import Any

from . import serial
from .advice import OrderedPlan
from .context import Context

KIND = "searches"


class Search:
    """One call of stage validate: its candidates (by their keys), and the run and round that it is part of.

    ``environment`` is what results depend on beside the candidates (compiler, device, validators). Another budget is
    another search.
    """

    def __init__(self, ordered: tuple[OrderedPlan, ...], keys: Iterable[str], environment: tuple[Any, ...], ctx: Context) -> None:
        config = ctx.config
        budget = (config.budget_s, config.budget_plans, config.rounds, config.seed, config.advisor, config.advisor_options)
        signatures = sorted(plan.signature for plan in ordered)
        self._store = ctx.store
        self._round = max((plan.record.round for plan in ordered), default=0)
        self._this = "search-" + serial.digest(sorted(keys), budget, environment, length=32)
        self._run = "run-" + serial.digest(signatures, budget, environment, ctx.target, length=32)

    @property
    def ended(self) -> bool:
        """Whether this search was done before, or an earlier round of the same run had used up the time."""
        if self._store.text(KIND, self._this) is not None:
            return True
        spent = self._store.text(KIND, self._run)
        return spent is not None and spent.isdecimal() and self._round > int(spent)

    def end(self, *, out_of_time: bool) -> None:
        """Note that this search ended, and whether time ran out in it."""
        self._store.put_text(KIND, self._this, "ended")
        if out_of_time:
            self._store.put_text(KIND, self._run, str(self._round))
