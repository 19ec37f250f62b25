"""A KV cache that is not the one that was asked for is never used: kernels write where it should lie, and nothing else would tell."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_decode_runtime import Offers

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Cause, UsageError
from agentcompile_core.installation import runtimes
from agentcompile_core.ir.graph import DType, KVSpec
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.interfaces import KVCacheRuntime
from agentcompile_core.runtime.built_in import PlainKVState
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.store import Store
from agentcompile_core.testing.targets import FAKE

SPEC = KVSpec(layers=3, kv_heads=2, head_dim=8, capacity=5, dtype=DType.F32)
SHAPE = (1, 5, 2, 8)


class Other(KVCacheRuntime):
    """Whatever a test says."""

    name, preference = "other", 10

    def __init__(self, make: Callable[[KVSpec, str], Any]) -> None:
        self.make = make

    def allocate(self, kv: KVSpec, device: str) -> Any:
        return self.make(kv, device)


def session_caches(make: Callable[[KVSpec, str], Any], count: int = 1, strict: bool = False) -> tuple[list[Any], Context, list[str]]:
    """The caches of a session and its rows over a runtime that makes them so."""
    catalog = load_catalog(only=(), strict=strict, extra=[("outside", Offers(runtimes=(Other(make),)))])
    ctx, notes = Context(catalog=catalog, target=FAKE, config=Config(), store=Store(None)), list[str]()
    return [runtimes.kv_state(SPEC, Executables(device="cpu"), ctx, notes) for _ in range(count)], ctx, notes


def changed(**parts: Any) -> Callable[[KVSpec, str], Any]:
    def make(kv: KVSpec, device: str) -> Any:
        plain = PlainKVState(kv, device)
        return SimpleNamespace(**{"keys": plain.keys, "values": plain.values, "capacity": kv.capacity, "reset": plain.reset, **parts})

    return make


def one_tensor() -> torch.Tensor:
    return torch.zeros(SHAPE)


def overlapping(step: int) -> tuple[torch.Tensor, ...]:
    """Three tensors in one allocation, each ``step`` elements behind the one before it."""
    whole = torch.zeros(2 * step + 80)
    return tuple(whole[i * step : i * step + 80].view(SHAPE) for i in range(3))


def both_are_one(kv: KVSpec, device: str) -> Any:
    tensors = tuple(one_tensor() for _ in range(3))
    return changed(keys=tensors, values=tensors)(kv, device)


WRONG = {
    "one tensor for all layers": (changed(keys=(one_tensor(),) * 3), r"share memory, keys\[\d\] and keys\[\d\]"),
    "v is k": (both_are_one, r"share memory, (keys|values)\[\d\] and (keys|values)\[\d\]"),
    "a list of one tensor": (changed(values=[one_tensor()] * 3), r"share memory, values\[\d\] and values\[\d\]"),
    "ranges that overlap in part": (changed(keys=overlapping(40)), r"share memory, keys\[0\] and keys\[1\]"),
    "another device": (changed(values=tuple(torch.zeros(SHAPE, device="meta") for _ in range(3))), "device meta instead of cpu, as 3 of 6"),
    "another capacity": (changed(capacity=10), "capacity is 10 instead of 5 positions"),
    "no capacity": (changed(capacity=None), "capacity is None instead of 5 positions"),
    "no reset": (changed(reset=None), r"without reset\(\), which begins every request"),
    "four k and two v": (changed(keys=tuple(one_tensor() for _ in range(4)), values=(one_tensor(), one_tensor())), "other K and V"),
    "no tensors": (changed(keys=None), "allocates a SimpleNamespace without keys, where a KVState has tuples of tensors"),
    "nothing": (lambda kv, device: None, "allocates a NoneType without keys and values"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_cores_own_cache_takes_the_place_of_a_wrong_one_and_a_note_says_why(name: str) -> None:
    make, words = WRONG[name]
    (state,), ctx, notes = session_caches(make)
    assert isinstance(state, PlainKVState)
    (failure,) = ctx.failures
    assert (failure.plugin, failure.cause) == ("other", Cause.CONTRACT)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(failure.message)
    assert notes == [f"KV cache: the core's own, since other {failure.message}"]


@pytest.mark.parametrize("make", [PlainKVState, changed(), changed(keys=overlapping(80))], ids=["plain", "namespace", "side by side"])
def test_a_cache_as_it_should_be_is_taken(make: Callable[[KVSpec, str], Any]) -> None:
    (state,), ctx, notes = session_caches(make)
    assert not list(ctx.failures) and notes == [] and type(state) is type(make(SPEC, "cpu"))


def test_a_runtime_that_hands_out_one_cache_twice_serves_one_session() -> None:
    """Rows of a batch, and sessions beside each other, would overwrite each other's tokens."""
    kept = PlainKVState(SPEC, "cpu")
    (first, second), ctx, notes = session_caches(lambda kv, device: kept, count=2)
    assert first is kept and isinstance(second, PlainKVState) and second is not kept
    assert [f.plugin for f in ctx.failures] == ["other"] and "of another cache of other" in notes[0]


def test_memory_of_a_session_that_is_gone_may_be_used_again() -> None:
    pool: list[torch.Tensor] = [torch.zeros(6 * 80)]

    def make(kv: KVSpec, device: str) -> Any:
        parts = [pool[0][80 * i : 80 * (i + 1)].view(SHAPE) for i in range(6)]
        return changed(keys=tuple(parts[:3]), values=tuple(parts[3:]))(kv, device)

    for _ in range(2):
        (state,), _, notes = session_caches(make)
        assert notes == [] and not isinstance(state, PlainKVState)
        del state


@pytest.mark.parametrize("error", [RuntimeError("allocate is sad"), SystemExit(4), KeyError("layers")], ids=repr)
def test_what_a_runtime_raises_is_recorded_and_survived(error: BaseException) -> None:
    def make(kv: KVSpec, device: str) -> Any:
        raise error

    (state,), ctx, notes = session_caches(make)
    assert isinstance(state, PlainKVState)
    (failure,) = ctx.failures
    assert (failure.plugin, failure.cause, failure.message) == ("other", Cause.EXCEPTION, f"raised {type(error).__name__}: {error}")
    assert notes == [f"KV cache: the core's own, since other raised {type(error).__name__}: {error}"]
    with pytest.raises(type(error)):
        session_caches(make, strict=True)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), UsageError("use a shorter context"), KeyboardInterrupt()], ids=repr)
def test_memory_that_is_not_there_and_the_users_wish_are_no_faults_of_a_runtime(error: BaseException) -> None:
    def make(kv: KVSpec, device: str) -> Any:
        raise error

    with pytest.raises(type(error)):
        session_caches(make)
