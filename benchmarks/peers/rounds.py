"""One workload, several systems: warm-ups, then rounds in which all take turns; no peer that dies costs another system its row."""

from collections.abc import Callable
from typing import Any

from attrs import define, field, frozen

from agentcompile_core.report import bench
from peers.child import PeerDied
from peers.estimate import SPAN, Ask, contexts, cost_ms, estimated

OURS = "agentcompile"
LONG_MS = 30_000.0  # runs that take longer have no whole warm-up and few repetitions
FEW = 3
RESERVE = 1.1  # time is left for what a round took, and a little more
Row = dict[str, Any]


class OutOfTime(Exception):
    """The time of the command does not suffice for a single round."""


@frozen
class Workload:
    """Tokens of a prompt and new ones behind it."""

    input: int
    output: int

    def __str__(self) -> str:
        return f"{self.input}/{self.output}"

    @property
    def positions(self) -> int:
        """Both together."""
        return self.input + self.output


@frozen(kw_only=True)
class Terms:
    """``estimate_over_ms``: baselines whose generation takes longer are estimated; ``left_s`` says how many seconds are left."""

    repetitions: int
    estimate_over_ms: float
    left_s: Callable[[], float]


@define
class Sampler:
    """One system at one workload; a sample is (milliseconds of all, milliseconds to the first token)."""

    ask: Ask
    workload: Workload
    is_estimate: bool
    cost_ms: float
    longest_ms: float
    e2e: list[float] = field(factory=list)
    prefill: list[float] = field(factory=list)

    def sample(self) -> None:
        """Take one, the first token first: behind a long generation the card is hot, and estimates have none."""
        given, new = self.workload.input, self.workload.output
        if self.is_estimate:
            e2e, prefill = estimated(self.ask, given, new)
        else:
            prefill, e2e = self.ask(given, 1), self.ask(given, new)
        self.e2e.append(e2e)
        self.prefill.append(prefill)


def measured(systems: dict[str, Ask], workload: Workload, terms: Terms, written: Callable[[list[Row]], None], *,
             alone: bool = True) -> list[Row]:
    """Rows of all systems, one each; ``written`` gets what is known so far after every round.

    Rounds go forth and back (ABBA). A system that died has a row without times that says why. ``alone``: ours is measured even if
    nobody is left to be compared with; it comes last among ``systems``.

    Raises:
        OutOfTime: not one round fits the time that is left.
    """
    samplers: dict[str, Sampler] = {}
    dead: dict[str, str] = {}
    for name, ask in systems.items():
        if name == OURS and not samplers and not alone:
            break
        try:
            samplers[name] = _prepared(name, ask, workload, terms)
        except PeerDied as exc:
            dead[name] = str(exc)
    for number in range(_rounds(samplers, terms) if samplers else 0):
        if terms.left_s() * 1e3 < RESERVE * sum(s.cost_ms for s in samplers.values()):
            if number == 0:
                raise OutOfTime
            break
        for name in list(samplers)[:: -1 if number % 2 else 1]:
            try:
                samplers[name].sample()
            except PeerDied as exc:
                dead[name] = str(exc)
                del samplers[name]
        written(_rows(samplers, dead, workload))
    return _rows(samplers, dead, workload)


def prompt_lengths(workload: Workload) -> tuple[int, ...]:
    """Of all prompts that a system may be asked for at a workload, whole or estimated."""
    given, new = workload.input, workload.output
    return tuple(dict.fromkeys((given, *(contexts(given, new) if _may_be_estimated(new) else ()))))


def _may_be_estimated(new: int) -> bool:
    return new > 2 * SPAN


def _rounds(samplers: dict[str, Sampler], terms: Terms) -> int:
    is_long = any(sampler.longest_ms > LONG_MS for sampler in samplers.values())
    return min(terms.repetitions, FEW) if is_long else terms.repetitions


def _prepared(name: str, ask: Ask, workload: Workload, terms: Terms) -> Sampler:
    """Warmed up, and known how long it takes."""
    given, new = workload.input, workload.output
    short = min(SPAN + 1, new)
    ask(given, short)
    first = ask(given, 1)
    step = (ask(given, short) - first) / (short - 1)
    whole = first + step * (new - 1)
    if name != OURS and whole > terms.estimate_over_ms and _may_be_estimated(new):
        cost = 0.0
        for context in contexts(given, new):  # prompts of these lengths are new to it
            cost += cost_ms(ask(context, 1), step)
        return Sampler(ask, workload, True, cost, 0.0)
    warm_ups = bench.WARM_UPS if whole <= LONG_MS else 0
    if terms.left_s() * 1e3 < RESERVE * (warm_ups + 1) * whole:
        raise OutOfTime
    for _ in range(warm_ups):
        whole = ask(given, new)
    return Sampler(ask, workload, False, whole + first, whole)


def _rows(samplers: dict[str, Sampler], dead: dict[str, str], workload: Workload) -> list[Row]:
    taken = {name: {"e2e": s.e2e, "prefill": s.prefill} for name, s in samplers.items() if s.e2e}
    rows = [{key: value for key, value in row.items() if key != "speedup"} for row in bench.rows_of(taken, workload.output)]
    rows = [{**row, "estimated": samplers[row["system"]].is_estimate, "why": ""} for row in rows]
    return rows + [untimed(name, why) for name, why in dead.items()]


def untimed(system: str, why: str) -> Row:
    """The row of a system that has no times."""
    nothing = dict.fromkeys(("e2e_ms", "prefill_ms", "step_ms", "spread_ms"))
    return {"system": system, **nothing, "repetitions": 0, "estimated": False, "why": why}
