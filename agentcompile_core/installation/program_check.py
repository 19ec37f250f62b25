"""An installed program against the framework's program of the same graph: the last look before it serves."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..errors import UsageError
from ..ir.graph import OFFSET, Graph, GraphKind
from ..plugin.interfaces import LoadedModel
from ..runtime.binder import bind
from ..runtime.bound_program import BoundProgram
from ..runtime.chunks import Chunk, ChunkInputs, rows_of
from ..runtime.device import at_any_length
from ..runtime.executables import Executables
from ..runtime.holding import give_back, held, hold
from ..runtime.live import HostPosition
from ..runtime.module_session import ModuleSession
from ..runtime.program import Program, framework_program
from ..runtime.session import Session
from . import module_calls, step_check

if TYPE_CHECKING:
    import torch

    from ..runtime.weights import WeightStore

    Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
    Run = Callable[[], torch.Tensor]

BEYOND = 2.0  # in rows of the cache that are not written yet: no score of half precision overflows by it
UNWRITTEN = -1  # in the history of tokens
AHEAD = 3  # positions by which a step is told that images shortened the prompt
SEED = 7
FACTS = 2  # of the pairs of a run the last ones: the token that it chose, beside its own logits, and the history
BY_ROUNDING = "its rms error"  # how a difference is called that roundings might have made (ops.agreement.beyond)


def difference(session: "Session | ModuleSession", programs: Mapping[str, Program], weights: "WeightStore", loaded: LoadedModel,
               notes: list[str] | None = None) -> str:
    """One clause on how far the installed programs are from the framework's; empty where they agree.

    A language model runs one prompt token and one decode step, and a step at the first position of each later range of positions; a
    module its example inputs twice, and with random numbers where all elements of one are the same. What the programs write is
    poisoned before: memory that is new to a process may hold the right results already, of a session before this one. The relative
    rms error may be 1e-3 where all floats of the graph are float32 or wider, else 24 epsilon of its widest steps; where a step as a
    whole is further apart, each of its kernels may (decisions/0042). ``notes`` gets a sentence for each program that could not be tried,
    or not as a whole.
    """
    if isinstance(session, Session):
        return _steps(session, programs, weights, [] if notes is None else notes)
    return _first(module_calls.of(session, programs, weights, loaded), _bound(programs["forward"].graph))


def _steps(session: Session, programs: Mapping[str, Program], weights: "WeightStore", notes: list[str]) -> str:
    """Of each decode program one step; what a cache that grows needs for those at high positions, it gives back."""
    before = held(session.kv)
    try:
        return _each_step(session, programs, _framework(session, programs["decode"].graph, weights), notes)
    finally:
        give_back(session.kv, before)


def _each_step(session: Session, programs: Mapping[str, Program], plain: Callable[[], BoundProgram], notes: list[str]) -> str:
    for program in sorted((p for p in programs.values() if p.graph.kind is GraphKind.DECODE), key=lambda p: -p.start):
        try:
            hold(session.kv, program.start + 2)
        except UsageError as exc:  # a request that comes so far is refused as well, unless memory is freed until then
            if not program.start:
                raise
            notes.append(f"{program.name} was not compared with the framework's operators, for lack of memory: {exc}")
            continue
        trial = _step(session, program, plain)
        apart = "" if trial is None else _judged(session, program, trial, notes)
        if apart:
            return f"{apart} ({program.name})" if program.start else apart
    return ""


@frozen(kw_only=True)
class _Trial:
    """One step at ``position`` behind what ``before`` caches, by the program and by the framework's."""

    before: "Callable[[], object]"
    position: int
    token: int
    ours: "Run"
    theirs: "Run"


def _judged(session: Session, program: Program, trial: _Trial, notes: list[str]) -> str:
    """One clause on how the step of a program is wrong. Where no more than numbers are too far apart, each of its kernels says whether it
    is: then all that it has replayed must be what they give one by one, bit by bit, and each what its nodes give."""
    pairs, limit = list(_both(session, trial.before, trial.position, 1, trial.ours, trial.theirs)), _bound(program.graph)
    apart, is_open = _apart(pairs, limit)
    if not is_open or all(s.step is None for s in program.segments):
        return apart
    one_by_one = _one_by_one(session, program, trial, limit, [found for found, _ in pairs[:-FACTS]])
    if one_by_one:
        return f"{apart}; {one_by_one}"
    notes.append(f"{program.name} was compared kernel by kernel: as a whole {apart}, and each of them gives what its operators give "
                 "(roundings decide what this model computes)")
    return ""


def _apart(pairs: "list[tuple[torch.Tensor, torch.Tensor]]", limit: float) -> tuple[str, bool]:
    """One clause on the first pair that is too far apart, or nothing; and whether roundings may have made all that are: no facts."""
    whys = [_beyond(found, wanted, limit) for found, wanted in pairs]
    first = next((why for why in whys if why), "")
    return first, bool(first) and not any(whys[-FACTS:]) and all(why.startswith(BY_ROUNDING) for why in whys if why)


