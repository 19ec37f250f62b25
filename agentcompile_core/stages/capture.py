"""Stage capture: an opened model and a workload become a GraphSet."""

from ..context import Context
from ..errors import UsageError
from ..graph import GraphSet, Workload
from ..interfaces import Frontend, LoadedModel


def run(loaded: LoadedModel, workload: Workload, ctx: Context, frontend: Frontend | None = None) -> GraphSet:
    """Capture ``loaded`` for ``workload`` with ``frontend`` (default: the one of the catalog, or ours, that fits its module).

    A model that cannot be captured comes back without graphs and with an ``eager_reason``; that is no error.

    Raises:
        UsageError: the workload asks for more than the model or this version allows.
        VerificationError: a frontend returned a broken graph.
    """
    check(workload, loaded)
    if frontend is None:
        from ..capture.frontends import frontend_of

        frontend = frontend_of(loaded)
    return frontend.capture(loaded, workload).verify()


def check(workload: Workload, loaded: LoadedModel) -> None:
    """Refuse workloads that this version or the model does not allow.

    Raises:
        UsageError: batch other than 1, no context or one beyond the model's, a chunk of less than two tokens, another
            element type than the parameters have.
    """
    from ..capture import model_info
    from ..capture.describe import dtype_of

    limit, dtype = model_info(loaded).limit, dtype_of(loaded.module)
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
