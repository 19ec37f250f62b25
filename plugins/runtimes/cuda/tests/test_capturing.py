"""What is done with torch's allocator where a capture fails, without a device: by a graph and an allocator that count."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from agentcompile_runtime_cuda import capturing

POOL = (0, 7)


class Allocator:
    """Records to pools, and says so of none twice."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, int]] = []
        self.used: list[tuple[int, int]] = []

    def begin(self, pool: tuple[int, int]) -> None:
        self.recorded.append(pool)
        self.used.append(pool)

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.recorded:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recorded.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.used.remove(pool)


class Graph:
    """As torch before 2.12 (``leaves``) or behind it; ``fails``: beginning, ending or nothing."""

    def __init__(self, allocator: Allocator, fails: str, leaves: bool) -> None:
        self.allocator, self.fails, self.leaves = allocator, fails, leaves

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.pool = pool
        self.allocator.begin(pool)
        if self.fails == "begin":
            raise RuntimeError("out of memory")

    def capture_end(self) -> None:
        broken = self.fails in ("begin", "end")
        if not broken or not self.leaves:
            self.allocator.end(0, self.pool)
        if broken:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    found = Allocator()
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", found.release, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    yield found


@pytest.mark.parametrize("pool", [None, (0, 9)], ids=["passing", "kept"])
@pytest.mark.parametrize("leaves", [True, False], ids=["torch_2_11", "torch_2_12"])
@pytest.mark.parametrize(("fails", "raises"), [("begin", False), ("end", False), ("end", True), ("", True)])
def test_nothing_is_recorded_behind_a_capture_that_failed(allocator: Allocator, pool: Any, leaves: bool, fails: str, raises: bool) -> None:
    graph: Any = Graph(allocator, fails, leaves)
    with pytest.raises(RuntimeError, match="a run" if raises else "out of memory|previous error"), capturing._recorded(graph, pool):
        if raises:
            raise RuntimeError("a run")
    assert not allocator.recorded and graph.pool == (pool or POOL)
    assert bool(allocator.used) is not (fails == "begin" or (leaves and fails == "end")), "released once, where torch does not"


def test_a_capture_keeps_its_pool(allocator: Allocator) -> None:
    graph: Any = Graph(allocator, "", True)
    with capturing._recorded(graph):
        pass
    assert allocator.used == [POOL] and not allocator.recorded


def test_a_torch_that_has_no_such_functions_is_left_alone(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    graph: Any = Graph(allocator, "end", True)
    with suppress(RuntimeError), capturing._recorded(graph):
        pass
    assert allocator.recorded == [POOL]
