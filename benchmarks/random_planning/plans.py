"""One random plan: a match that somebody serves on a target, one of its schedules, its source, and what the compiler makes of it."""

import itertools
import random
import time
from typing import Any

from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.backend import CudaBackend

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import BuildError, Match, Reject, StepSource, Target, UsageError, check_source
from agentcompile_core.stages.plan import checked, unfit
from agentcompile_core.stages.plan.risk import risk_of

from .draws import match_of

TARGETS = ("a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090")  # sm_80, 86, 89, 90, 100, 120
MOST_REGISTERS = 255  # of a thread
DEADLINE_S = 300.0
ATTEMPTS = 12  # draws of one kind, before the next kind has its turn
Row = dict[str, Any]


class Bench:
    """The installed families, and a compiler for all targets. ``families``: names of those that are planned with; empty: all."""

    def __init__(self, families: tuple[str, ...] = ()) -> None:
        offered = load_catalog(strict=False).template_families.values()
        self.families = {family.name: family for family in offered if family.name in families or not families}
        self.backend = CudaBackend()

    def plan(self, name: str, index: int, seed: int, build: bool = True) -> Row:
        """The row of plan ``index`` of a target: drawn until somebody accepts; what was refused on the way is in it with its reason."""
        target, draw = preset(name), random.Random(f"{seed} {name} {index}")
        refused: list[list[str]] = []
        accepted: list[str] = []
        for attempt in itertools.count():
            try:
                kind, (match, _) = match_of(draw, index + attempt // ATTEMPTS)
            except UsageError as error:
                refused.append(["rules", str(error)[:300]])
                continue
            accepted, reasons = self._accepting(match, target)
            refused += reasons
            if accepted:
                break
        family = draw.choice(sorted(accepted))
        row = {"target": name, "arch": target.arch, "index": index, "drawn": kind, "family": family, "shapes": shapes_of(match),
               "refused": refused}
        return {**row, **self._built(family, match, target, draw, build)}

    def _accepting(self, match: Match, target: Target) -> tuple[list[str], list[list[str]]]:
        """Names of families that serve a match, and what those said that know its kind and do not."""
        accepted, reasons = [], []
        for name, family in self.families.items():
            wrong = unfit(family, target)
            answer = family.accepts(match, target) if wrong is None else wrong
            if answer is True:
                accepted.append(name)
            elif not answer.reason.endswith(f"not {match.kind}"):
                reasons.append([name, answer.reason])
        return accepted, reasons

    def _built(self, name: str, match: Match, target: Target, draw: random.Random, build: bool) -> Row:
        family, facts = self.families[name], {"lowered": False}
        try:
            space = checked(family.space(match, target))
            if isinstance(space, Reject):
                return {**facts, "outcome": "refused", "why": space.reason}
            schedule = draw.choice(space.points)
            facts |= {"schedules": len(space.points), "schedule": dict(schedule.items)}
            source = family.lower(match, schedule, target)
            check_source(match, source, target)
            self.backend.check(source, target)
            facts |= {"lowered": True, "digest": source.digest, **predicted(source, target)}
            foreseen = family.needs(match, schedule, target)
            risk = risk_of(foreseen, target)
            facts |= {"registers_predicted": foreseen.registers, "shared_predicted": foreseen.shared_bytes, "risk": risk.level.value}
            return {**facts, **(self._compiled(source, target) if build else {"outcome": "lowered", "why": ""})}
        except BuildError as error:
            return {**facts, "outcome": "failed", "why": str(error)[:500]}
        except Exception as error:  # whatever a family raises is what this looks for
            return {**facts, "outcome": "failed", "why": f"{type(error).__name__}: {str(error)[:500]}"}

    def _compiled(self, source: StepSource, target: Target) -> Row:
        began = time.monotonic()
        kernel = self.backend.build(source, target, DEADLINE_S)
        used = kernel.resources
        return {"outcome": "built", "why": "", "compiler": kernel.compiler, "registers": used.registers, "spill_bytes": used.spill_bytes,
                "shared_bytes": used.shared_bytes, "build_s": round(time.monotonic() - began, 2)}


def predicted(source: StepSource, target: Target) -> Row:
    """What a plan knows of its resources before it is built: dynamic shared memory of a block, threads, and registers a thread may have."""
    threads = max(launch.block[0] * launch.block[1] * launch.block[2] for launch in source.launches)
    cap = min(MOST_REGISTERS, target.registers_per_sm // threads // 8 * 8)
    return {"threads": threads, "registers_cap": cap, "dynamic_bytes": max(launch.shared_bytes for launch in source.launches)}


def undrawn(rows: list[Row], families: tuple[str, ...]) -> list[str]:
    """Installed families that no plan is of: draws of what they serve are missing."""
    return sorted(set(Bench(families).families) - {row["family"] for row in rows})


def shapes_of(match: Match) -> str:
    """Types and shapes of the operands in words."""
    return ", ".join(f"{o.name} {o.spec.dtype.value} {'x'.join(map(str, o.spec.shape))}" for o in match.operands)[:400]


_BENCH: list[Bench] = []


def prepare(families: tuple[str, ...]) -> None:
    """Load the plugins of this process."""
    _BENCH[:] = [Bench(families)]


def of_process(job: tuple[str, int, int]) -> Row:
    """The row of one plan (target, index, seed), by the bench of this process."""
    return _BENCH[0].plan(*job)
