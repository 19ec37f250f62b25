"""Stage capture: an opened model and a workload become a GraphSet that was compared with the model."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from attrs import evolve

from ...context import Context
from ...errors import Cause, Failure, StageName, UsageError, VerificationError
from ...garbage import settle, uncollected
from ...ir import serial
from ...ir.graph import GraphKind, GraphSet, ModelInfo, Workload
from ...plugin.events import NotStored, StoreMiss
from ...plugin.interfaces import Frontend, LoadedModel
from ...runtime.device import at_any_length
from ...store import keys


def run(loaded: LoadedModel, workload: Workload, ctx: Context, frontend: Frontend | None = None,
        versions: tuple[str, ...] | None = None, *, worker: bool = True) -> GraphSet:
    """Graphs of ``loaded`` for ``workload``: from the store, or captured by ``frontend`` (default: the one that fits its module).

    Every graph was interpreted and compared with its module, where that has weights. What the store holds and the module
    does not compute is captured anew; a model that cannot be captured, or whose fresh graphs differ from it, comes back
    without graphs and with an ``eager_reason``; that is no error. The store is used where ``versions`` (of torch,
    transformers, Python and this package) are given and all that the graphs depend on has a stable digest. ``worker``: one will be
    needed behind, and may start beside a capture.

    Raises:
        UsageError: the workload asks for more than the model or this version allows.
        VerificationError: a frontend returned a broken graph.
    """
    from .left_behind import ALONE

    with ALONE:  # threads that compile at the same time wait for each other here
        return _alone(loaded, workload, ctx, frontend, versions, worker)


def _alone(loaded: LoadedModel, workload: Workload, ctx: Context, frontend: Frontend | None, versions: tuple[str, ...] | None,
           worker: bool) -> GraphSet:
    from .dependence import dependence
    from .describe import describe, known_to_be, of_graphs
    from .first_call import begun
    from .identity import digested, identity_by
    from .stored_graphs import stored as as_stored

    check(workload, loaded)
    walk = digested(loaded.module)
    known, first_call = identity_by(walk, loaded), begun(loaded, walk)
    info = describe(loaded, known)
    made_by = (*(versions or ()), keys.code_of(type(frontend)))
    if why := first_call.in_training():
        return GraphSet(model=info, workload=workload, graphs=(), eager_reason=f"{info.name} runs on the framework: {why}")
    key = None if versions is None or known.unstable else keys.capture_key(known.capture, workload, made_by)
    if known.unstable:
        ctx.emit(NotStored(subject=info.name, reason=known.unstable))
    stored, notes = _stored(key, info, loaded, ctx) if key is not None else (None, ())
    if stored is not None:
        return stored
    if worker:
        ctx.prepare_worker()
    if why := first_call():
        return GraphSet(model=info, workload=workload, graphs=(), eager_reason=f"{info.name} runs on the framework: {why}", notes=notes)
    with known_to_be(loaded, known):
        graphs = of_graphs(_captured(loaded, workload, ctx, frontend), info)
    why = _unreadable(graphs)
    if why:
        return evolve(graphs, graphs=(), frequencies=(), kv=None, eager_reason=f"{info.name} runs on the framework: {why}",
                      notes=(*graphs.notes, *notes))
    graphs, why, agreed = _compared(graphs, loaded, ctx)
    if why:
        graphs = _without_graphs(graphs, why, ctx)
    elif graphs.graphs and (why := dependence(loaded)):
        graphs = evolve(graphs, graphs=(), frequencies=(), eager_reason=f"{info.name} runs on the framework: {why}")
    elif key is not None:
        with uncollected():
            text = serial.dumps(as_stored(graphs))
        ctx.store.put_text("capture", key, text)
        ctx.store.put_text("agreed", key, agreed)
    return evolve(graphs, notes=(*graphs.notes, *notes))


def _stored(key: str, info: ModelInfo, loaded: LoadedModel, ctx: Context) -> tuple[GraphSet | None, tuple[str, ...]]:
    """The stored graphs where they can be read and compute what the module computes; else a note on why not."""
    from ...ops.schema import verify_canonical
    from .describe import of_graphs
    from .stored_graphs import StoredGraphs

    text = ctx.store.text("capture", key)
    if text is None:
        return None, ()
    try:
        with uncollected():
            found = serial.loads(text, StoredGraphs)
            graphs = of_graphs(found.whole().verify(), info)
            verify_canonical(found.graphs)  # what is derived of it has the same operators, and other numbers alone
        before = ctx.store.text("agreed", key) or ""
        why, agreed = _difference(graphs, loaded, ctx, before, found.between)
    except (UsageError, VerificationError):
        ctx.emit(StoreMiss(key=key))
        return None, ()
    if not why:
        if agreed != before:
            ctx.store.put_text("agreed", key, agreed)
        else:  # no copy of the model was made, which may lie in a circle
            settle()
        return graphs, ()
    _record(info.name, f"the stored capture computes something else and is made anew: {why}", ctx)
    return None, (f"the stored capture of {info.name} computed something else and was made anew: {why}",)


def _captured(loaded: LoadedModel, workload: Workload, ctx: Context, frontend: Frontend | None) -> GraphSet:
    from ...ops.schema import verify_canonical

    if frontend is None:
        from .frontends import frontend_of

        frontend = frontend_of(loaded)
    return verify_canonical(frontend.capture(loaded, workload).verify())


def _unreadable(graphs: GraphSet) -> str:
    """Why a bundle with these graphs would be refused where it is opened; empty where it would not."""
    from ...ops.graph_check import check_graphs

    try:
        with uncollected():
            check_graphs(graphs)
    except (UsageError, VerificationError) as exc:
        return f"what was captured cannot be read again ({exc})"
    return ""


def _compared(graphs: GraphSet, loaded: LoadedModel, ctx: Context) -> tuple[GraphSet, str, str]:
    """The graphs that compute what the module computes, or one clause on how they do not; the digest of what agreed but for roundings.

    Of a recurrence the steps alone will do.
    """
    from .comparison import recurs

    why, agreed = _difference(graphs, loaded, ctx)
    steps = evolve(graphs, graphs=tuple(graph for graph in graphs.graphs if graph.kind is not GraphKind.PREFILL))
    if not why or not recurs(graphs) or len(steps.graphs) == len(graphs.graphs):
        return graphs, why, agreed
    other, agreed = _difference(steps, loaded, ctx)
    if other:
        return graphs, why, ""
    note = f"prompts of {graphs.model.name} run one token at a time: chunks of them compute something else than its own forward ({why})"
    return evolve(steps, notes=(note,)), "", agreed


def _difference(graphs: GraphSet, loaded: LoadedModel, ctx: Context, before: str = "",
                between: tuple[int, ...] | None = None) -> tuple[str, str]:
    """See ``comparison.difference``, and the digest of what agreed but for roundings; ``before``: that of the same graphs."""
    from .comparison import Agreed, difference

    agreed = Agreed(before=before)
    with _at_any_length(ctx):
        why = difference(graphs, loaded, agreed, between)
    return why, agreed.now


def _at_any_length(ctx: Context) -> AbstractContextManager[None]:
    """A few tokens at a time are compared, at lengths that never come again. What the backend raises is recorded."""
    if ctx.backend is None:
        return nullcontext()
    guarded = partial(ctx.catalog.guard, stage=StageName.CAPTURE, plugin=ctx.backend.name, subject="any_length")
    return at_any_length(ctx.backend, guarded)


def _without_graphs(graphs: GraphSet, why: str, ctx: Context) -> GraphSet:
    """The framework serves a model whose graphs compute something else."""
    name = graphs.model.name
    reason = f"{name} runs on the framework: its graphs compute something else than its own forward ({why})"
    _record(name, f"its graphs compute something else than its own forward: {why}", ctx)
    return evolve(graphs, graphs=(), frequencies=(), kv=None, eager_reason=reason)


def _record(name: str, message: str, ctx: Context) -> None:
    ctx.fail(Failure(stage=StageName.CAPTURE, cause=Cause.TOLERANCE, plugin="core", subject=name, message=message))


def check(workload: Workload, loaded: LoadedModel) -> None:
    """Refuse workloads that this version or the model does not allow.

    Raises:
        UsageError: batch other than 1, no context or one beyond the model's, a chunk of less than two tokens, another
            element type than the parameters have.
    """
    from .describe import dtype_of, limit_of, text_config

    limit, dtype = limit_of(text_config(loaded.module)), dtype_of(loaded.module)
    if limit and workload.max_context > limit:
        raise UsageError(f"a context of {workload.max_context} was asked for; {loaded.name} allows {limit}; pass at most that")
    if limit and workload.dtype is not dtype:
        raise UsageError(
            f"{workload.dtype.value} was asked for and {loaded.name} was loaded as {dtype.value}; "
            f"load it with dtype={workload.dtype.value!r}"
        )
    if workload.batch != 1:
        raise UsageError(f"batch {workload.batch} was asked for; single requests (batch 1) are compiled; pass batch=1")
    if workload.max_context < 2:
        raise UsageError(f"a context of {workload.max_context} was asked for; at least 2 positions are needed; pass a larger one")
    if not workload.prefill_chunks or min(workload.prefill_chunks) < 2:
        raise UsageError(f"prompt chunks {workload.prefill_chunks} were asked for; each needs at least 2 tokens; name at least one")
