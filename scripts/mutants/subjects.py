"""The candidates that are mutated: matches as the rules make them and schedules of the families' own spaces, at small sizes.

Between them the subjects run every path of every template and of the device library: vectors and single elements, one and
several warps per row, whole rows and slices in the ring, one split and many, merges through global memory, through
clusters and by messages, hints before the dependency wait.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from agentcompile_cuda_kit import include_dir
from agentcompile_cuda_kit.targets import preset
from attrs import evolve, field, frozen

from agentcompile_core.configuration import defaults
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import Graph, Match, Origin, Schedule, Step, StepSource, Target, Trial
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.worker import Job

from .specifications import SPECIFICATIONS

TARGET = "h200"
BACKEND = "emulation"
PLAN = "plan.cuh"
LIBRARY = "agentcompile/"
_INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^">]+)[">]', re.MULTILINE)


@frozen(kw_only=True)
class Subject:
    """One candidate: a match with its graph, a schedule, and the source that its family lowers them to."""

    name: str
    family: str
    template: str  # file name of the template, relative to its package
    match: Match = field(repr=False)
    graph: Graph = field(repr=False)
    schedule: Schedule
    source: StepSource = field(repr=False)
    target: Target = field(repr=False)

    def files(self) -> dict[str, str]:
        """Every text that takes part, by name: the template, its own headers, the plan and the library's headers."""
        own = {self.template: self.source.code, **dict(self.source.headers)}
        waiting, found = list(own.values()), dict(own)
        while waiting:
            for name in _INCLUDE.findall(waiting.pop()):
                if name.startswith(LIBRARY) and name not in found:
                    found[name] = (include_dir() / name).read_text(encoding="utf-8")
                    waiting.append(found[name])
        return found

    def mutated(self, file: str, text: str) -> StepSource:
        """The source with ``file`` replaced; a header of the library is replaced for this source alone."""
        if file == self.template:
            return evolve(self.source, code=text)
        kept = tuple(pair for pair in self.source.headers if pair[0] != file)
        return evolve(self.source, headers=(*kept, (file, text)))

    def job(self, source: StepSource, validators: tuple[str, ...] = defaults.VALIDATORS) -> Job:
        """What the worker is asked of a candidate of this schedule: the same cases, no timing (nothing here is a GPU)."""
        kind = load().kinds[self.match.kind]
        cases = cases_for(self.match, kind, f"mutants {self.family}", emulated=True, source=self.source, schedule=self.schedule)
        trial = Trial(match=self.match, graph=self.graph, source=source, target=self.target, cases=cases)
        step = Step(match_id=self.match.id, implementation=self.family, origin=Origin.GENERATED, schedule=self.schedule)
        return Job(trial=trial, step=step, backend=BACKEND, validators=validators, time=False)


@cache
def load() -> Any:
    """The installed plugins."""
    return load_catalog(strict=False)


def _first(points: tuple[Schedule, ...], wanted: Mapping[str, Any]) -> Schedule:
    for point in points:
        values = dict(point.items)
        if all(values.get(name) in (value if isinstance(value, tuple) else (value,)) for name, value in wanted.items()):
            return point
    raise LookupError(f"no schedule with {dict(wanted)} among {len(points)}")


TEMPLATES = {
    ("gemv", "ring"): "gemv_ring.cu", ("gemv", "tensor"): "gemv_tensor.cu", ("attention", "tensor"): "attention_tensor.cu",
    ("attention", "staged"): "attention_staged.cu", ("attention", "whole"): "attention_staged.cu",
    ("softmax", "looped"): "softmax_looped.cu",
    ("softmax", "split"): "softmax_split.cu", ("softmax", "strided"): "softmax_strided.cu",
    **{("norm", path): f"norm_{path}.cu" for path in ("cluster", "kept", "looped", "split")},
    ("reduction", "strided"): "reduction_strided.cu",
    **{("reduction", name): f"{name}.cu" for name in ("scan", "scan_strided", "pool", "cross_entropy")},
    ("gemm", "tensor"): "gemm_tensor.cu", ("gemm", "bf16x6"): "gemm_bf16x6.cu", ("gemm", "row"): "gemm_row.cu",
    ("elementwise", "strided"): "strided_copy.cu",
    ("experts", "columns"): "experts_columns.cu", ("experts", "stream"): "experts_stream.cu",
}


@cache
def subjects() -> dict[str, Subject]:
    """All subjects by name.

    Raises:
        LookupError: a family offers no schedule as the table asks for.
    """
    return {name: subject_of(name, family, *make(), wanted) for name, family, make, wanted in SPECIFICATIONS}


def subject_of(name: str, family: str, match: Match, graph: Graph, wanted: Mapping[str, Any]) -> Subject:
    offered = next(f for f in load().template_families.values() if f.name == family)
    target = evolve(preset(TARGET), sm_count=wanted.get("sm_count", preset(TARGET).sm_count))
    schedule = _first(offered.space(match, target).points, {key: value for key, value in wanted.items() if key != "sm_count"})
    path = "strided" if match.text("broadcast0", "") == "strided" else dict(schedule.items).get("path")
    path = "columns" if match.flag("transposed") else path
    template = TEMPLATES.get((family, str(path)), f"{family}.cu")
    return Subject(name=name, family=family, template=template, match=match, graph=graph, schedule=schedule,
                   source=offered.lower(match, schedule, target), target=target)
