"""Remembers which searches ended and who took part: a warm run repeats their outcome, and tries who was not there before."""

from collections.abc import Iterable

from ...context import Context
from ...errors import UsageError
from ...ir import serial
from ...ir.advice import OrderedPlan
from ...plugin.catalog import Catalog
from ...plugin.settings import identity
from ...store import Store, keys

KIND = "searches"
ENDED = "ended"  # behind it stand the keys of what a failure of the moment took part in, to be tried once more
Server = tuple[str, str]  # signature, implementation
State = tuple[str, int, str]  # an implementation as it took part: name, version, digest of its settings (empty: the defaults)


class Search:
    """One call of stage validate: its candidates (by their keys), and the run and round that it is part of.

    ``environment`` is what results depend on beside the candidates (compiler, device, validators). Another budget is
    another search, and so is another set of implementations, one of them with another version or other settings, and
    another advisor or a changed one.
    """

    def __init__(self, ordered: tuple[OrderedPlan, ...], records: Iterable[str], environment: str, ctx: Context) -> None:
        self._servers = _servers(ordered, ctx)
        self._store, self._round = ctx.store, _round(ordered)
        self._this = keys.search_key(records, sorted(self._servers.items()), _budget(ctx), environment)
        self._run = _run_key(ordered, environment, ctx)
        self._lists = {signature: keys.servers_key(signature, ctx.target, environment) for signature in self._servers}
        self._known = {signature: self._seen(key) for signature, key in self._lists.items()}
        self.new = self._newcomers()

    @property
    def ended(self) -> bool:
        """Whether this search was done before, or an earlier round of the same run had used up the time."""
        return self._store.text(KIND, self._this) is not None or _spent(self._store, self._run, self._round)

    @property
    def lost(self) -> frozenset[str]:
        """The keys of candidates to be tried once more, since something of the moment failed when this search ended: the memory of a
        device that others filled, a defect of a plugin."""
        return frozenset((self._store.text(KIND, self._this) or "").split()[1:])

    def retried(self, untried: Iterable[str]) -> None:
        """Note that what was ``lost`` was tried again, but for ``untried``: no later run pays for what failed once more."""
        self._store.put_text(KIND, self._this, " ".join((ENDED, *sorted(untried))))

    def end(self, *, out_of_time: bool, tried: frozenset[Server] = frozenset(), lost: Iterable[str] = ()) -> None:
        """Note that this search ended, whether time ran out in it, of which newcomers something was tried, and what was ``lost``."""
        self._store.put_text(KIND, self._this, " ".join((ENDED, *sorted(lost))))
        if out_of_time:
            self._store.put_text(KIND, self._run, str(self._round))
        left = self.new - tried if out_of_time else frozenset()
        for signature, key in self._lists.items():
            took_part = {s for s in self._servers[signature] if (signature, s[0]) not in left}
            self._store.put_text(KIND, key, serial.dumps(sorted({*took_part, *(self._known[signature] or ())})))

    def _newcomers(self) -> frozenset[Server]:
        """Implementations that took no part in earlier searches of their region as they are now, where there were some searches."""
        return frozenset((signature, state[0]) for signature, servers in self._servers.items() for state in servers
                         if self._known[signature] is not None and state not in self._known[signature])  # type: ignore[operator]

    def _seen(self, key: str) -> frozenset[State] | None:
        text = self._store.text(KIND, key)
        try:
            return None if text is None else frozenset((str(name), int(version), str(settings))
                                                       for name, version, settings in serial.parse(text))
        except (UsageError, TypeError, ValueError):
            return None


def spent_before(ordered: tuple[OrderedPlan, ...], environment: str, ctx: Context) -> bool:
    """Whether an earlier round of the same run had used up the time. What other runs may have measured of this one is not taken up: a
    warm run ends as the cold one did."""
    return _spent(ctx.store, _run_key(ordered, environment, ctx), _round(ordered))


def _spent(store: Store, run: str, number: int) -> bool:
    spent = store.text(KIND, run)
    return spent is not None and spent.isdecimal() and number > int(spent)


def _run_key(ordered: tuple[OrderedPlan, ...], environment: str, ctx: Context) -> str:
    return keys.run_key(sorted(_servers(ordered, ctx).items()), _budget(ctx), ctx.target, environment)


def _round(ordered: tuple[OrderedPlan, ...]) -> int:
    return max((plan.record.round for plan in ordered), default=0)


def _servers(ordered: tuple[OrderedPlan, ...], ctx: Context) -> dict[str, tuple[State, ...]]:
    return {plan.signature: tuple(_state(name, version, ctx.catalog) for name, version in plan.servers) for plan in ordered}


def _budget(ctx: Context) -> tuple[object, ...]:
    config = ctx.config
    return float(config.budget_s), config.budget_plans, config.rounds, config.seed, _advisor(config.advisor, ctx.catalog), config.plugins


def _state(name: str, version: int, catalog: Catalog) -> State:
    offer = catalog.template_families.get(name) or catalog.implementations.get(name)
    return name, version, "".join(identity(offer)) if offer is not None else ""


def _advisor(name: str, catalog: Catalog) -> tuple[str | int, ...]:
    """The advisor as it is now: an older version of it, or one with other settings, asked for another search."""
    found: list[str | int] = [name]
    for qualified, offer in sorted(catalog.advisors.items()):
        if name in (offer.name, qualified):
            found += [offer.version, *identity(offer)]
    return tuple(found)
