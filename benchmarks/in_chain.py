"""Schedules that a search need not have: what each takes inside the captured decode step in place of what was selected.

    python benchmarks/in_chain.py qwen3-1.7b --changes FILE
    python benchmarks/in_chain.py qwen3-1.7b --changes FILE --position 2080 --keep

FILE has a change per line, `MATCH KEY=VALUE,...`, several of them parted by `;`: the step whose match has MATCH in its identifier, or
whose matrix has as many rows and columns (`2048x6144`), gets the schedule that was selected with these values (`KEY=` leaves a key out).
Each is timed against what was selected for the position, in pairs, and one that wins stays with --keep. A JSON line each, with
microseconds of a step, the ratio and its 95 % confidence interval, registers and bytes of shared memory.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from attrs import evolve, frozen
from full_models import add_options, compiled_model, context_of, kept_or_passing

from agentcompile_core.errors import AgentCompileError
from agentcompile_core.ir import ranges
from agentcompile_core.ir.plan import Schedule
from agentcompile_core.ir.region import Match
from agentcompile_core.ir.selection import SelectedStep
from agentcompile_core.stages.select import chain
from agentcompile_core.worker.chain_question import Alternative, ChainQuestion, Selections, replaced
from agentcompile_core.worker.judge import Judge
from agentcompile_core.worker.paired import Timed, lower_bound, upper_bound

REFUSED = (LookupError, ValueError, TypeError, AgentCompileError)  # what a line may ask for that is no schedule


@frozen
class Change:
    """Values of the schedule of one step; None: the key goes."""

    match: str
    values: tuple[tuple[str, Any], ...]


def changes_of(line: str) -> tuple[Change, ...]:
    """The changes of one line."""
    found = []
    for part in filter(str.strip, line.split(";")):
        match, _, values = part.strip().partition(" ")
        pairs = (value.strip().partition("=")[::2] for value in values.split(",") if value.strip())
        found.append(Change(match, tuple((key, _value(text)) for key, text in pairs)))
    return tuple(found)


def _value(text: str) -> Any:
    words: dict[str, Any] = {"": None, "True": True, "False": False}
    return words[text] if text in words else int(text) if text.lstrip("-").isdigit() else text


def changed(schedule: Schedule, change: Change) -> Schedule:
    """The schedule with other values."""
    values = {**dict(schedule.items), **dict(change.values)}
    return Schedule({key: value for key, value in values.items() if value is not None})


class Asked:
    """The chain's questions about the decode step, one for each range of positions, and what was selected, as a compilation comes by
    them."""

    def __init__(self) -> None:
        self.answered: list[tuple[ChainQuestion, Selections, int]] = []  # the last one: the position from which on they hold
        self._ask = chain.ask

    def __enter__(self) -> "Asked":
        chain.ask = self._heard  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        chain.ask = self._ask

    def at(self, position: int) -> tuple[ChainQuestion, Selections]:
        """The question of the range that holds ``position``, asked there, and what was selected for it.

        Raises:
            SystemExit: no chain was judged.
        """
        if not self.answered:
            raise SystemExit("no chain was judged; this needs a GPU")
        question, selections, _ = next(one for one in reversed(self.answered) if one[2] <= position)
        return evolve(question, position=position), selections

    def _heard(self, question: ChainQuestion, *rest: Any) -> Any:
        selections, answer = self._ask(question, *rest)
        start, capacity = next(iter(question.earlier), 0), chain.capacity_of(question.graph)
        holds = ranges.holds_from(answer.earlier, question.position) if answer else 0
        begins = ranges.beginning(start, holds, capacity) if start else 0
        self.answered.append((question, selections, capacity if begins is None else begins))  # without an answer what was held before
        return selections, answer


class Tried:
    """A judge of changes to what was selected."""

    def __init__(self, question: ChainQuestion, held: Selections, model: Any) -> None:
        self.context = model.context
        self.judge = Judge(question, self.context.backend, self.context.catalog, lambda what: None)
        self.regions = {region.signature: region for region in question.regions}
        self.held, self.best = held, self.judge.captured(held)

    def steps(self, held: Selections, match: str) -> Iterator[tuple[str, SelectedStep, Match]]:
        """The steps of ``held`` that are meant, with their regions."""
        for selection in held:
            for step in selection.steps:
                found = self.regions[selection.signature].match_by_id[step.step.match_id]
                if match in found.id or match == f"{found.integer('n', 0)}x{found.integer('k', 0)}":
                    yield selection.signature, step, found

    def with_changes(self, changes: tuple[Change, ...]) -> Selections:
        """What is held, with them."""
        held = self.held
        for change in changes:
            found = list(self.steps(held, change.match))
            if not found:
                raise LookupError(f"no step has {change.match} in its match: {[s.step.match_id for x in self.held for s in x.steps]}")
            for signature, step, match in found:
                schedule = changed(step.step.schedule, change)
                family = self.context.catalog.template_families[step.step.implementation]
                source = family.lower(match, schedule, self.context.target)
                other = evolve(step, step=evolve(step.step, schedule=schedule), source=source)
                held = replaced(held, Alternative(signature=signature, match_id=match.id, selected=other))
        return held

    def built(self, all_changes: list[tuple[Change, ...]]) -> None:
        """Compile what they need side by side."""
        sources = {}
        for changes in all_changes:
            with contextlib.suppress(*REFUSED):
                steps = [step for selection in self.with_changes(changes) for step in selection.steps]
                sources |= {step.source.digest: step.source for step in steps if step.source is not None}
        missing = [source for digest, source in sources.items() if digest not in self.judge.kernels]
        with ThreadPoolExecutor() as pool:
            builds = [pool.submit(self.judge.backend.build, source, self.context.target) for source in missing]
        for build in builds:
            with contextlib.suppress(*REFUSED):  # said where it is tried
                self.judge.kernels[build.result().digest] = build.result()

    def row(self, changes: tuple[Change, ...], pairs: int, keep: bool) -> dict[str, Any]:
        """What one of them takes."""
        try:
            challenger = self.with_changes(changes)
            variant = self.judge.captured(challenger)
        except REFUSED as exc:
            return {"refused": " ".join(str(exc).split())[:300]}
        before = {s.source.digest for x in self.held for s in x.steps if s.source}
        digests = [s.source.digest for x in challenger for s in x.steps if s.source and s.source.digest not in before]
        resources = [self.judge.kernels[digest].resources for digest in digests]
        said: dict[str, Any] = {"registers": [r.registers for r in resources], "shared": [r.shared_bytes for r in resources]}
        variant.sample_us()
        times = [_pair(variant, self.best) if number % 2 else _pair(self.best, variant)[::-1] for number in range(pairs)]
        ratios = [mine / best for mine, best in times]
        wrong = variant.wrong()
        if keep and not wrong and upper_bound(ratios) < 1.0:
            self.held, self.best, said["kept"] = challenger, variant, True
        return {**said, "us": round(statistics.median(mine for mine, _ in times), 1),
                "held_us": round(statistics.median(best for _, best in times), 1), "ratio": round(statistics.mean(ratios), 4),
                "interval": [round(lower_bound(ratios), 4), round(upper_bound(ratios), 4)], **({"wrong": wrong} if wrong else {})}


def _pair(first: Timed, second: Timed) -> tuple[float, float]:
    return first.sample_us(), second.sample_us()


def main() -> int:
    """Compile, then try every line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, budget_s=40.0)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--changes", type=Path, required=True)
    parser.add_argument("--position", type=int, default=chain.POSITION, help="how much is cached")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--keep", action="store_true", help="what wins is what the next ones are compared with")
    options = parser.parse_args()
    options.context = context_of(options.model, options.context)
    if not 0 <= options.position < options.context:
        raise SystemExit(f"--position {options.position}: allowed are numbers below the context of {options.context}")
    lines = [line.strip() for line in options.changes.read_text().splitlines() if line.strip() and not line.startswith("#")]
    with Asked() as asked, kept_or_passing(options) as store:
        model, _ = compiled_model(options.model, options, store, run_on="nothing")  # the judge captures for itself
        with torch.inference_mode():
            tried = Tried(*asked.at(options.position), model)
            print(json.dumps({"held": [str(s.step) for x in tried.held for s in x.steps]}), flush=True)
            all_changes = [changes_of(line) for line in lines]
            tried.built(all_changes)
            for line, changes in zip(lines, all_changes, strict=True):
                print(json.dumps({"change": line, **tried.row(changes, options.pairs, options.keep)}), flush=True)
        model.context.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
