"""The controls as a worker with a GPU tries them: its backend refuses to build one of the bad ones, whose text is judged all the same."""

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_validator_emulation.validator import EmulationValidator

from agentcompile_core.errors import BuildError
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.worker.validating import Validating


class Unlaunched(CudaBackend):
    """Builds as it does; there is no device to load anything on."""

    def load(self, kernel: object) -> object:
        """Nothing."""
        return None


@pytest.fixture(scope="module")
def backend() -> Unlaunched:
    return Unlaunched()


def test_the_backend_refuses_the_one_that_never_waits(backend: Unlaunched) -> None:
    _, bad = EmulationValidator().controls(backend)
    refused = []
    for trial in bad:
        try:
            backend.build(trial.source, PRESETS["h200"])
        except BuildError as exc:
            refused.append(str(exc))
    assert len(refused) == 1 and "never waits" in refused[0]


def test_the_validator_may_judge(backend: Unlaunched) -> None:
    assert Validating(load_catalog())._broken("emulation", EmulationValidator(), backend, PRESETS["h200"]) == ""
