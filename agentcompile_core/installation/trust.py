"""Which steps of a bundle run: those of whose kernels and calls this user's store holds a passing record, those that are validated
again, or by the user's word.

Neither a binary nor a text of a bundle is believed. A kernel is the user's own if the store remembers this binary for exactly this
source, launches and all. Otherwise its step is lowered again: where the installed family makes the same source, that is built here.
What an installed implementation binds is the user's own as well. Of each of them the store must hold a passing record of the same
match, schedule, version, oracle and validators; else it is judged as a candidate is, on the nodes that it would replace. What is
left runs only with ``trust_kernels``, else its nodes run on the framework's operators.
"""

from collections.abc import Callable, Container, Mapping, Sequence

from attrs import field, frozen

from ..context import Context
from ..errors import Cause, Failure, StageName, one_line
from ..ir.candidate import CALLABLE, Kernel, StepSource
from ..ir.plan import Step
from ..ir.target import Target
from ..ir.verdict import Rejudged, Trial
from ..plugin.interfaces import Backend
from ..plugin.time_limit import OutOfTime
from ..runtime.executables import call_key
from ..runtime.make_program import without_steps
from ..runtime.program import Program, Segment
from ..runtime.sources import source_of
from .building import build_one
from .claims import Place, claims_of

FLAG = "--trust-kernels"
OWN_FIRST = ("known", "rebuilt", "trusted", "refused")  # what is said of a kernel before it is built and judged
Judge = Callable[[Sequence[tuple[Step, Trial]], Backend, Context], Sequence[Rejudged]]


@frozen(kw_only=True)
class Foreign:
    """What makes steps somebody else's: the target that they were built for, and who judges them here."""

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
    for key in sorted(sources, key=lambda key: OWN_FIRST.index(verdicts[key])):
        source = sources[key]
        # Sources of several shapes have one text, and so one binary: the user's own serves all of them that may run.
        shared = found.get(source.digest) if verdicts[key] != "refused" else None
        kernel = shared or _kernel(verdicts[key], source, kernels.get(source.digest), backend, ctx)
        if kernel is None:
            verdicts[key] = "refused" if verdicts[key] == "refused" else "unbuilt"
        else:
            found[source.digest] = kernel
    lost = {key for key, verdict in verdicts.items() if verdict in ("refused", "unbuilt")}
    judged = _judged(programs, {key for key, verdict in verdicts.items() if verdict in ("known", "rebuilt")}, foreign, backend, ctx)
    failed = {place: one.why for place, one in judged.items() if one.why}
    kept = {name: _kept(p, lost, failed) for name, p in programs.items()}
    used = {source.digest for p in kept.values() for source in p.sources}
    said = _after_judging(programs, verdicts, judged)
    return Trusted(programs=kept, kernels={digest: kernel for digest, kernel in found.items() if digest in used},
                   notes=_notes(said, next(iter(failed.values()), "")))


def _kept(program: Program, lost: set[str], failed: Container[Place]) -> Program:
    """The program without the steps of ``lost`` sources and those at places where they ``failed``."""
    def is_lost(segment: Segment) -> bool:
        return segment.source in lost or (program.graph.name, segment.nodes) in failed

    return without_steps(program, is_lost) if any(is_lost(s) for s in program.segments if s.step is not None) else program


