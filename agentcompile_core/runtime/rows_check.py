"""A step of several rows against steps of single rows: the look before it serves."""

from typing import TYPE_CHECKING

from .holding import hold
from .rows_state import OneRow, RowsStep

if TYPE_CHECKING:
    import torch

BEYOND = 2.0  # in rows of the caches that are not written yet
SEED = 11
FIRST = 3  # position of the first row; each further one is two behind it


def furthest(rows: int) -> int:
    """Positions that the look writes in a row's cache, at most."""
    return FIRST + 2 * rows + 2


class _Case:
    """One row: ``token`` read at ``position`` behind drawn K and V, and what a single step makes of it."""

    def __init__(self, session: OneRow, index: int) -> None:
        import torch

        most = min(session.kv.capacity, session.max_context) - 2
        self.position = 1 + (FIRST + 2 * index) % max(1, most)
        highest = max(2, session.graphs.model.vocab_size or 2)
        self.token = (7 + 31 * index) % highest
        generator = torch.Generator(device=session.device).manual_seed(SEED + index)
        tensors = (*session.kv.keys, *session.kv.values)
        self.drawn = [tensor.new_empty((1, self.position, *tensor.shape[2:])).normal_(generator=generator) for tensor in tensors]
        hold(session.kv, self.position + 2)
        self.fill(tensors)
        self.logits = session.read_next(self.token, self.position)
        self.left = [tensor[:, self.position].clone() for tensor in tensors]
        self.behind = [tensor[:, self.position + 1].clone() for tensor in tensors]

    def fill(self, tensors: "tuple[torch.Tensor, ...]") -> None:
        """K and V below the position as drawn, at it and behind it numbers that would be seen in any result."""
        for tensor, drawn in zip(tensors, self.drawn, strict=True):
            tensor[:, : self.position].copy_(drawn)
            tensor[:, self.position : self.position + 2].fill_(BEYOND)


def difference(session: OneRow, step: RowsStep) -> str:
    """One clause on what a step of several rows computes otherwise than single steps; empty where they agree.

    Rows have tokens, positions and histories of their own, and change places once; one stands still. The relative rms error may be
    what programs of its graph may have (ops.agreement). ``session`` is held by the caller; what its cache held is lost.
    """
    import torch

    if min(session.kv.capacity, session.max_context) < FIRST + 1:
        return "the context is too short to try it"
    with torch.inference_mode():
        cases = [_Case(session, index) for index in range(len(step.state.caches))]
        for order in (cases, cases[::-1], cases[1:] + cases[:1]):
            why = _unlike(step, order, standing=order is not cases)
            if why:
                return why
    return ""


def _unlike(step: RowsStep, cases: list[_Case], standing: bool) -> str:
    """``standing``: the last row does not move on."""
    import torch

    from ..ops.agreement import beyond, program_bound

    state, bound = step.state, program_bound(step.bound.graph)
    for row, case in enumerate(cases):
        hold(state.caches[row], case.position + 2)
        case.fill(state.tensors(row))
        state.ids[0, row], state.positions[row] = case.token, case.position
    state.live.fill_(1)
    state.live[-1] = 0 if standing else 1
    state.history.fill_(-1)
    step.bound.poison()
    step.run()
    logits = step.bound.output(0)
    for row, case in enumerate(cases):
        left = [tensor[:, case.position] for tensor in state.tensors(row)]
        for found, wanted in zip((logits[0, row], *left), (case.logits, *case.left), strict=True):
            if why := beyond(found, wanted, bound):
                return f"{why} (row {row})"
        if not all(map(torch.equal, (t[:, case.position + 1] for t in state.tensors(row)), case.behind)):
            return f"it writes behind its position (row {row})"
        token, moved = int(state.ids[0, row]), not (standing and row == len(cases) - 1)
        at = case.position + moved
        if float(logits[0, row, token]) != float(logits[0, row].max()):
            return f"its token is not the most likely one (row {row})"
        history = torch.full_like(state.history[row], -1)
        history[at] = token
        if int(state.positions[row]) != at or not torch.equal(state.history[row], history):
            return f"it does not move on as a single step does (row {row})"
    return ""
