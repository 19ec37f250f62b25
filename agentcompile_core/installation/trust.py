"""Which kernels of a bundle run: those that this user's store knows, those that the installed families make again, or by the user's word.

Neither a binary nor a text of a bundle is believed. A kernel is the user's own if the store remembers this binary for exactly this
source, launches and all. Otherwise its step is lowered again: where the installed family makes the same source, that is built here.
What is left runs only with ``trust_kernels``, else its nodes run on the framework's operators.
"""

from collections.abc import Mapping

from attrs import frozen

from ..context import Context
from ..ir.candidate import Kernel, StepSource
from ..ir.target import Target
from ..plugin.interfaces import Backend
from ..runtime.make_program import without_steps
from ..runtime.program import Program, Segment
from ..runtime.sources import source_of
from .building import build_one

FLAG = "--trust-kernels"


@frozen(kw_only=True)
class Trusted:
    """Programs without the steps that were refused, the kernels of the others by digest of their source, and notes."""

    programs: dict[str, Program]
    kernels: dict[str, Kernel]
    notes: tuple[str, ...]


def decide(programs: Mapping[str, Program], kernels: Mapping[str, Kernel], target: Target, backend: Backend, ctx: Context) -> Trusted:
    """Decide about every kernel of a bundle; ``target`` is the bundle's, ``backend`` the one that is to launch them.

    Where ``backend`` is not the one that built them (emulation), known and trusted ones are built from their text.
    """
    segments = {s.source: s for p in programs.values() for s in p.segments if s.source}
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
    kept = {name: without_steps(p, lambda s: s.source in lost) if lost else p for name, p in programs.items()}
    return Trusted(programs=kept, kernels=found, notes=_notes(list(verdicts.values())))


def _verdict(source: StepSource, kernel: Kernel | None, segment: Segment, target: Target, ctx: Context) -> str:
    if kernel is not None and ctx.store.knows(kernel.sha256, source):
        return "known"
    if _made_here(source, segment, target, ctx):
        return "rebuilt"
    return "trusted" if ctx.config.trust_kernels else "refused"


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


def _notes(verdicts: list[str]) -> tuple[str, ...]:
    sentences = {
        "rebuilt": "{} of the bundle not known to this machine's cache: made again from the installed families",
        "trusted": f"{{}} of the bundle made by nobody known here: run all the same ({FLAG})",
        "unbuilt": "{} of the bundle not known to this machine's cache and not to be built here: the framework's operators run instead",
        "refused": "{} of the bundle not known to this machine's cache, and no installed family makes the same source: the framework's "
                   f"operators run instead ({FLAG} runs them as they are)",
    }
    counts = {verdict: verdicts.count(verdict) for verdict in sentences}
    return tuple(sentence.format(f"{counts[v]} kernel{'s' if counts[v] > 1 else ''}") for v, sentence in sentences.items() if counts[v])

