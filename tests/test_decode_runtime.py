"""Which runtime steps run on: those that capture only where a backend captures, and a note where none does."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from attrs import evolve

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Reject, UsageError
from agentcompile_core.installation import install, runtimes
from agentcompile_core.ir.graph import DType, KVSpec, LayerHeads
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import Backend, DecodeRuntime, KVCacheRuntime, RuntimeIntegration
from agentcompile_core.plugin.running import KVState
from agentcompile_core.runtime.built_in import PlainKVState
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


class Narrow(KVCacheRuntime):
    """Knows nothing of layers with heads of their own: as a plugin that is older than these."""

    name, preference = "narrow", 10

    def allocate(self, kv: KVSpec, device: str) -> KVState:
        return PlainKVState(evolve(kv, others=()), device)


class Offers:
    def __init__(self, *backends: Backend, runtimes: tuple[RuntimeIntegration, ...] = (Recorder(),)) -> None:
        self.backends, self.runtimes = backends, runtimes

    @hookimpl
    def agentcompile_backends(self) -> Any:
        return self.backends

    @hookimpl
    def agentcompile_runtimes(self) -> Any:
        return self.runtimes


def context(*backends: Backend, **options: Any) -> Context:
    catalog = load_catalog(only=(), strict=True, extra=[("outside", Offers(*backends))])
    return Context(catalog=catalog, target=FAKE, config=Config(**options), store=Store(None))


def chosen(ctx: Context, device: str = "npu") -> tuple[str, list[str]]:
    notes: list[str] = []
    executables = Executables(device=device, backend=install.capturing(device, ctx))
    return runtimes.decode_runtime(ctx, executables, notes).name, notes


def test_what_captures_is_taken_where_a_backend_captures() -> None:
    assert chosen(context(backend("one"))) == ("recorder", [])
    assert chosen(context(backend("slow", FakeBackend), backend("two"))) == ("recorder", [])


@pytest.mark.parametrize("others", [(), (LayerHeads(1, 1, 16, 16),)])
def test_a_cache_of_other_shapes_than_the_models_is_never_used(others: tuple[LayerHeads, ...]) -> None:
    """A kernel writes where the model's rows would lie, whatever was allocated there."""
    catalog = load_catalog(only=(), strict=False, extra=[("outside", Offers(runtimes=(Narrow(),)))])
    ctx, notes = Context(catalog=catalog, target=FAKE, config=Config(), store=Store(None)), list[str]()
    spec = KVSpec(layers=2, kv_heads=2, head_dim=8, capacity=5, dtype=DType.F32, others=others)
    state = runtimes.kv_state(spec, Executables(device="cpu"), ctx, notes)
    assert [tuple(t.shape) for t in (*state.keys, *state.values)] == [*spec.key_shapes, *spec.value_shapes]
    assert [note for note in notes if "narrow allocates other K and V" in note] == (notes if others else [])
    assert [failure.plugin for failure in ctx.failures] == (["narrow"] if others else [])


@pytest.mark.parametrize("made", [lambda shape: torch.zeros(shape, dtype=torch.float64),
                                  lambda shape: torch.zeros(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2),
                                  lambda shape: torch.zeros(1 + math.prod(shape))[1:].view(shape)], ids=["type", "strides", "address"])
def test_a_cache_of_another_type_or_layout_is_never_used(made: Callable[[Any], torch.Tensor]) -> None:
    class Other(KVCacheRuntime):
        name, preference = "other", 10

        def allocate(self, kv: KVSpec, device: str) -> Any:
            return SimpleNamespace(keys=tuple(map(made, kv.key_shapes)), values=tuple(map(torch.zeros, kv.value_shapes)))

    catalog = load_catalog(only=(), strict=False, extra=[("outside", Offers(runtimes=(Other(),)))])
    ctx, notes = Context(catalog=catalog, target=FAKE, config=Config(), store=Store(None)), list[str]()
    spec = KVSpec(layers=1, kv_heads=2, head_dim=8, capacity=5, dtype=DType.F32)
    state = runtimes.kv_state(spec, Executables(device="cpu"), ctx, notes)
    assert isinstance(state, PlainKVState) and [failure.plugin for failure in ctx.failures] == ["other"] and "in 1 tensors" in notes[-1]


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
