"""The kit of backends tries what they reserve, memory that comes and goes behind addresses, and their blocks around the framework; every
planted defect of either is refused."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from planted import refused

from agentcompile_core.testing import any_length
from agentcompile_core.testing.backend_conformance import BackendConformance
from agentcompile_core.testing.doubles import FakeBackend, fake_source, fake_trial
from agentcompile_core.testing.reserving import HostReserved


class GoodBackend(BackendConformance):
    backend, trial, broken = FakeBackend(), fake_trial("honest"), fake_source("no_build")


def backend(**methods: Any) -> FakeBackend:
    return type("Planted", (FakeBackend,), methods)()


class Forgetful(HostReserved):
    def hold(self, nbytes: Any) -> Any:
        found = super().hold(nbytes)
        self.tensors[0][: self.held[0]] = 0
        return found


class Moving(HostReserved):
    def hold(self, nbytes: Any) -> Any:
        found = super().hold(nbytes)
        self.tensors = tuple(tensor.clone() for tensor in self.tensors)
        return found


class Dirty(HostReserved):
    def give_back(self, nbytes: Any) -> None:
        before = [tensor.clone() for tensor in self.tensors]
        super().give_back(nbytes)
        for tensor, old in zip(self.tensors, before, strict=True):
            tensor.copy_(old)


class Shrinking(HostReserved):
    def hold(self, nbytes: Any) -> Any:
        self.give_back(nbytes)
        return super().hold(nbytes)


class Greedy(HostReserved):
    def give_back(self, nbytes: Any) -> None:
        super().give_back([0] * len(self.tensors))


class Boundless(HostReserved):
    @property
    def held(self) -> tuple[int, ...]:
        return tuple(count * self.piece_bytes for count in self._pieces)


class Eager(HostReserved):
    def __init__(self, nbytes: Any) -> None:
        super().__init__(nbytes)
        self._pieces = [1 for _ in nbytes]


class Refusing(HostReserved):
    """Takes what there is, and refuses."""

    def __init__(self, nbytes: Any) -> None:
        super().__init__(nbytes, limit_bytes=1 << 20)

    def hold(self, nbytes: Any) -> Any:
        found = super().hold(nbytes)
        if found is not True:
            self._pieces[0] += 1
        return found


@pytest.mark.parametrize("kind, reason", [
    (Forgetful, "expected 1; contents stay"), (Moving, "the ranges lie elsewhere"), (Dirty, "after give_back.*expected 0"),
    (Shrinking, "what is held stays held"), (Greedy, "were to stay"), (Boundless, "bytes of a range of 1000 are held"),
    (Eager, "at the beginning; nothing is"), (Refusing, "refused, and held changed"),
    (lambda sizes: HostReserved(sizes[1:]), "2 tensors for 3 ranges"),
    (lambda sizes: HostReserved([size + 1 for size in sizes]), "a range of"),
], ids=lambda value: "")
def test_defects_of_reservations_are_refused(kind: Any, reason: str) -> None:
    planted = backend(reserve=lambda self, nbytes: kind(nbytes))
    refused(GoodBackend, "test_what_is_reserved_grows_in_place", reason, backend=planted)


class TestBackendThatReserves(GoodBackend):
    backend = backend(reserve=lambda self, nbytes: HostReserved(nbytes))


class TestBackendWithLittleMemory(GoodBackend):
    backend = backend(reserve=lambda self, nbytes: HostReserved(nbytes, limit_bytes=1 << 20))


@contextmanager
def other_numbers(self: Any) -> Iterator[None]:
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", lambda rows, *_, **__: 2 * rows):
        yield


@contextmanager
def silent(self: Any) -> Iterator[None]:
    with suppress(ValueError):
        yield


class Once:
    """Leaves something behind where the first block ends."""

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, *_: object) -> None:
        torch.nn.functional.scaled_dot_product_attention = lambda rows, *_, **__: 2 * rows


TURN = threading.RLock()


@contextmanager
def in_turns(self: Any) -> Iterator[None]:
    with TURN:
        yield


@pytest.mark.parametrize(("block", "reason"), [
    (in_turns, "makes a second thread wait"), (other_numbers, "changes what the framework's attention gives"),
    (silent, "keeps what is raised"),
    (lambda self: Once(), "changes what the framework's attention gives")], ids=["turns", "numbers", "silent", "left"])
def test_defects_of_blocks_around_the_framework_are_refused(monkeypatch: pytest.MonkeyPatch, block: Any, reason: str) -> None:
    monkeypatch.setattr(any_length, "WAIT_S", 1.0)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", torch.nn.functional.scaled_dot_product_attention)
    refused(GoodBackend, "test_the_framework_runs_at_any_length", reason, backend=backend(any_length=block))
