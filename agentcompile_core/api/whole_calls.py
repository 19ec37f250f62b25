"""How a plain module's calls run: launch by launch, replayed from one graph, or by its own forward; whichever returns first.

What programs are made of was chosen by the device's time. A call also takes the host's time, which of small modules is most of it, so
the last choice is between whole calls, timed as a user waits for them.
"""

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..context import Context
from ..errors import Reject
from ..installation import install, program_check
from ..plugin.interfaces import Backend, LoadedModel
from ..runtime import calls
from ..runtime.device import release_cache
from ..runtime.module_changes import read_token
from ..runtime.module_session import ModuleSession
from ..runtime.session import Session

if TYPE_CHECKING:
    import torch

WARM_UPS = 3
ROUNDS = 25
LEAST_ROUNDS = 5
SECONDS = 0.5  # of all rounds, beyond the least number of them


def settle(session: "install.AnySession", loaded: LoadedModel, run_on: str, ctx: Context) -> tuple[str, ...]:
    """Let a module's session run calls in the fastest way; a note where that is not launch by launch.

    Only on a device with captured graphs, and where nobody said what is to run. Replayed calls are compared with the framework as
    launched ones were. The module's own forward is tried where the framework is an allowed origin; it must be faster by
    ``config.margin``, and so must replayed calls.
    """
    _note_reads(session, loaded)
    if run_on != "auto" or not isinstance(session, ModuleSession) or not hasattr(loaded, "example_inputs"):
        return ()
    backend = install.capturing(session.device, ctx)
    if backend is None:
        return ()
    args, keywords = _on_device(loaded, session)
    call, longer = partial(session, *args, **keywords), 1 + ctx.config.margin
    us = {"launched": _median_us(call)}

    def is_faster() -> bool:
        us["replayed"] = _median_us(call)
        return us["replayed"] * longer < us["launched"]

    if not _replays(session, loaded, backend, is_faster):
        us.pop("replayed", None)
    best = min(us.values())
    own_us = _own_us(session, loaded, call) if ctx.config.framework_competes else None
    if own_us is not None and own_us * longer < best:
        return (f"calls run the module's own forward: {own_us:.0f} us each, and {best:.0f} us by its program",)
    session.stay()
    if "replayed" in us:
        return (f"calls replay one captured graph: {best:.0f} us each, and {us['launched']:.0f} us launch by launch",)
    return ()


def as_in(settled: ModuleSession, session: "install.AnySession", loaded: LoadedModel, ctx: Context) -> tuple[str, ...]:
    """Let the session of an equal module run calls as ``settled`` does, without timing them; a note where that is not launch by launch."""
    _note_reads(session, loaded)
    if not isinstance(session, ModuleSession):
        return ()
    backend = install.capturing(session.device, ctx) if settled.replays else None
    note = "calls replay one captured graph" if backend is not None and _replays(session, loaded, backend) else ""
    if settled.runs_itself and session.step_aside(loaded.module) is None:
        note = "calls run the module's own forward"
    return (f"{note}, as those of an equal module that were timed",) if note else ()


def _note_reads(session: "install.AnySession", loaded: LoadedModel) -> None:
    """Let the session know which tensors the module reads that it does not register: from its example call, of a language model from one
    token, which says no more than what it exchanges."""
    from ..stages.capture.evaluating import evaluating
    from ..stages.capture.left_behind import undisturbed

    if isinstance(session, Session):
        def token(watched: AbstractContextManager[None]) -> None:
            with undisturbed(loaded.module), watched:
                read_token(loaded.module, session.device, session.backend)

        session.weights.note_reads(token, all_of_it=False)
    elif isinstance(session, ModuleSession) and hasattr(loaded, "example_inputs"):
        def call(watched: AbstractContextManager[None]) -> None:
            import torch

            args, keywords = calls.by_name(loaded.module, *copy.deepcopy(_on_device(loaded, session)))
            with torch.no_grad(), evaluating(loaded.module), undisturbed(loaded.module), watched:
                loaded.module(*args, **keywords)

        session.weights.note_reads(call, all_of_it=True)


def _replays(session: ModuleSession, loaded: LoadedModel, backend: Backend, is_worth: Callable[[], bool] = lambda: True) -> bool:
    """Have calls replay one captured graph where there is one, it is worth it, and computes what the framework does; else go back."""
    if session.replay(partial(backend.capture, owner=session)) is not None:
        return False
    if is_worth() and not program_check.difference(session, {"forward": session.program}, session.weights, loaded):
        return True
    session.launch()
    release_cache()
    return False


def _on_device(loaded: Any, session: ModuleSession) -> tuple[Any, Any]:
    """The example call with its tensors on the session's device."""
    import torch
    from torch.utils import _pytree as pytree

    def moved(tensor: "torch.Tensor") -> "torch.Tensor":
        return tensor.detach().to(session.device).contiguous()

    found: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, moved, (tuple(loaded.example_inputs), dict(loaded.example_keywords)))
    return found


def _own_us(session: ModuleSession, loaded: LoadedModel, call: Callable[[], object]) -> float | None:
    """Microseconds of a call by the module itself, which the session then leaves calls to; None: it cannot."""
    from ..stages.capture.left_behind import undisturbed

    if isinstance(session.step_aside(loaded.module), Reject):
        return None
    try:
        with undisturbed(loaded.module):
            return _median_us(call)
    except Exception:  # what it raises, its program does not; the session also raises where a call leaves another module behind
        return None


def _median_us(call: Callable[[], object]) -> float:
    import torch

    for _ in range(WARM_UPS):
        call()
    samples: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(samples) < LEAST_ROUNDS or (len(samples) < ROUNDS and time.perf_counter() < until):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        call()
        torch.accelerator.synchronize()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples) * 1e6
