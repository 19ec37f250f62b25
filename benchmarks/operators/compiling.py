"""A one-operator module through the compiler: the stages of ``agentcompile compile`` over one worker for all modules."""

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from agentcompile_core import api, pipeline
from agentcompile_core.api import hardware
from agentcompile_core.api.setting_up import context
from agentcompile_core.budget import Budget
from agentcompile_core.configuration import Config
from agentcompile_core.ir.plan import Origin, Step
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.ir.selection import SelectedStep
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.events import silent
from agentcompile_core.runtime.binder import bind
from agentcompile_core.runtime.bound_program import BoundProgram
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import Program, Segment
from agentcompile_core.runtime.sources import source_of
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.describe import default_workload
from agentcompile_core.store import Store

from .cases import Case

WARM_UP_S = {"cpu": 240.0}  # an emulator compiles itself first
OTHERS_WARM_UP_S = 60.0


class NoKernel(Exception):
    """Nothing of ours was selected; the message says why."""


@frozen(kw_only=True, eq=False)
class Chosen:
    """What the compiler selected for a case: the program that runs, its kernels, and facts for the row."""

    program: Program
    executables: Executables
    facts: dict[str, Any]


class Bench:
    """The context of all compilations. Only generated kernels take part: who else is fast is measured beside them."""

    def __init__(self, device: str, cache: Path | None, budget_plans: int) -> None:
        run_on = "emulation" if device == "cpu" else "auto"
        self._catalog = load_catalog()
        self._config = Config(device=device, budget_plans=budget_plans, rounds=1, origins=(Origin.GENERATED.value,), winners=())
        found = hardware.choose(self._config, self._catalog, run_on=run_on)
        self.context = context(self._catalog, self._config, found, Store(cache), silent)
        self.device = found.device
        if self.context.backend is None:
            raise SystemExit(f"nothing here launches kernels for {found.target.name}")
        self.backend = self.context.backend
        self._warm_up()

    def _warm_up(self) -> None:
        """Start the worker and have its validators prove themselves, which is no part of the budget of the first case."""
        module = nn.Linear(64, 8, bias=False, device=self.device, dtype=torch.float16).eval().requires_grad_(False)
        self._compiled(module, (torch.ones(1, 64, dtype=torch.float16, device=self.device),),
                       WARM_UP_S.get(self.device, OTHERS_WARM_UP_S), plans=1)

    def close(self) -> None:
        """End the worker."""
        self.context.close()

    def chosen(self, case: Case, module: nn.Module, inputs: Sequence[Tensor], budget_s: float) -> tuple[Chosen, dict[str, Chosen]]:
        """The selection for a module, and of other paths through the same family the fastest kernels that passed, by path.

        Raises:
            NoKernel: no generated kernel was selected.
        """
        began = time.monotonic()
        compilation = self._compiled(module, inputs, budget_s, self._config.budget_plans)
        steps = [step for selection in compilation.selections for step in selection.steps]
        if len(steps) != 1:
            raise NoKernel(_why(compilation) if not steps else f"{len(steps)} steps were selected for one operator")
        tried = [record for record in compilation.records if record.step.origin is Origin.GENERATED]
        about = {"tried": len(tried), "passed": sum(record.passed for record in tried), "compile_s": round(time.monotonic() - began, 2)}
        program = compilation.programs["forward"]
        kernels = {source.digest: compilation.kernels[source.digest] for source in program.sources}
        if any(kernel.backend != self.backend.name for kernel in kernels.values()):  # validated here for hardware that is not
            kernels = {source.digest: self.backend.build(source, self.context.target) for source in program.sources}
        executables = Executables(device=self.device, backend=self.backend, kernels=kernels)
        chosen = Chosen(program=program, executables=executables, facts={**facts_of(steps[0]), **about})
        return chosen, self._other_paths(chosen, steps[0], tried) if case.family == "gemm" else {}

    def _compiled(self, module: nn.Module, inputs: Sequence[Tensor], budget_s: float, plans: int) -> pipeline.Compilation:
        ctx = self.context
        ctx.config = evolve(self._config, budget_s=budget_s, budget_plans=plans)
        ctx.budget = Budget(budget_s)
        frontend = pipeline.frontend_for(module, ctx)
        loaded = frontend.load(module, {"device": self.device, "dtype": None, "meta": False, "example_inputs": tuple(inputs)})
        graphs = pipeline.captured(loaded, frontend, default_workload(loaded.module), ctx, api._versions())
        return pipeline.compile_graphs(graphs, ctx)

    def _other_paths(self, chosen: Chosen, mine: SelectedStep, tried: Sequence[TuningRecord]) -> dict[str, Chosen]:
        """Each other path in the same program: its fastest kernel that passed, or its best guess where none was tried."""
        segment = next(s for s in chosen.program.segments if s.step is not None)
        assert segment.match is not None
        usable = [record for record in tried if record.usable and record.measurement and record.step.match_id == mine.step.match_id]
        usable.sort(key=lambda one: one.measurement.us if one.measurement else 0.0)
        family = self.context.catalog.template_families[mine.step.implementation]
        guesses = [evolve(mine.step, schedule=point) for point in family.space(segment.match, self.context.target).points]
        found: dict[str, Chosen] = {}
        for step in (*(record.step for record in usable), *guesses):
            path = path_of(step.schedule)
            if path not in found and path != path_of(mine.step.schedule):
                found[path] = self._in_program(chosen, step, segment)
        return found

    def _in_program(self, chosen: Chosen, step: Step, segment: Segment) -> Chosen:
        """The program with another step in a segment."""
        assert segment.match is not None
        source = source_of(step, segment.match, self.context.catalog, self.context.target)
        segments = tuple(evolve(s, step=step, source=source.key) if s is segment else s for s in chosen.program.segments)
        kernel = self.backend.build(source, self.context.target)
        return Chosen(program=evolve(chosen.program, segments=segments, sources=(source,)),
                      executables=evolve(chosen.executables, kernels={source.digest: kernel}),
                      facts={"implementation": step.implementation, "schedule": dict(step.schedule.items), "path": path_of(step.schedule),
                             "registers": kernel.resources.registers})


def path_of(schedule: Any) -> str:
    """What a schedule calls its path."""
    return str(dict(schedule.items).get("path", ""))


def facts_of(step: SelectedStep) -> dict[str, Any]:
    """Who was selected, and on what evidence."""
    return {"implementation": step.step.implementation, "schedule": dict(step.step.schedule.items), "path": path_of(step.step.schedule),
            "basis": step.basis.value, "selected_us": step.measurement.us if step.measurement else None}


def _why(compilation: Any) -> str:
    if compilation.graphs.eager_reason:
        return f"not captured: {compilation.graphs.eager_reason}"
    said = [f"{what}: {why}" for selection in compilation.selections for what, why in selection.fallback_reasons]
    return "; ".join(said)[:400] or "no step was selected"


def bound(chosen: Chosen, module: nn.Module, operands: Sequence[tuple[Tensor, ...]]) -> list[BoundProgram]:
    """The program once per copy of its operands (inputs, then parameters), each at addresses of its own."""
    found = []
    names = chosen.program.graph.inputs
    for index, tensors in enumerate(operands):
        twin = module if index == 0 else copy.deepcopy(module)
        for parameter, tensor in zip(twin.parameters(), tensors[len(names):], strict=True):
            parameter.data = tensor
        weights = WeightStore(twin, chosen.executables.device)
        found.append(bind(chosen.program, weights, {}, dict(zip(names, tensors, strict=False)), chosen.executables))
    return found
