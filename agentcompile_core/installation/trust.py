"""Which kernels of a bundle run: those that this user's store knows, those that are made and validated again, or by the user's word.

Neither a binary nor a text of a bundle is believed. A kernel is the user's own if the store remembers this binary for exactly this
source, launches and all. Otherwise its step is lowered again: where the installed family makes the same source, that is built here and
judged as a candidate is, on the nodes that it would replace. What is left runs only with ``trust_kernels``, else its nodes run on the
framework's operators.
"""

from collections.abc import Callable, Container, Mapping, Sequence

from attrs import field, frozen

from ..context import Context
from ..errors import one_line
from ..ir.candidate import Kernel, StepSource
from ..ir.plan import Step
from ..ir.target import Target
from ..ir.verdict import Trial
from ..plugin.interfaces import Backend
from ..runtime.make_program import without_steps
from ..runtime.program import Program, Segment
from ..runtime.sources import source_of
from .building import build_one
from .claims import Place, claims_of

FLAG = "--trust-kernels"
Judge = Callable[[Sequence[tuple[Step, Trial]], Backend, Context], Sequence[str]]  # why each may not run; empty: it passed


@frozen(kw_only=True)
class Foreign:
    """What makes kernels somebody else's: the target that they were built for, and who judges those that are made again."""

    target: Target
    judge: Judge = field(repr=False)


@frozen(kw_only=True)
class Trusted:
    """Programs without the steps that were refused, the kernels of the others by digest of their source, and notes."""

    programs: dict[str, Program]
    kernels: dict[str, Kernel]
    notes: tuple[str, ...]


def decide(programs: Mapping[str, Program], kernels: Mapping[str, Kernel], foreign: Foreign, backend: Backend,
           ctx: Context) -> Trusted:
    """Decide about every kernel of a bundle; ``backend`` is the one that is to launch them.

    Where ``backend`` is not the one that built them (emulation), known and trusted ones are built from their text. The judge is asked
    about every distinct computation that a kernel was made again for.
    """
    target = foreign.target
    segments: dict[str, list[Segment]] = {}
    for segment in (s for p in programs.values() for s in p.segments if s.source):
        segments.setdefault(segment.source, []).append(segment)
    sources = {s.key: s for p in programs.values() for s in p.sources if s.key in segments}
    verdicts = {key: _verdict(source, kernels.get(source.digest), segments[key], target, ctx) for key, source in sources.items()}
    found: dict[str, Kernel] = {}
    for key, source in sources.items():
        kernel = _kernel(verdicts[key], source, kernels.get(source.digest), backend, ctx)
        if kernel is None:
            verdicts[key] = "refused" if verdicts[key] == "refused" else "unbuilt"
        elif found.setdefault(source.digest, kernel).sha256 != kernel.sha256:
            verdicts[key] = "refused"  # one digest, two binaries: the first one stands
    lost = {key for key, verdict in verdicts.items() if verdict in ("refused", "unbuilt")}
    failed = _failed(programs, {key for key, verdict in verdicts.items() if verdict == "rebuilt"}, foreign, backend, ctx)
    verdicts.update({s.source: "failed" for p in programs.values() for s in p.segments if (p.graph.name, s.nodes) in failed})
    kept = {name: _kept(p, lost, failed) for name, p in programs.items()}
    used = {source.digest for p in kept.values() for source in p.sources}
    return Trusted(programs=kept, kernels={digest: kernel for digest, kernel in found.items() if digest in used},
                   notes=_notes(list(verdicts.values()), next(iter(failed.values()), "")))


def _kept(program: Program, lost: set[str], failed: Container[Place]) -> Program:
    """The program without the steps of ``lost`` sources and those at places where they ``failed``."""
    def is_lost(segment: Segment) -> bool:
        return segment.source in lost or (program.graph.name, segment.nodes) in failed

    return without_steps(program, is_lost) if any(is_lost(s) for s in program.segments if s.step is not None) else program


def _failed(programs: Mapping[str, Program], rebuilt: set[str], foreign: Foreign, backend: Backend,
            ctx: Context) -> dict[Place, str]:
    """Where a kernel that was made again may not run, and why."""
    claims = claims_of(programs, rebuilt, foreign.target) if rebuilt else ()
    said = foreign.judge([(claim.step, claim.trial) for claim in claims], backend, ctx) if claims else ()
    return {place: why for claim, why in zip(claims, said, strict=True) if why for place in claim.places}


def _verdict(source: StepSource, kernel: Kernel | None, segments: list[Segment], target: Target, ctx: Context) -> str:
    if kernel is not None and ctx.store.knows(kernel.sha256, source):
        return "known"
    if any(_made_here(source, one, target, ctx) for one in _distinct(segments)):
        return "rebuilt"
    return "trusted" if ctx.config.trust_kernels else "refused"


def _distinct(segments: list[Segment]) -> list[Segment]:
    """One segment for each step and match: instances of one layer ask a family the same."""
    found: list[Segment] = []
    for segment in segments:
        if all((segment.step, segment.match) != (one.step, one.match) for one in found):
            found.append(segment)
    return found


def _made_here(source: StepSource, segment: Segment, target: Target, ctx: Context) -> bool:
    """Whether the installed family makes exactly this source of the step."""
    if segment.step is None or segment.match is None or segment.step.implementation not in ctx.catalog.template_families:
        return False
    try:
        return source_of(segment.step, segment.match, ctx.catalog, target) == source
    except Exception:  # a family need not cope with a step or match that a bundle made up
        return False


def _kernel(verdict: str, source: StepSource, given: Kernel | None, backend: Backend, ctx: Context) -> Kernel | None:
    if verdict == "refused":
        return None
    if verdict != "rebuilt" and given is not None and given.backend == backend.name:
        return given
    return build_one(source, backend, ctx) if backend.can_build(ctx.target) else None


def _notes(verdicts: list[str], why: str) -> tuple[str, ...]:
    sentences = {
        "rebuilt": "of the bundle not known to this machine's cache: made again from the installed families, and validated here",
        "failed": f"of the bundle made again here and not validated: the framework's operators run instead ({one_line(why, 300)})",
        "trusted": f"of the bundle made by nobody known here: run all the same ({FLAG})",
        "unbuilt": "of the bundle not known to this machine's cache and not to be built here: the framework's operators run instead",
        "refused": "of the bundle not known to this machine's cache, and no installed family makes the same source: the framework's "
                   f"operators run instead ({FLAG} runs them as they are)",
    }
    counts = {verdict: verdicts.count(verdict) for verdict in sentences}
    return tuple(f"{counts[v]} kernel{'s' if counts[v] > 1 else ''} {sentence}" for v, sentence in sentences.items() if counts[v])
