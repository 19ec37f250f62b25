"""What a call of a compiled module costs Python, kernels aside, beside nn.Linear; needs no GPU and writes nothing.

    python benchmarks/host_calls.py

A linear layer is compiled and validated on the emulator. Then its launches are those of the CUDA backend, to a driver that does nothing,
and whole calls are timed: the least of nine series. ``nn.Linear`` computes what it computes, 64 x 64 on the processor.
"""

import ctypes
import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
from agentcompile_runtime_cuda import launching
from agentcompile_runtime_cudalinear import replace_linears
from agentcompile_validator_emulation.backend import EmulationBackend
from torch import nn

import agentcompile_core as ac

WIDTH = 64
CALLS, SERIES = 5000, 9
OPTIONS = {"run_on": "emulation", "target": "h200", "budget_plans": 1, "rounds": 1, "validators": ("numerics",), "budget_s": 120.0}


class NoKernel:
    """Stands for a loaded kernel and its driver: a launch is a foreign call that does nothing and says that all is well."""

    def __init__(self) -> None:
        self.driver, self.launch = self, ctypes.CDLL(None).getppid
        self.launch.restype = None

    def function(self, launch: Any) -> int:
        """One for every entry."""
        return 1


class Launches:
    """What ``prepare_moving`` gives: emulated, or through the CUDA backend's own way to nothing once ``are_empty`` holds."""

    are_empty = False

    def __init__(self, prepare: Callable[..., Any]) -> None:
        self._prepare = prepare

    def __call__(self, backend: EmulationBackend, handle: Any, *launch: Any) -> Callable[..., None]:
        """As the method of a backend."""
        emulated, empty = self._prepare(backend, handle, *launch), launching.prepare(NoKernel(), *launch)

        def run(stream: int, *addresses: int) -> None:
            (empty if self.are_empty else emulated)(stream, *addresses)

        return run


def us(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    return min(timeit.repeat(call, number=CALLS, repeat=SERIES)) / CALLS * 1e6


def main() -> int:
    """Print the times."""
    torch.set_num_threads(1)
    launches = Launches(EmulationBackend.prepare_moving)
    EmulationBackend.prepare_moving = lambda *given: launches(*given)
    x = torch.randn(1, 1, WIDTH)
    plain, net = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).requires_grad_(False).eval() for _ in range(2))
    replaced, compiled = replace_linears(net, **OPTIONS), ac.compile(plain[0], example_inputs=(x,), **OPTIONS)
    if replaced.left:
        print(f"nothing to time: {replaced.left}", file=sys.stderr)
        return 1
    launches.are_empty = True
    with torch.no_grad():
        for name, call in (("nn.Linear", plain[0]), ("CUDALinear", net[0]), ("a compiled module", compiled)):
            print(f"{name:20}{us(lambda call=call: call(x)):6.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
