"""Reserved addresses on a GPU: what is held grows under tensors and captured graphs that stay where they are."""

import gc
import time
from collections.abc import Iterator

import pytest
import torch
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.reserving import CudaReserved

from agentcompile_core.plugin_api import Reject

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20
SIZES = (24 * MIB + 512, 16 * MIB)  # the last piece of the first range is only partly a tensor


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    torch.cuda.init()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def reserved(sizes: tuple[int, ...] = SIZES) -> CudaReserved:
    found = CudaBackend().reserve(sizes)
    assert not isinstance(found, Reject), found.reason
    return found


def free_bytes() -> int:
    """What nobody holds, torch's own allocator included: what counts the elements of a range takes eight times its size."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def filled_but(left: int) -> torch.Tensor:
    """All memory of the device but so many bytes; reserving more than a device has would take many thousand mappings."""
    return torch.empty(free_bytes() - left, dtype=torch.uint8, device="cuda")


def test_tensors_lie_where_they_were_and_all_of_them_can_be_read() -> None:
    one = reserved()
    assert [(t.dtype, t.numel(), t.device.type) for t in one.tensors] == [(torch.uint8, size, "cuda") for size in SIZES]
    assert all(t.data_ptr() % 256 == 0 for t in one.tensors) and one.held == (0, 0)
    assert [int(t.count_nonzero()) for t in one.tensors] == [0, 0]
    assert torch.equal(one.tensors[1].view(torch.float16).float().sum(), torch.zeros((), device="cuda"))
    host = one.tensors[0].cpu()  # a copy of the driver's, over many mappings
    assert host.numel() == SIZES[0] and int(host.count_nonzero()) == 0


def test_growing_keeps_addresses_and_contents_and_what_is_new_is_zero() -> None:
    one = reserved()
    places = [t.data_ptr() for t in one.tensors]
    filled = [0, 0]
    generator = torch.Generator(device="cuda").manual_seed(1)
    known = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in SIZES]
    for counts in ((1, 0), (3 * MIB, 1), (3 * MIB, 9 * MIB), (SIZES[0], 0), SIZES):
        assert one.hold(counts) is True
        assert all(held >= max(count, had) for held, count, had in zip(one.held, counts, filled, strict=True))
        for tensor, wanted, held in zip(one.tensors, known, one.held, strict=True):
            assert torch.equal(tensor, wanted), "what was there is there, and nothing else"
            wanted[:held].random_(1, 255, generator=generator)
            tensor[:held].copy_(wanted[:held])
        filled = list(one.held)
        assert [t.data_ptr() for t in one.tensors] == places
        assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(one.tensors, known, strict=True))
    assert one.held == SIZES


def test_memory_is_taken_step_by_step_and_given_back_with_the_last_tensor() -> None:
    reserved((MIB,)).hold((1,))  # what the driver keeps for itself, it has now
    gc.collect()
    start = free_bytes()
    one = reserved((512 * MIB, 512 * MIB))
    assert start - free_bytes() <= 32 * MIB, "1 GiB of addresses is no memory"
    for mib in (64, 128, 512):
        one.hold((mib * MIB, mib * MIB))
        taken = start - free_bytes()
        assert abs(taken - 2 * mib * MIB) <= 48 * MIB and one.held_bytes - 2 * mib * MIB <= 4 * MIB
    one.give_back((128 * MIB, 128 * MIB))
    assert one.held == (128 * MIB, 128 * MIB) and abs(start - free_bytes() - 256 * MIB) <= 48 * MIB
    assert int(one.tensors[0][128 * MIB:].count_nonzero()) == 0
    view = one.tensors[0].view(torch.float16)[5:9]
    view.fill_(3.0)
    del one
    gc.collect()
    assert start - free_bytes() >= 200 * MIB and view.tolist() == [3.0] * 4, "a view keeps all of it"
    del view
    gc.collect()
    assert start - free_bytes() <= 32 * MIB


def test_a_captured_graph_reads_and_writes_before_and_behind_growth() -> None:
    one, backend, owner = reserved((8 * MIB, 8 * MIB)), CudaBackend(), type("Owner", (), {})()
    source, target = (t.view(torch.float32) for t in one.tensors)
    total, at = torch.zeros((), device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    row = torch.ones(1, device="cuda")

    def run() -> None:
        target.index_copy_(0, at, row)  # writes where the device says
        torch.add(source[: 1 << 18].sum(), target.sum(), out=total)  # reads all of one range, held or not
        target[:16].copy_(source[:16])

    one.hold((1, 1))
    replay = backend.capture(run, warm_ups=2, owner=owner)
    assert not isinstance(replay, Reject), replay.reason
    for t in one.tensors:
        t[: 2 * MIB].zero_()
    source[:16].fill_(2.0)
    replay()
    torch.cuda.synchronize()
    assert float(total) == 33.0 and target[:16].tolist() == [2.0] * 16
    assert one.hold((8 * MIB, 8 * MIB)) is True
    source[100_000:100_004].fill_(1.0)
    at.fill_(1_500_000)  # only memory since it grew
    replay()
    torch.cuda.synchronize()
    assert float(total) == 32.0 + 4.0 + 32.0 + 1.0 and float(target[1_500_000]) == 1.0


def test_growth_waits_for_what_runs() -> None:
    one = reserved((8 * MIB,))
    one.hold((2 * MIB,))
    side, big = torch.cuda.Stream(), torch.ones(1 << 26, device="cuda")
    with torch.cuda.stream(side):
        for _ in range(50):
            big.mul_(1.0001)
        one.tensors[0][: 2 * MIB].fill_(7)
    one.hold((8 * MIB,))
    assert one.tensors[0][: 2 * MIB].unique().tolist() == [7] and one.tensors[0][2 * MIB:].unique().tolist() == [0]


def test_too_little_memory_leaves_everything_as_it_was() -> None:
    one = reserved((2048 * MIB, 64 * MIB))
    one.hold((4 * MIB, 4 * MIB))
    rest = filled_but(1024 * MIB)
    one.tensors[0][: 4 * MIB].fill_(5)
    before = free_bytes()
    answer = one.hold((2048 * MIB, 64 * MIB))
    assert isinstance(answer, Reject) and answer.reason.endswith(" MiB of the device are free")
    assert one.held == (4 * MIB, 4 * MIB) and abs(free_bytes() - before) <= 16 * MIB
    assert one.tensors[0][: 4 * MIB].unique().tolist() == [5] and int(one.tensors[0][4 * MIB:64 * MIB].count_nonzero()) == 0
    assert one.hold((8 * MIB, 64 * MIB)) is True and one.held == (8 * MIB, 64 * MIB)
    del rest


def test_memory_that_torch_keeps_for_later_is_used() -> None:
    one, rest = reserved((2048 * MIB, 2 * MIB)), filled_but(2048 * MIB)
    cached = torch.empty(1536 * MIB, dtype=torch.uint8, device="cuda")
    del cached  # torch keeps it
    assert torch.cuda.mem_get_info()[0] < 1024 * MIB
    assert one.hold((1024 * MIB, 1)) is True and one.held[0] == 1024 * MIB
    del rest


def test_reserving_and_growing_take_little_time() -> None:
    """Of a cache of 28 layers and 40,960 positions of 2 KiB: 56 ranges of 80 MiB, grown by 1,024 positions."""
    began = time.perf_counter()
    one = reserved((80 * MIB,) * 56)
    reserved_ms, samples = (time.perf_counter() - began) * 1e3, []
    for mib in range(2, 22, 2):
        began = time.perf_counter()
        assert one.hold((mib * MIB,) * 56) is True
        samples.append((time.perf_counter() - began) * 1e3)
    began = time.perf_counter()
    one.hold((20 * MIB,) * 56)
    print(f"reserving {reserved_ms:.1f} ms, growing by 112 MiB {sorted(samples)[len(samples) // 2]:.2f} ms, "
          f"nothing to do {(time.perf_counter() - began) * 1e6:.0f} us")
    assert reserved_ms < 5_000 and max(samples) < 1_000
