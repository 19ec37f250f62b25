"""Remembers which searches ended and who took part: a warm run repeats their outcome, and tries who was not there before."""

from collections.abc import Iterable

from ...context import Context
from ...errors import UsageError
from ...ir import serial
from ...ir.advice import OrderedPlan
from ...store import keys

KIND = "searches"
Server = tuple[str, str]  # signature, implementation


class Search:
    """One call of stage validate: its candidates (by their keys), and the run and round that it is part of.

    ``environment`` is what results depend on beside the candidates (compiler, device, validators). Another budget is
    another search, and so is another set of implementations or of their versions.
    """

    def __init__(self, ordered: tuple[OrderedPlan, ...], records: Iterable[str], environment: str, ctx: Context) -> None:
        config = ctx.config
        budget = (config.budget_s, config.budget_plans, config.rounds, config.seed, config.advisor, config.plugins)
        self._servers = {plan.signature: tuple(sorted(plan.servers)) for plan in ordered}
        served = sorted(self._servers.items())
        self._store = ctx.store
        self._round = max((plan.record.round for plan in ordered), default=0)
        self._this = keys.search_key(records, served, budget, environment)
        self._run = keys.run_key(served, budget, ctx.target, environment)
        self._lists = {signature: keys.servers_key(signature, ctx.target, environment) for signature in self._servers}
        self._known = {signature: self._seen(key) for signature, key in self._lists.items()}
        self.new = self._newcomers()

    @property
    def ended(self) -> bool:
        """Whether this search was done before, or an earlier round of the same run had used up the time."""
        if self._store.text(KIND, self._this) is not None:
            return True
        spent = self._store.text(KIND, self._run)
        return spent is not None and spent.isdecimal() and self._round > int(spent)

    def end(self, *, out_of_time: bool, tried: frozenset[Server] = frozenset()) -> None:
        """Note that this search ended, whether time ran out in it, and of which newcomers something was tried."""
        self._store.put_text(KIND, self._this, "ended")
        if out_of_time:
            self._store.put_text(KIND, self._run, str(self._round))
        left = self.new - tried if out_of_time else frozenset()
        for signature, key in self._lists.items():
            took_part = {s for s in self._servers[signature] if (signature, s[0]) not in left}
            self._store.put_text(KIND, key, serial.dumps(sorted({*took_part, *(self._known[signature] or ())})))

    def _newcomers(self) -> frozenset[Server]:
        """Implementations, or new versions of them, that took no part in earlier searches of their region, where there were some."""
        return frozenset((signature, name) for signature, servers in self._servers.items() for name, version in servers
                         if self._known[signature] is not None and (name, version) not in self._known[signature])  # type: ignore[operator]

    def _seen(self, key: str) -> frozenset[tuple[str, int]] | None:
        text = self._store.text(KIND, key)
        try:
            return None if text is None else frozenset((str(name), int(version)) for name, version in serial.parse(text))
        except (UsageError, TypeError, ValueError):
            return None
