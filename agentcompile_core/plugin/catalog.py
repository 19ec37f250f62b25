"""Find plugins, load each on its own, keep what they offer. What one raises stops neither another nor the host."""

import logging
import re
from collections.abc import Callable
from typing import Any, TypeVar

from attrs import Factory, define, evolve, frozen

from ..errors import AgentCompileError, Cause, ContractError, Failure, StageName, UsageError, last_frames
from ..ir.target import Target
from .events import Event, FailureRecorded, Observer, hook_of, silent
from .failures import Failures
from .interfaces import Advisor, Backend, Frontend, Implementation, Offer, RegionRule, RuntimeIntegration, TemplateFamily, Validator
from .match_kind import MatchKind
from .time_limit import OutOfTime, within

T = TypeVar("T")
log = logging.getLogger(__name__)
CALL_S = 120.0  # for what a plugin answers in this process: rules and families need milliseconds, a first touch of a device seconds
NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
OFFERS: dict[str, type[Offer] | type[Target]] = {
    "agentcompile_frontends": Frontend,
    "agentcompile_region_rules": RegionRule,
    "agentcompile_template_families": TemplateFamily,
    "agentcompile_implementations": Implementation,
    "agentcompile_advisors": Advisor,
    "agentcompile_validators": Validator,
    "agentcompile_runtimes": RuntimeIntegration,
    "agentcompile_backends": Backend,
    "agentcompile_targets": Target,
}
EVENTS = ("agentcompile_stage_finished", "agentcompile_candidate_finished", "agentcompile_failed")


@frozen(kw_only=True)
class PluginInfo:
    """One plugin as found: entry point, distribution, state, what it offers, what is wrong with it.

    ``state``: loaded (it offers something, or has nothing to offer), failed, blocked, other generation (listed, not
    imported), not installed (asked for by name), unreadable (its metadata are damaged).
    """

    name: str
    distribution: str
    state: str
    offers: tuple[str, ...] = ()
    message: str = ""


