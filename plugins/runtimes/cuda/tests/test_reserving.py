"""The sequence of driver calls behind reserved addresses, against a driver that refuses what the real one refuses."""

import gc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings.driver")

from agentcompile_runtime_cuda.driver import CudaError
from agentcompile_runtime_cuda.reserving import Mappings
from agentcompile_runtime_cuda.virtual_memory import OUT_OF_MEMORY, VirtualMemory
from fake_virtual_memory import NUMBER, FakeDriver

SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=4)
COUNTS = st.lists(st.integers(0, 120), min_size=4, max_size=4)
EXAMPLES = settings(derandomize=True, database=None, deadline=None, max_examples=40)
pytestmark = pytest.mark.usefixtures("young_heap")


def made(driver: FakeDriver, sizes: list[int], forget: Any = lambda: None) -> Mappings:
    return Mappings(VirtualMemory(driver, NUMBER), sizes, lambda: None, forget)


class Watched:
    """Mappings, what should be read through them, and where they are."""

    def __init__(self, driver: FakeDriver, sizes: list[int], forget: Any = lambda: None) -> None:
        self.driver, self.mappings, self.turn = driver, made(driver, sizes, forget), 0
        self.contents = [bytes(one.nbytes) for one in self.mappings.ranges]
        self.addresses = [one.address for one in self.mappings.ranges]

    @property
    def ends(self) -> list[int]:
        return [one.end for one in self.mappings.ranges]

    def fill(self) -> None:
        self.turn += 1
        for index, one in enumerate(self.mappings.ranges):
            written = bytes((self.turn * 7 + index + i) % 255 + 1 for i in range(one.end))
            self.driver.write(one.address, written)
            self.contents[index] = written + bytes(one.nbytes - one.end)

    def check(self) -> None:
        assert [one.address for one in self.mappings.ranges] == self.addresses
        for one, wanted in zip(self.mappings.ranges, self.contents, strict=True):
            assert self.driver.read(one.address, one.nbytes) == wanted
        assert self.driver.used_bytes == self.mappings.held_bytes
        assert self.mappings.held_bytes == self.driver.granularity + sum(self.ends)

    def counts(self, given: list[int]) -> list[int]:
        return given[: len(self.addresses)]


@EXAMPLES
@given(sizes=SIZES, asked=st.lists(COUNTS, max_size=5))
def test_what_is_held_grows_and_keeps_its_contents(sizes: list[int], asked: list[list[int]]) -> None:
    driver = FakeDriver()
    one = Watched(driver, sizes)
    one.check()
    for counts in asked:
        before, wanted = one.ends, one.counts(counts)
        one.mappings.hold(wanted)
        assert all(end >= max(had, min(count, size)) and end < max(had + 1, min(count, size) + driver.granularity)
                   for end, had, count, size in zip(one.ends, before, wanted, sizes, strict=True))
        one.check()
        one.fill()
        one.check()
    calls = len(driver.calls)
    one.mappings.hold(one.ends)
    assert len(driver.calls) == calls, "what is there costs no call"
    del one
    gc.collect()
    assert driver.is_empty


@EXAMPLES
@given(sizes=SIZES, first=COUNTS, more=COUNTS, kept=COUNTS)
def test_what_is_given_back_reads_as_zeros_and_comes_again(sizes: list[int], first: list[int], more: list[int], kept: list[int]) -> None:
    driver = FakeDriver()
    one = Watched(driver, sizes)
    for counts in (first, more):
        one.mappings.hold(one.counts(counts))
    one.fill()
    before = one.ends
    one.mappings.give_back(one.counts(kept))
    assert all(min(had, count) <= end <= had for end, had, count in zip(one.ends, before, kept, strict=False))
    one.contents = [content[:end] + bytes(len(content) - end) for content, end in zip(one.contents, one.ends, strict=True)]
    one.check()
    one.mappings.hold(before)
    one.check()
    assert all(end >= had for end, had in zip(one.ends, before, strict=True))
    del one
    gc.collect()
    assert driver.is_empty


@EXAMPLES
@given(sizes=SIZES, first=COUNTS, more=COUNTS, call=st.integers(1, 120))
def test_a_call_that_fails_leaves_everything_as_it_was(sizes: list[int], first: list[int], more: list[int], call: int) -> None:
    driver = FakeDriver()
    one = Watched(driver, sizes)
    one.mappings.hold(one.counts(first))
    one.fill()
    before = one.ends
    driver.fails_at = {len(driver.calls) + call}
    try:
        one.mappings.hold(one.counts(more))
    except CudaError as exc:
        assert "words of CUDA_ERROR_UNKNOWN" in str(exc)
        assert one.ends == before and not one.mappings.broken
    one.check()
    driver.fails_at = set()
    one.mappings.hold(one.counts(more))
    one.check()
    del one
    gc.collect()
    assert driver.is_empty


