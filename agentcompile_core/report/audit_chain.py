"""The captured chain's decisions made again from its log: each trial by its ratio, and the steps that are left by the trials."""

from collections.abc import Mapping

from attrs import frozen

from ..ir.decisions import ChainLog, ChainTrial, chain_margin
from ..ir.plan import Step
from ..ir.ranges import SLOWER

BEGINNINGS = tuple(position for k in range(10, 40) for position in (1 << k, 3 << (k - 1)))  # where a range may begin
Held = dict[str, dict[str, Step]]  # signature, match id


@frozen(kw_only=True)
class Replay:
    """What the log leads to: what the chain held in the end, and what does not follow in the log itself."""

    held: Held
    problems: tuple[str, ...]


def replayed(log: ChainLog, margin: float) -> Replay:
    """Make every trial of the log again, in order."""
    held: Held = {}
    for signature, step in log.started:
        held.setdefault(signature, {})[step.match_id] = step
    problems: list[str] = []
    for number, trial in enumerate(log.trials, 1):
        wins = _wins(trial, chain_margin(margin))
        if wins is not trial.taken:
            problems.append(f"trial {number}, {_name(trial)}, was {'taken' if trial.taken else 'not taken'}; by {_evidence(trial)} it "
                            f"is{'' if wins else ' not'}")
        if wins:
            _make(trial, held)
    return Replay(held=held, problems=tuple(problems))


def _make(trial: ChainTrial, held: Held) -> None:
    gone = (*trial.without, *([(trial.signature, trial.match_id)] if trial.step is None else []))
    for signature, match in gone:
        held.get(signature, {}).pop(match, None)
    for signature, step in (*([(trial.signature, trial.step)] if trial.step is not None else []), *trial.beside):
        held.setdefault(signature, {})[step.match_id] = step


def _wins(trial: ChainTrial, margin: float) -> bool:
    if not trial.ratio:
        return trial.step is None and bool(trial.refused)  # a step with which the whole step was wrong goes, whatever it takes
    return not trial.refused and trial.ratio < 1.0 - margin


def _name(trial: ChainTrial) -> str:
    alone = str(trial.step) if trial.step is not None else f"the framework on {trial.match_id}"
    return " with ".join((alone, *(str(step) for _, step in trial.beside), *(f"the framework on {match}" for _, match in trial.without)))


def _evidence(trial: ChainTrial) -> str:
    if trial.refused:
        return f"what was wrong with it ({trial.refused})"
    return f"its ratio {trial.ratio:.3f}" if trial.ratio else "its log, which compares nothing,"


def evidence_of(log: ChainLog) -> tuple[str, ...]:
    """What was tried in the chain, in words: counts, and everything that was taken."""
    taken = [trial for trial in log.trials if trial.taken]
    lines = [f"it began with {len(log.started)} steps; {len(log.trials)} alternatives tried, {len(taken)} taken"]
    if log.judged:
        there = ", ".join(f"{ratio:.3f} at {position}" for position, ratio in log.earlier) or "nothing was compared there"
        lines.append(f"judged at position {log.judged}; at earlier ones over what holds before it: {there}")
    return (*lines, *(f"taken: {_name(trial)}, by {_evidence(trial)}" for trial in taken))


def misplaced(log: ChainLog) -> tuple[str, ...]:
    """What is wrong with where a range begins. It is asked for from 1,024, 4,096, 16,384 and so on, and what won is compared with what
    holds before it at BEGINNINGS between there and where it was judged, nearest first, until it is slower: right behind that it begins."""
    positions, ratios = [position for position, _ in log.earlier], [ratio for _, ratio in log.earlier]
    if not log.judged:
        return ()  # of a log that does not say it
    before = [position for position in reversed(BEGINNINGS) if position < log.judged]
    asked = [start for start in BEGINNINGS[::4] if start < log.judged]
    lost = bool(ratios) and ratios[-1] > SLOWER
    if positions != before[:len(positions)] or not all(0.0 < ratio <= SLOWER for ratio in ratios[:len(ratios) - lost]):
        return ("what it takes at earlier positions was compared elsewhere, or not up to the first at which it is slower",)
    if not lost:
        begins = [positions[-1]] if positions else asked
        return () if log.start in begins and begins[0] in asked else ("where it begins follows from nothing that was compared",)
    begins = [position for position in BEGINNINGS if position > positions[-1] and position >= min((log.judged, *positions[:-1]))]
    return () if log.start in begins[:1] else (f"it does not begin right behind position {positions[-1]}, where it is slower",)


def differences(wanted: Mapping[str, Step], found: Mapping[str, Step], what: str) -> list[str]:
    """Where two sets of steps of one region differ."""
    return [f"{what} {match}: {found.get(match) or 'the framework'}, and {wanted.get(match) or 'the framework'} follows"
            for match in sorted({*wanted, *found}) if wanted.get(match) != found.get(match)]