@define
class Catalog:
    """What the loaded plugins offer, per hook and by qualified name ``<entry point>/<name>``, and what failed."""

    offers: dict[str, dict[str, Any]] = Factory(lambda: {hook: {} for hook in OFFERS})
    plugins: list[PluginInfo] = Factory(list)
    failures: Failures = Factory(Failures)
    strict: bool = False
    manager: Any = None
    observer: Observer = silent
    late: set[str] | None = None  # in a run: who did not come back in time, and is not asked again

    def for_one_run(self, observer: Observer = silent) -> "Catalog":
        """The same plugins with a book of failures of their own (it begins with those of loading) and an observer of all events."""
        return evolve(self, failures=self.failures.copy(), observer=observer, late=set())

    @property
    def frontends(self) -> dict[str, Frontend]:
        """Frontends by qualified name."""
        return self.offers["agentcompile_frontends"]

    @property
    def region_rules(self) -> dict[str, RegionRule]:
        """Region rules by qualified name."""
        return self.offers["agentcompile_region_rules"]

    @property
    def template_families(self) -> dict[str, TemplateFamily]:
        """Template families by qualified name."""
        return self.offers["agentcompile_template_families"]

    @property
    def implementations(self) -> dict[str, Implementation]:
        """Bound implementations by qualified name."""
        return self.offers["agentcompile_implementations"]

    @property
    def advisors(self) -> dict[str, Advisor]:
        """Advisors by qualified name."""
        return self.offers["agentcompile_advisors"]

    @property
    def validators(self) -> dict[str, Validator]:
        """Validators by qualified name."""
        return self.offers["agentcompile_validators"]

    @property
    def runtimes(self) -> dict[str, RuntimeIntegration]:
        """Runtime integrations by qualified name."""
        return self.offers["agentcompile_runtimes"]

    @property
    def backends(self) -> dict[str, Backend]:
        """Backends by qualified name."""
        return self.offers["agentcompile_backends"]

    @property
    def targets(self) -> dict[str, Target]:
        """Targets by qualified name."""
        return self.offers["agentcompile_targets"]

    def backend_of(self, target: Target) -> Backend | None:
        """The installed backend that ``target`` names; the first one where several plugins offer that name."""
        return next((b for b in self.backends.values() if b.name == target.backend), None)

    @property
    def kinds(self) -> dict[str, MatchKind]:
        """Match kinds by name, from all region rules."""
        found: dict[str, MatchKind] = {}
        for rule in self.region_rules.values():
            for kind in rule.kinds:
                found.setdefault(kind.name, kind)
        return found

    def kind(self, name: str) -> MatchKind:
        """The match kind called ``name``.

        Raises:
            ContractError: no installed rule offers it; the message lists those that are offered.
        """
        kinds = self.kinds
        if name not in kinds:
            raise ContractError(f"no installed region rule offers the match kind {name!r} (offered: {', '.join(sorted(kinds)) or 'none'}); "
                                "name it in the kinds of the rule that makes such matches, and install that rule")
        return kinds[name]

    def find(self, hook: str, name: str) -> Any:
        """The offer called ``name`` (short or qualified) of one hook; equal values that several plugins offer are one.

        Raises:
            UsageError: none or several are called so; the message lists what is there.
        """
        shelf = self.offers[hook]
        if name in shelf:
            return shelf[name]
        found = [qualified for qualified, offer in shelf.items() if offer.name == name]
        if found and all(shelf[one] == shelf[found[0]] for one in found):
            return shelf[found[0]]
        what = OFFERS[hook].__name__.lower()
        if found:
            raise UsageError(f"{what} {name!r} is offered by several plugins: {', '.join(found)}; name one of them in full")
        if not shelf:
            raise UsageError(f"unknown {what} {name!r}; no installed plugin offers any (`agentcompile plugins` lists what is installed)")
        raise UsageError(f"unknown {what} {name!r}; installed: {', '.join(sorted({offer.name for offer in shelf.values()}))}")

    def guard(self, call: Callable[[], T], *, stage: StageName, cause: Cause = Cause.EXCEPTION, plugin: str, subject: str,
              distribution: str = "") -> T | None:
        """Run plugin code within its limit; turn what it raises into a recorded Failure and None (re-raised when strict)."""
        try:
            return call() if cause is Cause.IMPORT else self.limited(call, plugin=plugin)  # half an import is worse than a slow one
        except (Exception, SystemExit) as exc:
            if self.strict:
                raise
            cause = Cause.TIMEOUT if isinstance(exc, OutOfTime) else cause
            self.fail(Failure(stage=stage, cause=cause, plugin=plugin, distribution=distribution, subject=subject,
                              message=f"{type(exc).__name__}: {exc}", traceback=last_frames(exc)))
            return None

    def limited(self, call: Callable[[], T], *, plugin: str) -> T:
        """What plugin code returns.

        Raises:
            OutOfTime: it ran longer than ``CALL_S``, or a call of this plugin did before in this run.
            BaseException: whatever it raises.
        """
        if self.late is not None and plugin in self.late:
            raise OutOfTime(f"{plugin} did not come back from an earlier call, and is not asked again")
        try:
            return within(CALL_S, plugin, call)
        except OutOfTime:
            if self.late is not None:
                self.late.add(plugin)
            raise

    def fail(self, failure: Failure) -> None:
        """Record a fault of a plugin's code and tell who listens (raised when strict)."""
        if self.strict:
            raise AgentCompileError(str(failure))
        self.record(failure)

    def record(self, failure: Failure) -> None:
        """Record what went wrong with a kernel, a compiler, a service or the worker and tell who listens; never raises."""
        kept, first = self.failures.add(failure)
        log.info("%s", kept)
        self.emit(FailureRecorded(failure=kept, first=first))

    def emit(self, event: Event) -> None:
        """Hand an event to the hook of every plugin that listens, then to the observer; results are dropped, errors of hooks recorded."""
        hook = hook_of(event)
        if hook is not None and self.manager is not None:
            self._call(*hook)
        try:
            self.observer(event)
        except Exception as exc:
            log.warning("the observer failed on %s: %s: %s", type(event).__name__, type(exc).__name__, exc)

    def _call(self, hook: str, arguments: dict[str, Any]) -> None:
        for impl in getattr(self.manager.hook, hook).get_hookimpls():
            try:
                impl.function(**{name: arguments[name] for name in impl.argnames})
            except (Exception, SystemExit) as exc:
                log.info("event %s of %s failed: %s", hook, impl.plugin_name, exc)
                # Into the book only: telling the listeners about a listener would not end.
                self.failures.add(Failure(stage=StageName.EVENTS, cause=Cause.EXCEPTION, plugin=impl.plugin_name, subject=f"hook {hook}",
                                          message=f"{type(exc).__name__}: {exc}", traceback=last_frames(exc)))