def _judged(programs: Mapping[str, Program], own: set[str], foreign: Foreign, backend: Backend, ctx: Context) -> dict[Place, Rejudged]:
    """What is known here of every step whose source is one of the user's ``own``, or which an installed implementation binds."""
    def call_of(segment: Segment) -> StepSource | None:
        assert segment.step is not None and segment.match is not None
        try:  # what is not installed in this version, or does not cope with its match, is said where it is bound
            implementation = ctx.catalog.implementations[segment.step.implementation]
            if implementation.version == segment.version and implementation.accepts(segment.match, ctx.target) is True:
                return source_of(segment.step, segment.match, ctx.catalog, foreign.target)
        except (Exception, SystemExit):
            return None
        return None

    claims = claims_of(programs, own, foreign.target, call_of)
    said = foreign.judge([(claim.step, claim.trial) for claim in claims], backend, ctx) if claims else ()
    lost = {claim.step.implementation: (claim, one.why) for claim, one in zip(claims, said, strict=True)
            if one.why and claim.trial.source.language == CALLABLE}
    told = {failure.plugin for failure in ctx.failures if failure.stage is StageName.VALIDATE}  # what raised there is in the book
    for name, (claim, why) in lost.items():
        if name in told:
            continue
        ctx.fail(Failure(stage=StageName.INSTALL, cause=Cause.CONTRACT, plugin=name, subject=str(claim.step), message=why))
    return {place: one for claim, one in zip(claims, said, strict=True) for place in claim.places}


def _after_judging(programs: Mapping[str, Program], verdicts: Mapping[str, str], judged: Mapping[Place, Rejudged]) -> list[str]:
    """One word for every source, and for every computation that an implementation binds; the worst of their places counts."""
    found, calls = dict(verdicts), dict[str, str]()
    for program in programs.values():
        for segment in program.segments:
            one = judged.get((program.graph.name, segment.nodes))
            if one is None or segment.step is None or segment.match is None:
                continue
            if segment.is_call:
                key = call_key(segment.step, segment.version, segment.match)
                calls[key] = "call failed" if one.why or calls.get(key) == "call failed" else "call" if one.on_record else "call again"
            elif one.why:
                found[segment.source] = "failed" if verdicts[segment.source] == "rebuilt" else "known failed"
            elif found[segment.source] == "known" and not one.on_record:
                found[segment.source] = "known again"
    return [*found.values(), *calls.values()]


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
    except OutOfTime as exc:
        ctx.fail(Failure(stage=StageName.INSTALL, cause=Cause.TIMEOUT, plugin=segment.step.implementation, subject=str(segment.step),
                         message=str(exc)))
        return False
    except (Exception, SystemExit):  # a family need not cope with a step or match that a bundle made up
        return False


def _kernel(verdict: str, source: StepSource, given: Kernel | None, backend: Backend, ctx: Context) -> Kernel | None:
    if verdict == "refused":
        return None
    if verdict != "rebuilt" and given is not None and given.backend == backend.name:
        return given
    return build_one(source, backend, ctx) if backend.can_build(ctx.target) else None


def _notes(verdicts: list[str], why: str) -> tuple[str, ...]:
    instead = f"the framework's operators run instead ({one_line(why, 300)})"
    sentences = {
        "rebuilt": "kernel of the bundle not known to this machine's cache: made again from the installed families, and validated here",
        "failed": f"kernel of the bundle made again here and not validated: {instead}",
        "known again": "kernel of the bundle known to this machine's cache, with no record of passing these checks: validated here again",
        "known failed": f"kernel of the bundle known to this machine's cache and not validated: {instead}",
        "call again": "step of the bundle bound to an installed implementation, with no record of passing these checks: validated here",
        "call failed": f"step of the bundle bound to an installed implementation and not validated: {instead}",
        "trusted": f"kernel of the bundle made by nobody known here: run all the same ({FLAG})",
        "unbuilt": "kernel of the bundle not known to this machine's cache and not to be built here: the framework's operators run instead",
        "refused": "kernel of the bundle not known to this machine's cache, and no installed family makes the same source: the framework's "
                   f"operators run instead ({FLAG} runs them as they are)",
    }
    counts = {verdict: verdicts.count(verdict) for verdict in sentences}
    return tuple(f"{counts[v]} {_plural(sentence, counts[v])}" for v, sentence in sentences.items() if counts[v])


def _plural(sentence: str, count: int) -> str:
    first, rest = sentence.split(" ", 1)
    return f"{first}{'s' if count > 1 else ''} {rest}"
