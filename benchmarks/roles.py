"""The product's roles, switched on one by one: each variant is the same compiled model with some of its steps left to the framework, or to
an implementation that the search need not have selected."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from alternatives import ALTERNATIVES, served
from attrs import evolve, frozen
from peers.child import PeerDied
from peers.command import Entrants
from peers.estimate import Ask
from peers.rounds import OURS, Workload, prompt_lengths
from peers.systems import CUDALINEAR, Peers, Prompts, ours

from agentcompile_core.api.model import CompiledModel
from agentcompile_core.api.parts import Parts
from agentcompile_core.installation import install
from agentcompile_core.ir.graph import GraphKind
from agentcompile_core.runtime.make_program import without_steps
from agentcompile_core.runtime.program import Program, Segment

LINEAR, ATTENTION, FUSED = "linear", "attention", "fused_ops"
KV_CACHE, DECODE = "kv_cache", "decode"
BASELINE = {ATTENTION: "SDPA", LINEAR: "framework", FUSED: "none", KV_CACHE: "DynamicCache", DECODE: "Python loop"}
GENERATED = (LINEAR, ATTENTION, FUSED)
OUTSIDE = ("eager", CUDALINEAR)  # in processes of their own, by HuggingFace's own loop
LIBRARIES = ("vendor", "flashattn")  # whose implementations are named after what they do
OF_FAMILY = {"gemv": LINEAR, "gemm": LINEAR, "moe": LINEAR, "attention": ATTENTION}  # of others: what is fused around both


@frozen(kw_only=True)
class Variant:
    """A row: in what it differs from the one before it, and all its roles."""

    name: str
    adds: dict[str, str]
    roles: dict[str, str]


def variants() -> tuple[Variant, ...]:
    """The baseline first, all of ours last; each has what the one before it has, less what another one takes the place of.

    ``CUDALinear`` needs HuggingFace's loop, so that it is gone in the next row. Triton's kernels stand beside flash-attn, which leaves
    norms and rotations to others; generated attention takes them in.
    """
    added = (("eager", {}), (CUDALINEAR, {LINEAR: "CUDALinear"}), ("kv_cache", {KV_CACHE: "FlashKV", LINEAR: "framework"}),
             ("linear", {LINEAR: "generated"}), ("flash_attn", {ATTENTION: "flash-attn"}), ("attention", {ATTENTION: "generated"}),
             ("decode", {DECODE: "CUDA graph"}), ("triton", {ATTENTION: "flash-attn", FUSED: "Triton"}),
             (OURS, {ATTENTION: "generated", FUSED: "generated"}))
    roles, found = BASELINE, []
    for name, adds in added:
        roles = {**roles, **adds}
        found.append(Variant(name=name, adds=dict(adds), roles=roles))
    return tuple(found)


def role_of(segment: Segment) -> str:
    """Whose work a step is; implementations of the vendor's libraries say it by their own name."""
    plugin, _, name = segment.step.implementation.partition("/")
    return OF_FAMILY.get(name if plugin in LIBRARIES else plugin, FUSED)


def with_roles(program: Program, roles: dict[str, str]) -> Program:
    """The program with the steps of those roles alone that are generated; what the others did is the framework's."""
    on = {role for role in GENERATED if roles[role] == "generated"}
    return without_steps(program, lambda segment: role_of(segment) not in on)


def program_of(model: Any, program: Program, roles: dict[str, str]) -> Program:
    """``with_roles``, and in a decode step those roles that an implementation serves in place of the framework.

    Raises:
        PeerDied: it is not there, or serves nothing here.
    """
    found = with_roles(program, roles)
    if program.graph.kind is GraphKind.DECODE:
        for kind in ALTERNATIVES:
            if kind in roles.values():
                found = served(found, model.compilation.regions, kind, model.context, model.compilation.records)
    return found


def steps_of(program: Program) -> dict[str, int]:
    """How many steps of each role a program launches, and how many of the framework's nodes it runs."""
    steps = [role_of(segment) for segment in program.segments if segment.step is not None]
    rest = sum(len(segment.nodes) for segment in program.segments if segment.step is None)
    return {**{role: steps.count(role) for role in GENERATED}, "framework nodes": rest}


def chunks_of(session: Any, lengths: Sequence[int]) -> tuple[int, ...]:
    """The sizes of chunks in which ``session`` reads prompts of these lengths; all where a prompt would be cut otherwise into these alone.

    Each size is captured and compared for each variant, which takes longer than what is measured.
    """
    every = session.chunk_sizes
    wanted = {length: session.chunks(length, every) for length in lengths}
    sizes = tuple(sorted({chunk.tokens for chunks in wanted.values() for chunk in chunks} & set(every)))
    same = bool(sizes) and all(session.chunks(length, sizes) == chunks for length, chunks in wanted.items())
    return sizes if same else every


