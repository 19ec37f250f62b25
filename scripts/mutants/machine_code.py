"""Machine code of sources: what tells whether a mutation changed anything that a GPU would run."""

import threading
from typing import Any

import agentcompile_cuda_kit as cuda_kit
from agentcompile_runtime_cuda.backend import CudaBackend
from compare_machine_code import code_of

from agentcompile_core.plugin_api import BuildError, StepSource, Target

DEADLINE_S = 120.0


class MachineCode:
    """Digests of the machine code of sources for their target; the unmutated ones are kept."""

    def __init__(self) -> None:
        self._backend = CudaBackend()
        self.library = f"{self._backend.compiler()} {cuda_kit.digest()}"  # what machine code depends on beside the source
        self._kept: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def of(self, source: StepSource, target: Target) -> dict[str, Any] | None:
        """Digest and number of instructions; None where it does not compile."""
        try:
            return code_of(self._backend.build(source, target, DEADLINE_S).binary)
        except BuildError:
            return None

    def original(self, name: str, source: StepSource, target: Target) -> dict[str, Any]:
        """The same of a subject's own source.

        Raises:
            RuntimeError: it does not compile.
        """
        with self._lock:
            if name not in self._kept:
                found = self.of(source, target)
                if found is None:
                    raise RuntimeError(f"the subject {name} does not compile")
                self._kept[name] = found
            return self._kept[name]
