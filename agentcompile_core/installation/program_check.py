"""An installed program against the framework's program of the same graph: the last look before it serves."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..plugin.interfaces import LoadedModel
from ..runtime.binder import bind
from ..runtime.executables import Executables
from ..runtime.module_session import ModuleSession
from ..runtime.program import Program, framework_program
from ..runtime.session import Session

if TYPE_CHECKING:
    import torch

    from ..runtime.weights import WeightStore

    Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]

FLOAT32_BOUND = 1e-3  # relative rms error of a step in float32
BEYOND = 64.0  # in rows of the cache that are not written yet
UNWRITTEN = -1  # in the history of tokens
SEED = 7


def difference(session: "Session | ModuleSession", programs: Mapping[str, Program], weights: "WeightStore", loaded: LoadedModel) -> str:
    """One clause on how far the installed programs are from the framework's; empty where they agree.

    A language model runs one prompt token and one decode step, a module its example inputs twice, and with random numbers where
    all elements of one are the same. What the programs write is poisoned before: memory that is new to a process may hold the
    right results already, of a session before this one. The relative rms error may be 1e-3 in float32 and 24 epsilon in narrower types.
    """
    pairs = _steps(session, programs, weights) if isinstance(session, Session) else _calls(session, programs, weights, loaded)
    return next((why for found, wanted in pairs if (why := _beyond(found, wanted))), "")


def _steps(session: Session, programs: Mapping[str, Program], weights: "WeightStore") -> "Pairs":
    import torch

    if session.max_context < 3:
        return
    highest = max(1, (session.graphs.model.vocab_size or 2) - 1)
    first, second = ([[min(1 + highest // 3, highest)]], highest // 2)
    prompt = torch.tensor(first)
    with session.exclusive(), torch.inference_mode():
        session.read(prompt)
        _poison_states(session)
        session.bound("decode").poison()
        found = session.read_next(second, 1)
        left, token, history = _left(session), int(session.ids), session.history.clone()
        session.read(prompt)
        _poison_states(session)
        bound = bind(framework_program(programs["decode"].graph), weights, session.states, {}, Executables(device=session.device))
        session.ids.fill_(second)
        session.position.fill_(1)
        bound.run()
        yield found, bound.output(0)[0, -1]
        yield from zip(left, _left(session), strict=True)
        # Which of two equal logits is taken is open: the token is held to the program's own logits, the history to the token.
        yield found[token], found.max()
        yield history, torch.where(session.history == UNWRITTEN, UNWRITTEN, token)
        for tensor in (*session.kv.keys, *session.kv.values, session.history):
            tensor.zero_()


def _poison_states(session: Session) -> None:
    """Put numbers that would be seen in any result where the step at position 1 writes, and behind it, where it must not read."""
    for tensor in (*session.kv.keys, *session.kv.values):
        tensor[:, 1:].fill_(BEYOND)
    session.history.fill_(UNWRITTEN)


def _left(session: Session) -> "list[torch.Tensor]":
    """What the step at position 1 leaves behind for later ones, beside the token."""
    rows = [tensor[:, 1:2] for tensor in (*session.kv.keys, *session.kv.values)]
    others = [tensor for source, tensor in session.states.items() if source in session.graphs.states]
    return [tensor.clone() for tensor in (session.position, *rows, *others)]


def _calls(session: ModuleSession, programs: Mapping[str, Program], weights: "WeightStore", loaded: Any) -> "Pairs":
    import torch

    graph = programs["forward"].graph
    if not hasattr(loaded, "example_inputs"):
        return
    examples = session.flat(loaded.example_inputs, loaded.example_keywords)
    for inputs in (examples, _telling(examples)):
        if inputs is None:
            return
        copies = {name: tensor.to(session.device, copy=True).contiguous() for name, tensor in zip(graph.inputs, inputs, strict=True)}
        first, second = (session.run(inputs, filled_with=byte) for byte in (0xFF, 0))
        bound = bind(framework_program(graph), weights, {}, copies, Executables(device=session.device))
        with torch.inference_mode():
            bound.run()
            for i, results in enumerate(zip(first, second, strict=True)):
                if results[0].is_floating_point():
                    yield from ((one, bound.output(i)) for one in results)
                else:  # of equals any one may be the largest, but it is the same one every time
                    yield results


def _telling(examples: "Sequence[torch.Tensor]") -> "list[torch.Tensor] | None":
    """The examples with random numbers where all of one are the same, which would hide what is read where; None: there are none such."""
    import torch

    generator, told = torch.Generator().manual_seed(SEED), False
    found = []
    for tensor in examples:
        if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            tensor, told = torch.randn(tensor.shape, generator=generator).to(tensor), True
        found.append(tensor)
    return found if told else None


def _beyond(found: Any, wanted: Any) -> str:
    import torch

    from ..ops.agreement import half_bound

    if not wanted.is_floating_point():
        count = int((found != wanted).sum())
        return f"{count} of {wanted.numel()} integers differ, or are not written" if count else ""
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(found)):
        count = int((finite != torch.isfinite(found)).sum())
        return f"{count} of its {wanted.numel()} results are NaN or infinite where the framework's are not, or the other way round"
    wide = torch.finfo(wanted.dtype).eps <= torch.finfo(torch.float32).eps
    bound = FLOAT32_BOUND if wide else half_bound(wanted.dtype)
    one, other = found[finite].double(), wanted[finite].double()
    if not other.numel():
        return ""
    error, rms = float((one - other).square().mean().sqrt()), float(other.square().mean().sqrt())
    return "" if error <= bound * rms or error == 0.0 else f"its rms error is {error:.3g} where the framework's rms is {rms:.3g}"
