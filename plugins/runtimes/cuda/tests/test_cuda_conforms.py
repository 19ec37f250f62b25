"""The backend passes the kit of backends: what needs no GPU everywhere, launches, captures and times where there is one."""

from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.backend import CudaBackend
from attrs import evolve

from agentcompile_core.plugin_api import control_trials
from agentcompile_core.testing.backend_conformance import BackendConformance

BACKEND = CudaBackend()
(GOOD,) = control_trials([BACKEND.control("")], BACKEND.live_target() or preset("h200"))


class TestBackend(BackendConformance):
    backend, trial = BACKEND, GOOD
    broken = evolve(GOOD.source, digest="0badc0de", code=GOOD.source.code + "\nthis is no source\n")