def _one_by_one(session: Session, program: Program, trial: _Trial, limit: float, replayed: "list[torch.Tensor]") -> str:
    import torch

    with session.exclusive(), torch.inference_mode():
        hold(session.kv, trial.position + 1)
        trial.before()
        _poison_states(session, trial.position)
        bound = session.bound(program.name)
        bound.poison()
        session.ids.fill_(trial.token)
        session.position.fill_(trial.position)
        why = step_check.difference(bound, trial.position, lambda found, wanted: _beyond(found, wanted, limit))
        if not why:
            again = [bound.output(0)[0, -1], *_left(session, trial.position, 1)]
            same = all(torch.equal(one, other) for one, other in zip(replayed, again, strict=True))
            why = "" if same else "what a captured graph of it gives is not what its kernels give one by one"
        for tensor in (*_written(session), session.history):
            tensor.zero_()
    return why


def difference_of_prompts(session: Session, programs: Mapping[str, Program], weights: "WeightStore",
                          notes: list[str] | None = None) -> str:
    """The same of the programs that read prompts: the smallest and the largest chunk, at the start and behind another of their length."""
    for program in _tried(session, programs):
        chunk, limit = _chunk(session, program, weights), _bound(program.graph)
        pairs = list(_both(session, chunk.before, chunk.start, program.graph.tokens, chunk.ours, chunk.theirs))
        apart, is_open = _apart(pairs, limit)
        if is_open:
            by_pieces = _by_pieces(session, program, chunk, limit, [found for found, _ in pairs[:-FACTS]])
            if not by_pieces:
                said = (f"{program.graph.name} was compared piece by piece: as a whole {apart}, and each of them gives what its "
                        "operators give (roundings decide what this model computes)")
                (notes if notes is not None else []).append(said)
                continue
            apart = f"{apart}; {by_pieces}"
        if apart:
            return f"{apart} ({program.graph.name})"
    return ""


def _by_pieces(session: Session, program: Program, chunk: "_Chunk", limit: float, replayed: "list[torch.Tensor]") -> str:
    import torch

    tokens = program.graph.tokens
    with session.exclusive(), torch.inference_mode():
        hold(session.kv, chunk.start + tokens)
        chunk.before()
        _poison_states(session, chunk.start)
        chunk.place()
        ours, rows = session.bound(program.graph.name), slice(chunk.start, chunk.start + tokens)
        ours.poison()
        with at_any_length(session.backend):
            why = step_check.difference_of_pieces(ours, chunk.bound(), rows, lambda found, wanted: _beyond(found, wanted, limit))
        if not why:
            # The framework's operators may round by where a tensor lies: what is replayed is near to this, not the same bits.
            again = zip(replayed, [ours.output(0)[0, -1], *_left(session, chunk.start, tokens)], strict=True)
            far = next((why for one, other in again if (why := _beyond(one, other, limit))), "")
            why = f"what captured graphs of it give is not what its pieces give one by one: {far}" if far else ""
        for tensor in (*_written(session), session.history):
            tensor.zero_()
    return why


def _first(pairs: "Pairs", bound: float) -> str:
    return next((why for found, wanted in pairs if (why := _beyond(found, wanted, bound))), "")


def _bound(graph: Graph) -> float:
    from ..ops.agreement import program_bound

    return program_bound(graph)


def _framework(session: Session, graph: Graph, weights: "WeightStore") -> Callable[[], BoundProgram]:
    """The framework's program of a decode graph, bound when it is asked for first."""
    return cache(lambda: bind(framework_program(graph), weights, session.states, {}, Executables(device=session.device)))


def _step(session: Session, program: Program, plain: Callable[[], BoundProgram]) -> _Trial | None:
    import torch

    if session.max_context < 3:
        return None
    position, highest = max(1, program.start), max(1, (session.graphs.model.vocab_size or 2) - 1)
    token, prompt = highest // 2, torch.tensor([[min(1 + highest // 3, highest)]])

    def ours() -> "torch.Tensor":
        session.bound(program.name).poison()
        return session.read_next(token, position, program.name)

    def theirs() -> "torch.Tensor":
        bound = plain()
        session.ids.fill_(token)
        session.position.fill_(position)
        with at_any_length(session.backend):  # all of the cache under a mask, which nothing that is compiled attends over
            bound.run()
        return bound.output(0)[0, -1]

    if program.start:  # a prompt of so many tokens would take its time, and the programs that read it are compared apart
        return _Trial(before=lambda: _drawn(session, position), position=position, token=token, ours=ours, theirs=theirs)
    return _Trial(before=lambda: session.read(prompt), position=1, token=token, ours=ours, theirs=theirs)


def _drawn(session: Session, count: int) -> None:
    """Numbers for what ``count`` tokens leave in the caches, the same ones each time."""
    import torch

    session.forget()
    generator = torch.Generator(device=session.device).manual_seed(SEED)
    for tensor in (*session.kv.keys, *session.kv.values):
        tensor[:, :count].normal_(generator=generator)


def _tried(session: Session, programs: Mapping[str, Program]) -> list[Program]:
    prefill = [p for p in programs.values() if p.graph.kind is GraphKind.PREFILL and p.graph.tokens in session.chunk_sizes]
    prefill = [p for p in prefill if _start(session, p) >= 0]
    sizes = [p.graph.tokens for p in prefill]
    return [p for p in prefill if p.graph.tokens in (min(sizes), max(sizes))]


