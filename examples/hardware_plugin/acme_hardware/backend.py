"""The backend: C text to a shared library by the system's compiler, called on the addresses of CPU tensors, timed by the clock."""

import ctypes
import functools
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from agentcompile_core import plugin_api as ac

ACME_ONE = ac.Target(name="acme_one", arch="acme-v1", backend="acme", languages=("c",), lanes=8, l2_bytes=1 << 20)
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
C_TYPES: dict[ac.ArgumentKind, Any] = {ac.ArgumentKind.POINTER: ctypes.c_void_p, ac.ArgumentKind.I32: ctypes.c_int32,
                                    ac.ArgumentKind.I64: ctypes.c_int64, ac.ArgumentKind.F32: ctypes.c_float}
CONTROL = """
void ENTRY(float* in0, const float* in1, float* out, int* scratch, int count, int defect) {
  for (int i = 0; i < count - (defect == 2); i++) {
    float sum = in0[i] + in1[i];
    if (defect == 1 && i == 200) sum *= 1.001f;
    if (defect == 6 && i == 7) sum += out[i] * 0.0f;
    out[i] = sum;
    if (defect == 4 && i == 5) in0[i] = sum;
  }
  if (defect == 3) out[count] = 1.0f;
  if (defect == 5) scratch[0] = 1;
}
""".replace("ENTRY", ac.CONTROL_ENTRY)


class AcmeBackend(ac.Backend):
    """Everything that differs from a processor's defaults: how to build, load, launch and time."""

    name = "acme"
    version = 1
    device = "cpu"
    languages = ("c",)
    window = 4
    binary_suffix = ".so"

    def available(self) -> Literal[True] | ac.Reject:
        """True where there is a C compiler."""
        return True if shutil.which("cc") else ac.Reject("there is no C compiler called cc; install one")

    def can_build(self, target: ac.Target) -> Literal[True] | ac.Reject:
        """True for targets that run C."""
        return self.available() if "c" in target.languages else ac.Reject(f"{target.name} does not run C")

    def live_target(self) -> ac.Target | None:
        """The accelerator, which every machine with a C compiler has."""
        return ACME_ONE if self.available() else None

    @functools.cache  # noqa: B019
    def compiler(self) -> str:
        """The compiler's version line and our flags."""
        return f"{ac.run_guarded(['cc', '--version'], deadline_s=60.0).stdout.splitlines()[0]} {' '.join(FLAGS)}"

    def check(self, source: ac.StepSource, target: ac.Target) -> None:
        """There is one processor: a grid of one block of one thread."""
        if any((*launch.grid, *launch.block) != (1,) * 6 or launch.shared_bytes for launch in source.launches):
            raise ac.ContractError("launches on acme have one block of one thread and no shared memory")

    def build(self, source: ac.StepSource, target: ac.Target, deadline_s: float = 60.0) -> ac.Kernel:
        """Compile to a shared library. Raises ac.BuildError with what the compiler said."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            text, library = Path(folder, "kernel.c"), Path(folder, "kernel.so")
            text.write_text(source.code)
            done = ac.run_guarded(["cc", *FLAGS, str(text), "-o", str(library), "-lm"], deadline_s=deadline_s)
            if done.returncode:
                raise ac.BuildError(done.stderr or "cc failed")
            binary = library.read_bytes()
        return ac.Kernel(digest=source.digest, backend=self.name, arch=target.arch, binary=binary, build_s=time.monotonic() - began,
                      sha256=hashlib.sha256(binary).hexdigest(), compiler=self.compiler())

    @functools.cache  # noqa: B019
    def load(self, kernel: ac.Kernel) -> ctypes.CDLL:
        """The library in this process; its file is gone once it is mapped."""
        with tempfile.NamedTemporaryFile(suffix=self.binary_suffix) as file:
            file.write(kernel.binary)
            file.flush()
            return ctypes.CDLL(file.name)

    def prepare_launch(self, handle: Any, launch: ac.Launch, arguments: Sequence[int | float], pdl: bool) -> Callable[[int], None]:
        """``run(stream)`` calls the C function with the values; there is no stream."""
        function = getattr(handle, launch.entry)
        function.restype = None
        values = [C_TYPES[a.kind](value) for a, value in zip(launch.arguments, arguments, strict=True)]
        return lambda stream: function(*values)

    def time(self, run: Callable[[int], None], *, repetitions: int, runs_per_repetition: int) -> tuple[float, ...]:
        """By the host's clock: a launch has ended when it returns."""
        return self.time_from_host(run, repetitions=repetitions, runs_per_repetition=runs_per_repetition)

    def control(self, defect: str) -> ac.StepSource:
        """The core's standard control, in C."""
        return ac.control_source(CONTROL, defect, language="c")
