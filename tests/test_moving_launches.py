"""Launches whose operands lie elsewhere at every call, of backends that offer such launches and of those that prepare them anew."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from agentcompile_core.errors import UsageError
from agentcompile_core.ir.candidate import Launch
from agentcompile_core.ir.graph import DType, Graph, GraphKind, TensorSpec, Value, ValueKind
from agentcompile_core.runtime.direct_calls import direct_calls
from agentcompile_core.runtime.moving_launches import KEPT, MovingLaunch, enqueue, moving_launch
from agentcompile_core.testing.doubles import FakeBackend, fake_source

LAUNCH = fake_source("honest").launches[0]  # in0, in1, out, count
FIXED, MOVED = {"in0": 16, "in1": 32, "out": 48}, {"in0": "x", "out": "y"}


class Noting(FakeBackend):
    """Notes which launches were prepared and which ran."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared, self.ran = list[tuple[Any, ...]](), list[tuple[Any, ...]]()

    def prepare_launch(self, handle: Any, launch: Launch, arguments: Sequence[int | float], pdl: bool) -> Callable[[int], None]:
        self.prepared.append(tuple(arguments))
        return lambda stream: self.ran.append((stream, *arguments))


class Moving(Noting):
    def prepare_moving(self, handle: Any, launch: Launch, arguments: Sequence[int | float], pdl: bool,
                       places: Sequence[int]) -> Callable[..., None] | None:
        def run(stream: int, *addresses: int) -> None:
            now = dict(enumerate(arguments)) | dict(zip(places, addresses, strict=True))
            self.ran.append((stream, *now.values()))

        return run


@pytest.mark.parametrize("backend", [Noting(), Moving()], ids=["anew", "moving"])
def test_a_launch_runs_over_the_addresses_of_each_call(backend: Noting) -> None:
    made = moving_launch(backend, "", LAUNCH, FIXED, MOVED, False)
    tensors = [{"x": torch.zeros(4), "y": torch.zeros(4), "other": torch.zeros(1)} for _ in range(3)]
    for one in (*tensors, *tensors):
        enqueue([made], one, lambda: 7)
        assert backend.ran[-1] == (7, one["x"].data_ptr(), 32, one["y"].data_ptr(), LAUNCH.arguments[3].value)
    assert made.values == ("x", "y")


def test_launches_that_are_prepared_anew_are_kept_a_few_at_a_time() -> None:
    backend = Noting()
    made = moving_launch(backend, "", LAUNCH, FIXED, MOVED, False)
    for _ in range(3):
        for at in range(KEPT):
            made.run(0, at, at)
    assert len(backend.prepared) == KEPT
    for at in range(KEPT + 1):
        made.run(0, at, at + 1)
    made.run(0, 0, 1)
    assert len(backend.prepared) == 2 * KEPT + 2, "the one that was not used for the longest time was dropped"
    assert backend.ran[-1][1:4] == (0, 32, 1)


def test_a_launch_of_what_stays_is_prepared_once() -> None:
    backend = Moving()
    made = moving_launch(backend, "", LAUNCH, FIXED, {"elsewhere": "x"}, False)
    assert made.values == () and backend.prepared == [(16, 32, 48, LAUNCH.arguments[3].value)]


def direct(ran: list[tuple[int, ...]], begin: Callable[[], int] = lambda: 5, device: str = "cpu") -> Callable[..., Any]:
    kinds = {"x": ValueKind.INPUT, "w": ValueKind.INPUT, "y": ValueKind.INTERMEDIATE, "z": ValueKind.INTERMEDIATE,
             "flat": ValueKind.INTERMEDIATE}
    values = tuple(Value(name=name, kind=kind, spec=TensorSpec(shape=(8,) if name == "flat" else (2, 4), dtype=DType.F32))
                   for name, kind in kinds.items())
    graph = Graph(name="forward", kind=GraphKind.FORWARD, values=values, nodes=(), inputs=("x", "w"), outputs=("z", "flat"))
    launches = [MovingLaunch(lambda *seen: ran.append(seen), names) for names in (("w", "y", "x"), ("z",), ())]
    return direct_calls(launches, graph, ("z", "y"), torch.device(device), threading.Lock(), begin)


def test_a_direct_call_gives_every_launch_the_addresses_of_its_values() -> None:
    ran: list[tuple[int, ...]] = []
    x, w = torch.zeros(2, 4), torch.zeros(2, 4)
    z, y = direct(ran)((x, w))
    assert ran == [(5, w.data_ptr(), y.data_ptr(), x.data_ptr()), (5, z.data_ptr()), (5,)]
    assert z.shape == (2, 4) and y.shape == (8,) and not z.is_inference()
    filled: list[Tensor] = []
    again = direct(ran)((x, w), filled.extend)
    assert [one.data_ptr() for one in filled] == [one.data_ptr() for one in again]


@pytest.mark.parametrize("other", [
    torch.zeros(4, 2), torch.zeros(4, 2).t(), torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4, device="meta"),
    torch.zeros(9)[1:].view(2, 4), torch.zeros(2, 4).to_sparse(), torch.zeros(2, 4, 1), torch._neg_view(torch.zeros(2, 4)), None, 1.0,
], ids=lambda value: type(value).__name__)
def test_a_direct_call_leaves_what_kernels_cannot_read_to_others(other: Any) -> None:
    ran: list[tuple[int, ...]] = []
    call, x = direct(ran), torch.zeros(2, 4)
    assert call((x, other)) is None and call((x,)) is None and call((x, x, x)) is None and not ran


def test_what_a_call_asks_first_ends_it() -> None:
    def begin() -> int:
        raise UsageError("changed")

    ran: list[tuple[int, ...]] = []
    call = direct(ran, begin)
    for _ in range(2):  # the lock is free again
        with pytest.raises(UsageError, match="changed"):
            call((torch.zeros(2, 4), torch.zeros(2, 4)))
    assert not ran