def _start(session: Session, program: Program) -> int:
    """The position at which a prompt program is tried; negative where none is left for it."""
    tokens, room = program.graph.tokens, min(session.kv.capacity, session.max_context) - program.graph.tokens
    return min(0, room) if program.graph.name.endswith("_fresh") else min(tokens, room)


@frozen(kw_only=True)
class _Chunk:
    """``tokens`` of a prompt from ``start`` on, behind what ``before`` caches: by the program, and by the framework's, ``bound`` anew."""

    before: "Callable[[], object]"
    start: int
    ours: "Run"
    theirs: "Run"
    place: Callable[[], None]
    bound: Callable[[], BoundProgram]


def _chunk(session: Session, program: Program, weights: "WeightStore") -> _Chunk:
    import torch

    graph, start = program.graph, _start(session, program)
    highest = max(2, session.graphs.model.vocab_size or 2)
    prompt = torch.randint(highest, (1, start + graph.tokens), generator=torch.Generator().manual_seed(graph.tokens))
    chunk = Chunk(tokens=graph.tokens, start=start, length=graph.tokens)
    rows = rows_of((chunk,), prompt, session.device)[0]

    def ours() -> "torch.Tensor":
        session.bound(graph.name).poison()
        return session.read_chunk(graph.name, prompt, start)

    def bound() -> BoundProgram:
        inputs = ChunkInputs(graph.tokens, session.device)
        inputs.flat.copy_(rows)
        # Over the live length too, in the core's own formula: under a mask over all of a long cache it would need much more memory.
        return bind(framework_program(graph), weights, session.states, inputs.named(graph.inputs), Executables(device=session.device),
                    HostPosition(start))

    def theirs() -> "torch.Tensor":
        made = bound()
        with at_any_length(session.backend):  # it attends block by block, over a number of keys of its own each
            made.run()
        return made.output(0)[0, -1]

    return _Chunk(before=(lambda: session.read(prompt[:, :start])) if start else session.forget, start=start, ours=ours, theirs=theirs,
                  place=lambda: session.place(chunk, rows), bound=bound)


def _both(session: Session, before: "Callable[[], object]", start: int, count: int, ours: "Run", theirs: "Run") -> "Pairs":
    """What two runs give and leave behind that read ``count`` tokens from position ``start`` on, up to which ``before`` fills the
    caches; both begin on poisoned memory."""
    import torch

    with session.exclusive(), torch.inference_mode():
        hold(session.kv, start + count)
        seen = []
        for run in (ours, theirs):
            before()
            _poison_states(session, start)
            logits = run()
            seen.append((logits, _left(session, start, count), session.ids.clone(), session.history.clone()))
        (found, left, token, history), (wanted, wanted_left, _, wanted_history) = seen
        yield found, wanted
        yield from zip(left, wanted_left, strict=True)
        # Which of two equal logits is taken is open: the token is held to the program's own logits, the history to the token.
        yield found[int(token)], found.max()
        yield history, torch.where(wanted_history == UNWRITTEN, UNWRITTEN, token.view(()))
        for tensor in (*_written(session), session.history):
            tensor.zero_()


def _written(session: Session) -> "list[torch.Tensor]":
    """K and V of all layers, as far as they may be written."""
    return [tensor[:, : held(session.kv)] for tensor in (*session.kv.keys, *session.kv.values)]


def _poison_states(session: Session, start: int) -> None:
    """Put numbers that would be seen in any result where what is read from ``start`` on is written, and behind it, where nothing reads."""
    for tensor in _written(session):
        tensor[:, start:].fill_(BEYOND)
    session.history.fill_(UNWRITTEN)
    if OFFSET in session.graphs.zeroed:
        session.states[OFFSET].fill_(AHEAD)


def _left(session: Session, start: int, count: int) -> "list[torch.Tensor]":
    """What is left behind for later steps, beside the token: position, states, and rows of all layers; of many rows those of layers at
    both ends and in the middle, which are little memory."""
    layers = len(session.kv.keys)
    looked_at = range(layers) if count == 1 else sorted({i % layers for i in (0, 1, layers // 2, -2, -1)} if layers else ())
    rows = [tensors[i][:, start : start + count] for tensors in (session.kv.keys, session.kv.values) for i in looked_at]
    others = [tensor for source, tensor in session.states.items() if source in session.graphs.states]
    return [tensor.clone() for tensor in (session.position, *rows, *others)]


def _beyond(found: Any, wanted: Any, bound: float) -> str:
    import torch

    from ..ops.agreement import beyond

    if not wanted.is_floating_point():
        count = int((found != wanted).sum())
        return f"{count} of {wanted.numel()} integers differ, or are not written" if count else ""
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(found)):
        count = int((finite != torch.isfinite(found)).sum())
        return f"{count} of its {wanted.numel()} results are NaN or infinite where the framework's are not, or the other way round"
    return beyond(found[finite], wanted[finite], bound, "the framework") if bool(finite.any()) else ""
