"""Which runtime steps run on: those that capture only where a backend captures, and a note where none does."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from attrs import evolve

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Reject, UsageError
from agentcompile_core.installation import install
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import Backend, DecodeRuntime
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import FakeBackend, ReplayingBackend
from agentcompile_core.testing.targets import FAKE


class Recorder(DecodeRuntime):
    name, preference, needs_capture = "recorder", 10, True

    def available(self, device: str) -> Literal[True] | Reject:
        return True if device == "npu" else Reject(f"the recorder knows no {device}")

    def prepare(self, bound: Any, session: Any) -> Callable[[], None]:
        raise AssertionError("chosen, not run")


def backend(name: str, base: type[FakeBackend] = ReplayingBackend, here: bool = True) -> Backend:
    answer = True if here else Reject("it is not here")
    return type(name, (base,), {"name": name, "device": "npu", "available": lambda self: answer})()


class Offers:
    def __init__(self, *backends: Backend) -> None:
        self.backends = backends

    @hookimpl
    def agentcompile_backends(self) -> Any:
        return self.backends

    @hookimpl
    def agentcompile_runtimes(self) -> Any:
        return (Recorder(),)


def context(*backends: Backend, **options: Any) -> Context:
    catalog = load_catalog(only=(), strict=True, extra=[("outside", Offers(*backends))])
    return Context(catalog=catalog, target=FAKE, config=Config(**options), store=Store(None))


def chosen(ctx: Context, device: str = "npu") -> tuple[str, list[str]]:
    notes: list[str] = []
    executables = Executables(device=device, backend=install.capturing(device, ctx))
    return install._decode_runtime(ctx, executables, notes).name, notes


def test_what_captures_is_taken_where_a_backend_captures() -> None:
    assert chosen(context(backend("one"))) == ("recorder", [])
    assert chosen(context(backend("slow", FakeBackend), backend("two"))) == ("recorder", [])


@pytest.mark.parametrize("backends", [(), (backend("slow", FakeBackend),), (backend("gone", here=False),)], ids=["none", "no", "away"])
def test_elsewhere_steps_run_from_python_and_a_note_says_why(backends: tuple[Backend, ...]) -> None:
    name, notes = chosen(context(*backends))
    assert name == "python_loop" and len(notes) == 1
    assert "no backend that is installed and works here captures on the device npu" in notes[0]
    with pytest.raises(UsageError, match="decode runtime 'recorder' cannot run here: it captures programs"):
        chosen(context(*backends, decode="recorder"))


def test_on_the_host_there_is_nothing_to_note() -> None:
    assert chosen(context(backend("one")), "cpu") == ("python_loop", [])


def test_the_backend_of_the_run_captures_before_others() -> None:
    first, second = backend("one"), backend("two")
    ctx = context(first, second)
    assert install.capturing("npu", ctx) is first
    assert install.capturing("npu", evolve(ctx, backend=second)) is second
    assert install.capturing("cpu", ctx) is None