def installed(model: Any, variant: Variant, lengths: Sequence[int] = ()) -> Any:
    """The compiled model with the roles of ``variant``: the same weights in the same place, the same kernels, its own cache and graphs.

    ``lengths``: of the prompts that it will read, in the chunks in which ``model`` does; none named: of any.

    Raises:
        PeerDied: what was installed is not what was asked for, such as a step that cannot be bound or a program that fails the check
            against the framework by which installing ends.
    """
    found = model.compilation
    decode = "python_loop" if variant.roles[DECODE] == "Python loop" else ""
    context = evolve(model.context, config=evolve(model.context.config, decode=decode, kv_cache="flashkv"))
    sizes = chunks_of(model.session, lengths)
    kept = {name: one for name, one in found.programs.items() if one.graph.kind is not GraphKind.PREFILL or one.graph.tokens in sizes}
    programs = {name: program_of(model, program, variant.roles) for name, program in kept.items()}
    what = install.Runnable(graphs=model.graphs, programs=programs, kernels=found.kernels, provisional=found.provisional)
    session, notes = install.install(model.loaded, what, str(model.session.device), "auto", context, model.session._weights)
    lost = [note for note in notes if "on the framework's operators" in note]
    if lost and any(segment.step for program in programs.values() for segment in program.segments):
        raise PeerDied(f"{variant.name} was not installed: {lost[0]}")
    step = session._steps["decode"]
    if variant.roles[DECODE] != "Python loop" and not getattr(step, "captured", False):
        why = getattr(step, "reason", "") or "nothing here captures"
        raise PeerDied(f"{variant.name} was not installed: steps are not captured: {why}")
    return CompiledModel(Parts(loaded=model.loaded, graphs=model.graphs, session=session, context=context, compilation=found, notes=notes))


class Roles(Entrants):
    """The variants of one compiled model; those of ``OUTSIDE`` run in processes of their own. ``workloads``: those that will be asked for.

    Each variant has a cache of K and V of its own, of which that of the one whose turn it is is memory: all of them and the peers' would
    not fit. It is there before a clock starts.
    """

    def __init__(self, model: Any, peers: Peers, workloads: Iterable[Workload] = ()) -> None:
        super().__init__(model, peers)
        self._variants = {variant.name: variant for variant in variants()}
        self._installed: dict[str, Any] = {OURS: model}
        self._lengths = tuple(sorted({length for workload in workloads for length in prompt_lengths(workload)}))
        self._turn = OURS

    def ask(self, system: str, prompt_of: Prompts, workload: Workload) -> Ask:
        """A variant at a workload; one that cannot be installed, or fails, has rows that say so."""
        is_peer = system in self.peers.facts or system in self.peers.dead
        run = super().ask(system, prompt_of, workload) if is_peer else partial(self._run, system, prompt_of)

        def ask(given: int, new_tokens: int) -> float:
            self._begin_turn(system)
            return run(given, new_tokens)

        return ask

    def _begin_turn(self, system: str) -> None:
        if system != self._turn and self._turn in self._installed:
            self._installed[self._turn].session.give_back()
        self._turn = system

    def _run(self, system: str, prompt_of: Prompts, given: int, new_tokens: int) -> float:
        if system not in self._installed:
            made = _or_dead(system, lambda: installed(self.model, self._variants[system], self._lengths))
            self._installed[system] = made
        model = self._installed[system]

        def run() -> float:
            model.session.ready(given, new_tokens)
            return ours(model, prompt_of)(given, new_tokens)

        return run() if system == OURS else float(_or_dead(system, run))

    def facts(self, system: str) -> dict[str, Any]:
        """The roles of a variant, and how many steps of which role its decode program has."""
        variant, found = self._variants[system], super().facts(system)
        if system in self._installed:
            found = {**found, "steps": steps_of(program_of(self.model, self.model.compilation.programs["decode"], variant.roles))}
        return {**found, "roles": variant.roles, "adds": variant.adds, "place": list(self._variants).index(system)}


def _or_dead(system: str, act: Callable[[], Any]) -> Any:
    try:
        return act()
    except PeerDied:
        raise
    except Exception as exc:  # one row says what happened, the others go on
        raise PeerDied(f"{system} failed: {type(exc).__name__}: {' '.join(str(exc).split())[:300]}") from exc
