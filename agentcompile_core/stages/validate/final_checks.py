"""Validators of scope ``winner``: too slow for every candidate. Who they are, and what is kept of what they said.

Those that are configured, and the sanitizer where it is asked for, must pass whatever is selected. Those of ``config.winners`` are asked
where kernels are measured, they are installed and the time allows: a kernel that they refuse is closed too, one that they had no
time for is not.
"""

from ...context import Context
from ...errors import Cause, Failure, StageName, UsageError
from ...ir import serial
from ...ir.record import TuningRecord
from ...ir.verdict import Verdict
from ...plugin.interfaces import Validator
from ...plugin.settings import identity
from ...store import keys

KIND = "winners"
SCOPE = "winner"


def validator(ctx: Context, name: str) -> Validator:
    """The installed validator of that name. Raises UsageError where there is none."""
    found: Validator = ctx.catalog.find("agentcompile_validators", name)
    return found


def installed(ctx: Context) -> bool:
    """Whether every configured validator is installed; one that is not is a recorded failure."""
    for name in ctx.config.validators:
        if all(validator.name != name for validator in ctx.catalog.validators.values()):
            message = "is not installed; without it no kernel is trusted, so everything stays on the framework"
            ctx.fail(Failure(stage=StageName.VALIDATE, cause=Cause.UNAVAILABLE, plugin=name, subject="validator", message=message))
            return False
    return True


def candidates(ctx: Context) -> tuple[str, ...]:
    """The configured validators that judge every candidate, by their configured names."""
    return tuple(n for n in ctx.config.validators if validator(ctx, n).scope != SCOPE)


def in_budget(ctx: Context) -> tuple[str, ...]:
    """The configured validators of winners, which have their share of the search's budget.

    One that is not installed is none: without it no candidate is judged, so there is nothing to select.
    """
    scopes = {name: v.scope for qualified, v in ctx.catalog.validators.items() for name in (qualified, v.name)}
    return tuple(dict.fromkeys(n for n in ctx.config.validators if scopes.get(n) == SCOPE))


def required(ctx: Context) -> tuple[str, ...]:
    """The validators that everything selected must have passed; the sanitizer takes the time that it needs."""
    return tuple(dict.fromkeys((*in_budget(ctx), *((ctx.config.sanitizer,) if ctx.config.sanitize else ()))))


def affordable(ctx: Context) -> tuple[str, ...]:
    """The validators of winners that are asked where the time allows."""
    if ctx.backend is None or not ctx.backend.clock or ctx.backend.emulated:
        return ()  # nothing is measured: what passes here is provisional and judged again where it is
    installed = {v.name: v for v in ctx.catalog.validators.values() if v.scope == SCOPE}
    named = [n for n in ctx.config.winners if n in installed]
    offered = sorted(n for n, v in installed.items() if v.unasked) if "all" in ctx.config.winners else []
    return tuple(n for n in dict.fromkeys((*named, *offered)) if n not in required(ctx))


def expected(ctx: Context) -> bool:
    """Whether a validator of winners is to be asked, as far as can be said before everything was looked up."""
    scopes = {name: v.scope for qualified, v in ctx.catalog.validators.items() for name in (qualified, v.name)}
    asked = (*ctx.config.validators, *ctx.config.winners)
    offered = "all" in ctx.config.winners and any(v.unasked for v in ctx.catalog.validators.values())
    return ctx.config.sanitize or offered or any(scopes.get(name) == SCOPE for name in asked)


def versions(ctx: Context) -> keys.Versions:
    """The validators of candidates with their versions, their code and what their settings add to keys."""
    return tuple(_version(ctx, name) for name in candidates(ctx))


def kept(ctx: Context, record: TuningRecord, name: str) -> Verdict | None:
    """What the validator called ``name``, as it is now, said of a record; None: it was not asked."""
    text = ctx.store.text(KIND, keys.winner_key(record.key, _version(ctx, name)))
    try:
        return None if text is None else serial.loads(text, Verdict)
    except UsageError:
        return None


def keep(ctx: Context, record: TuningRecord, name: str, verdict: Verdict) -> None:
    """Remember what a validator of winners said of a record."""
    ctx.store.put_text(KIND, keys.winner_key(record.key, _version(ctx, name)), serial.dumps(verdict))


def failure_of(record: TuningRecord) -> Failure:
    """What is told of a record: a validator that cannot judge is named itself, not the kernel that it should have judged."""
    assert record.failure is not None
    verdict = record.verdict
    unfit = verdict is not None and not verdict.passed and record.failure in (Cause.UNAVAILABLE, Cause.EXCEPTION)
    plugin = verdict.validator if verdict is not None and unfit else record.step.implementation
    return Failure(stage=StageName.VALIDATE, cause=record.failure, plugin=plugin, subject=str(record.step), message=record.message)


def _version(ctx: Context, name: str) -> tuple[str | int, ...]:
    found = validator(ctx, name)
    return name, found.version, keys.code_of(type(found)), *identity(found)