@EXAMPLES
@given(sizes=SIZES, call=st.integers(1, 60))
def test_a_reservation_that_fails_leaves_nothing(sizes: list[int], call: int) -> None:
    driver = FakeDriver()
    driver.fails_at = {call}
    try:
        found = made(driver, sizes)
    except CudaError:
        gc.collect()
        assert driver.is_empty
        return
    assert len(driver.calls) < call
    driver.fails_at = set()
    del found
    gc.collect()
    assert driver.is_empty


@EXAMPLES
@given(sizes=SIZES, more=COUNTS, pieces=st.integers(1, 12))
def test_too_little_memory_is_said_and_changes_nothing(sizes: list[int], more: list[int], pieces: int) -> None:
    forgotten: list[int] = []
    driver = FakeDriver(memory_bytes=pieces * 16)
    one = Watched(driver, sizes, lambda: forgotten.append(1))
    needed = 16 + sum(-(-min(count, size) // 16) * 16 for count, size in zip(more, sizes, strict=False))
    if needed <= driver.memory_bytes:
        one.mappings.hold(one.counts(more))
        assert not forgotten
    else:
        with pytest.raises(CudaError) as caught:
            one.mappings.hold(one.counts(more))
        assert caught.value.code == OUT_OF_MEMORY and forgotten == [1] and one.ends == [0] * len(sizes)
        assert not {"map", "unmap"} & set(driver.calls[driver.calls.index("set") + 1:]), "mappings are touched when all memory is there"
    one.check()


def test_memory_that_somebody_keeps_for_later_is_asked_for() -> None:
    driver = FakeDriver(memory_bytes=160)
    _, kept = driver.cuMemCreate(96, None, 0)
    one = Watched(driver, [64, 64], lambda: driver.cuMemRelease(kept))
    one.mappings.hold([64, 64])
    assert one.ends == [64, 64]
    one.check()


@EXAMPLES
@given(sizes=SIZES, first=COUNTS, more=COUNTS, kept=COUNTS, call=st.integers(1, 40))
def test_a_call_that_fails_while_memory_is_given_back_leaves_ranges_that_can_be_read(sizes: list[int], first: list[int], more: list[int],
                                                                                      kept: list[int], call: int) -> None:
    """Whatever was given back by then reads as zeros, the rest as it was, and both can grow again."""
    driver = FakeDriver()
    one = Watched(driver, sizes)
    for counts in (first, more):
        one.mappings.hold(one.counts(counts))
    one.fill()
    number = len(driver.calls) + call
    driver.fails_at = {number}
    before = one.ends
    one.mappings.give_back(one.counts(kept))
    driver.fails_at = set()
    assert not one.mappings.broken and all(min(had, count) <= end <= had for end, had, count in zip(one.ends, before, kept, strict=False))
    one.contents = [content[:end] + bytes(len(content) - end) for content, end in zip(one.contents, one.ends, strict=True)]
    for place, wanted in zip(one.mappings.ranges, one.contents, strict=True):
        assert driver.read(place.address, place.nbytes) == wanted
    lost = number <= len(driver.calls) and driver.calls[number - 1] == "release"  # a driver that releases nothing keeps it
    assert lost or driver.used_bytes == one.mappings.held_bytes
    one.mappings.hold(before)
    for place, wanted, had in zip(one.mappings.ranges, one.contents, before, strict=True):
        assert place.end >= had and driver.read(place.address, place.nbytes) == wanted


def test_a_driver_that_fails_twice_is_said_to_have_lost_the_ranges() -> None:
    driver = FakeDriver()
    one = Watched(driver, [64, 64])
    first = len(driver.calls) + 2 + 4 + 1  # two pieces are taken, four zeros unmapped; then mapping fails, and mapping zeros again
    driver.fails_at = {first, first + 1}
    with pytest.raises(RuntimeError, match=r"cannot be put back .* after mapping memory failed"):
        one.mappings.hold([64, 64])
    with pytest.raises(RuntimeError, match="start the process again"):
        one.mappings.hold([64, 64])


def test_a_device_says_whether_it_maps_memory() -> None:
    driver = FakeDriver()
    assert VirtualMemory(driver, NUMBER).supported()
    driver.supports = False
    assert not VirtualMemory(driver, NUMBER).supported()
