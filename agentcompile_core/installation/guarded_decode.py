"""A plugin's decode runtime under guard: a program that it cannot prepare runs from Python, and what it moved is put back."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from ..context import Context
from ..errors import Cause, Failure, Reject, StageName, UsageError, bounded, last_frames, one_line
from ..plugin.interfaces import DecodeRuntime
from ..plugin.running import RunnableProgram, SessionState
from ..runtime.built_in import PythonLoop

# What runs a program: an error from there is the program's, whoever runs it.
_PROGRAMS = ("agentcompile_core.runtime.bound_program", "agentcompile_core.runtime.binder", "agentcompile_core.runtime.calls",
             "agentcompile_core.ops.interpreter")


class _OneByOne:
    """Several steps that were not prepared together; ``reason`` lets the session make each alone."""

    def __init__(self, run: Callable[[], None], reason: str) -> None:
        self._run, self.reason = run, reason

    def __call__(self) -> None:
        self._run()


class GuardedDecode(DecodeRuntime):
    """``runtime``, whose ``prepare`` may raise or return what is no step: a recorded failure, a note, and the core's own loop.

    Token, position, history, inputs and states of fixed size are afterwards what they were before.
    """

    def __init__(self, runtime: DecodeRuntime, ctx: Context, notes: list[str]) -> None:
        self._runtime, self._ctx, self._notes = runtime, ctx, notes
        self.name, self.version, self.preference = runtime.name, runtime.version, runtime.preference  # type: ignore[misc]
        self.needs_capture, self.several_steps = runtime.needs_capture, runtime.several_steps  # type: ignore[misc]

    def available(self, device: str) -> Literal[True] | Reject:
        """As the runtime says."""
        return self._runtime.available(device)

    def prepare(self, bound: RunnableProgram, session: SessionState, steps: int = 1) -> Callable[[], None]:
        """As the runtime does it, else from Python.

        Raises:
            UsageError: the runtime says in a sentence that it cannot be, for want of memory.
            torch.OutOfMemoryError: there is not enough.
            Exception: what running the program raised.
        """
        import torch

        names = (*bound.graph.inputs, *(value.name for value in bound.graph.kept))
        moved = (session.ids, session.position, session.history, *(bound.environment[n] for n in names if n in bound.environment))
        with torch.inference_mode():
            before = [tensor.clone() for tensor in moved]
        try:
            made = self._runtime.prepare(bound, session) if steps == 1 else self._runtime.prepare(bound, session, steps)
            if callable(made):
                return made
            why = f"prepare() returned {type(made).__name__}, not what makes a step"
            return self._from_python(bound, session, steps, Cause.CONTRACT, why)
        except (UsageError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as exc:
            if self._ctx.catalog.strict or _is_of_program(exc.__traceback__):
                raise
            why = f"prepare() raised {type(exc).__name__}: {exc}"
            return self._from_python(bound, session, steps, Cause.EXCEPTION, why, last_frames(exc))
        finally:
            with torch.inference_mode(), contextlib.suppress(RuntimeError):  # of a device that is lost: what it raised first is told
                for tensor, kept in zip(moved, before, strict=True):
                    tensor.copy_(kept)

    def _from_python(self, bound: RunnableProgram, session: SessionState, steps: int, cause: Cause, why: str,
                     traceback: str = "") -> Callable[[], None]:
        self._ctx.fail(Failure(stage=StageName.INSTALL, cause=cause, plugin=self.name, subject=f"program {bound.graph.name}",
                               message=bounded(why), traceback=traceback))
        note = one_line(f"decode: a Python loop where {self.name} prepared nothing: {why}", 400)
        if note not in self._notes:
            self._notes.append(note)
        run = PythonLoop().prepare(bound, session, steps)
        return run if steps == 1 else _OneByOne(run, why)


def _is_of_program(traceback: TracebackType | None) -> bool:
    """Whether an error came out of a program that ran."""
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__") in _PROGRAMS:
            return True
        traceback = traceback.tb_next
    return False
