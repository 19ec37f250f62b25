"""What backends do with kernels of several runs: built once, loaded where they run, and left alone where they cannot be."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit import make_source
from agentcompile_cuda_kit.several import SeveralRuns

from agentcompile_core.plugin_api import Access, BuildError, DType, Kernel, Launch, Role, StepSource, i32, pointer

CODE = """#include "plan.cuh"
extern "C" __global__ void __launch_bounds__(Plan::threads)
fill(long long* out, int value) {
  out[blockIdx.x] = value;
}
"""


def source() -> StepSource:
    launch = Launch(entry="fill", grid=(3, 1, 2), block=(32, 1, 1),
                    arguments=(pointer("out", Role.OUTPUT, DType.I64, Access.WRITE), i32("value", 7)))
    return make_source(CODE, plan={"threads": 32}, launches=(launch,))


class Backend:
    """Keeps what it is asked; ``fails``: what loading raises."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.device, self.fails, self.built, self.launched = 0, fails, 0, list[tuple[Any, Launch, tuple[int | float, ...]]]()

    def build(self, one: StepSource) -> Kernel:
        self.built += 1
        return Kernel(digest=one.digest, backend="b", arch="a", binary=b"", sha256=str(self.built), compiler="c")

    def load(self, kernel: Kernel) -> str:
        if self.fails is not None:
            raise self.fails
        return f"{kernel.sha256} on {self.device}"

    def prepare_launch(self, handle: Any, launch: Launch, arguments: Sequence[int | float], pdl: bool) -> Callable[[int], None]:
        self.launched.append((handle, launch, tuple(arguments)))
        return lambda stream: None


def test_it_is_built_once_and_loaded_into_the_device_that_is_current() -> None:
    backend = Backend()
    runs = SeveralRuns(backend, backend.build, "cpu")  # type: ignore[arg-type]
    assert runs(source(), [[(16, 7), (32, 7)]]) is not None
    backend.device = 1
    assert runs(source(), [[(16, 7), (32, 7), (48, 7)]]) is not None
    assert backend.built == 1 and [handle for handle, _, _ in backend.launched] == ["1 on 0", "1 on 1"]
    assert [launch.grid for _, launch, _ in backend.launched] == [(3, 1, 4), (3, 1, 6)]
    assert [arguments[1:] for _, _, arguments in backend.launched] == [(7,), (7,)]


def test_a_table_of_addresses_lives_as_long_as_its_launch() -> None:
    backend = Backend()
    found = SeveralRuns(backend, backend.build, "cpu")(source(), [[(16, 7), (2**47, 7)]])  # type: ignore[arg-type]
    assert found is not None
    kept = next(one for one in found[0].__defaults__ or () if isinstance(one, torch.Tensor))  # type: ignore[attr-defined]
    assert kept.tolist() == [[16], [2**47]] and backend.launched[0][2][0] == kept.data_ptr()


@pytest.mark.parametrize("fails", [RuntimeError("no image for this device"), None])
def test_what_cannot_be_loaded_or_built_runs_one_by_one(fails: Exception | None) -> None:
    def build(one: StepSource) -> Kernel:
        if fails is None:
            raise BuildError("no compiler")
        return backend.build(one)

    backend = Backend(fails)
    runs = SeveralRuns(backend, build, "cpu")  # type: ignore[arg-type]
    assert [runs(source(), [[(16, 7), (32, 7)]]) for _ in range(2)] == [None, None]
    assert runs(source(), [[(16, 7)] * 40000]) is None


def test_want_of_memory_is_no_verdict() -> None:
    backend = Backend(torch.OutOfMemoryError("no memory"))
    runs = SeveralRuns(backend, backend.build, "cpu")  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        runs(source(), [[(16, 7), (32, 7)]])
    backend.fails = None
    assert runs(source(), [[(16, 7), (32, 7)]]) is not None
