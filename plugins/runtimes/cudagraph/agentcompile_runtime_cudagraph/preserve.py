"""Running a session's programs for warm-up without leaving a trace in its state."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentcompile_core.plugin_api import GraphKind, RunnableProgram, SessionState

if TYPE_CHECKING:
    import torch



@contextlib.contextmanager
def preserved(bound: RunnableProgram, session: SessionState, runs: int) -> Iterator[None]:
    """Make ``runs`` runs of ``bound`` safe, and put everything they change back at the end.

    A run writes KV rows from its position on, ids, position, history and states of fixed size. The position is moved back where
    those rows would lie beyond the cache; the rows are saved, and nothing else of the KV cache, which may be larger than what is
    free. A prompt chunk runs at position 0, where a first one writes whatever it is told.
    """
    graph = bound.graph
    decode = graph.kind is GraphKind.DECODE
    inputs = [bound.environment[name] for name in graph.inputs if name in bound.environment]
    kept = [bound.environment[value.name] for value in graph.kept]
    small = [session.ids, session.position, session.history, *inputs, *kept]
    saved = [tensor.clone() for tensor in small]
    count = min(session.kv.capacity, runs if decode else graph.tokens)
    start = min(int(session.position), session.kv.capacity - count) if decode else 0
    rows = [tensor[:, start:start + count] for tensor in (*session.kv.keys, *session.kv.values)]
    overwritten = [row.clone() for row in rows]
    session.position.fill_(start)
    if graph.kind is GraphKind.PREFILL:
        _chunk_of_one(inputs, start)
    try:
        yield
    finally:
        for tensor, before in zip((*small, *rows), (*saved, *overwritten), strict=True):
            tensor.copy_(before)


def _chunk_of_one(inputs: "list[torch.Tensor]", start: int) -> None:
    """A prompt chunk that is valid: token 0 everywhere, one of them real (a length of 0 would index row -1)."""
    prompt, first, length = inputs
    prompt.zero_()
    first.fill_(start)
    length.fill_(1)
