"""The framework's own model runs without cuDNN's attention, and what the process had set holds afterwards."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from agentcompile_runtime_cuda.backend import CudaBackend


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_that_overlap_leave_what_the_first_found(before: bool, order: tuple[int, ...]) -> None:
    asked, set_asked = torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp
    found = asked()
    try:
        set_asked(before)
        blocks = [CudaBackend().any_length() for _ in order]  # of several sessions, that several threads may run
        for block in blocks:
            block.__enter__()
            assert not asked()
        for left, index in enumerate(order, 1):
            blocks[index].__exit__(None, None, None)
            assert asked() is (before and left == len(blocks))
        assert asked() is before
    finally:
        set_asked(found)


def test_many_threads_leave_what_they_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backend, wrong = torch.backends.cuda.cudnn_sdp_enabled, CudaBackend(), list[int]()

    def many(number: int) -> None:
        for _ in range(30):
            with backend.any_length():
                if asked():
                    wrong.append(number)

    before, enable = asked(), torch.backends.cuda.enable_cudnn_sdp

    def slowly(on: bool) -> None:
        time.sleep(1e-4)  # another thread runs meanwhile
        enable(on)

    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", slowly)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(many, range(8)))
    assert not wrong and asked() is before


@pytest.mark.parametrize("left", [(), ("flash",), ("mem_efficient",), ("math",)], ids=str)
def test_where_nothing_else_may_be_asked_cudnn_is(left: tuple[str, ...]) -> None:
    flags, cuda = ("flash", "mem_efficient", "math"), torch.backends.cuda
    before = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in flags}
    asked = cuda.cudnn_sdp_enabled()
    try:
        cuda.enable_cudnn_sdp(True)
        for name in flags:
            getattr(cuda, f"enable_{name}_sdp")(name in left)
        with CudaBackend().any_length():
            assert cuda.cudnn_sdp_enabled() is (not left)
        assert cuda.cudnn_sdp_enabled()
    finally:
        cuda.enable_cudnn_sdp(asked)
        for name, on in before.items():
            getattr(cuda, f"enable_{name}_sdp")(on)


def test_what_raises_inside_leaves_the_setting() -> None:
    asked = torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(ValueError, match="inside"), ExitStack() as stack:
        stack.enter_context(CudaBackend().any_length())
        raise ValueError("inside")
    assert torch.backends.cuda.cudnn_sdp_enabled() is asked
