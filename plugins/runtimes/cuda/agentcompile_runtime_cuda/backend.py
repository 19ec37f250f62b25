"""The CUDA backend."""

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from agentcompile_cuda_kit import check_launches, control, include_dir, tracing
from agentcompile_cuda_kit.several import SeveralRuns
from agentcompile_cuda_kit.targets import built_arch, nearest_preset, sm_number

from agentcompile_core.plugin_api import (
    ArgumentKind,
    Backend,
    BuildError,
    DType,
    Feature,
    Heads,
    Kernel,
    Launch,
    Odds,
    OwnBuild,
    ProgramParts,
    Reject,
    Reserved,
    Scoring,
    StepSource,
    Target,
)

from . import extension, headers, launching, machine_code, ptxas
from .ahead import Ahead
from .attending import Attending
from .capturing import Captures
from .compilers import FLAGS, Compiler, choose
from .drawing import Drawing
from .driver import driver
from .lengths import any_length
from .own_attention import DeviceScoring, OwnAttention
from .own_kernels import build_once
from .resources import resources_of
from .rows import RowKernels

if TYPE_CHECKING:
    import torch

OLDEST = 80


class CudaBackend(Backend):
    """NVIDIA GPUs from sm_80. Building needs NVRTC or nvcc but no GPU and no driver; launching needs both.

    ``compiler`` is ``nvrtc``, ``nvcc`` or empty: NVRTC where it works, else nvcc.
    """

    name = "cuda"
    version = 1
    device = "cuda"
    languages = ("cuda",)
    features = tuple(Feature)
    captures = True
    window = 8  # a build takes 0.1 to 0.5 s, about as long as a judgement; few, so that what comes next may depend on results
    environment = ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING",
                   "CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")
    deadlines_s = MappingProxyType({"build": 60.0, "check": 15.0, "time": 15.0})  # a hang must not use up the budget
    suffixes: ClassVar[Mapping[str, str]] = MappingProxyType({"cuda": ".cu"})
    binary_suffix = ".cubin"

    def __init__(self, compiler: str = "") -> None:
        self._preferred = compiler
        self._loaded: dict[tuple[int, str], launching.LoadedKernel] = {}
        self._lock = threading.Lock()
        self._ahead = Ahead(self)
        self._captures = Captures(self._ahead.wait)
        own = OwnAttention(self, self.live_target)
        self._attending = Attending(own)
        self._rows = RowKernels(self, self.live_target, _capturing, (own.start,))
        self._several = SeveralRuns(self, self._built, "cuda")
        self._drawing = Drawing(self, self.live_target, _capturing)

    def available(self) -> Literal[True] | Reject:
        """True where torch sees a CUDA device and the driver can be called."""
        try:
            import torch
        except ImportError:
            return Reject("torch is not installed")
        if torch.version.cuda is None:
            return Reject(f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch")
        if not torch.cuda.is_available():
            return Reject("torch sees no CUDA device; check the NVIDIA driver and CUDA_VISIBLE_DEVICES")
        try:
            driver()
        except (OSError, AttributeError) as exc:
            return Reject(f"the NVIDIA driver cannot be called ({exc}); it must be of CUDA 12 or newer")
        return True

    def can_build(self, target: Target) -> Literal[True] | Reject:
        """True where a compiler is installed that knows the target's architecture."""
        compiler = self._compiler
        if isinstance(compiler, Reject):
            return compiler
        number = sm_number(target.arch)
        if not number:
            return Reject(f"{target.name} has the architecture {target.arch}; this backend builds for sm_80 and newer")
        if number < OLDEST:
            return Reject(f"{target.arch} is older than sm_80, the oldest architecture that is supported")
        if number not in compiler.capabilities():
            known = ", ".join(f"sm_{n}" for n in compiler.capabilities())
            return Reject(f"{compiler.version()} cannot build for {target.arch}; it knows {known}")
        return True

    def live_target(self) -> Target | None:
        """The preset of the current CUDA device."""
        if not self.available():
            return None
        import torch

        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return nearest_preset(found.name, found.major * 10 + found.minor, found.multi_processor_count)

    def compiler(self) -> str:
        """For example ``nvrtc 13.0, headers 13.0, --std=c++17 --ptxas-options=-v``."""
        compiler = self._compiler
        if isinstance(compiler, Reject):
            return "none"
        includes = headers.cuda_includes()
        version = headers.headers_version(includes[0]) if includes and compiler.version().startswith("nvrtc") else "its own"
        return f"{compiler.version()}, headers {version}, {' '.join(FLAGS)}"

    def stream(self) -> int:
        """The CUstream of torch's current stream."""
        stream_of, device = self._streams  # torch's own object, or to ask whether CUDA was begun, was a fifth of a small call
        return stream_of(device())

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        torch.cuda.synchronize()

    def is_lost(self) -> bool:
        """Whether the CUDA context of this process is broken."""
        import torch

        if not torch.cuda.is_initialized():
            return False
        try:
            torch.cuda.synchronize()
            torch.ones(8, device="cuda").sum().item()
        except Exception:
            return True
        return False

    def identity(self) -> str:
        """Device, driver and torch, whose allocator and libraries take part in every timing."""
        import torch

        driver_version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
        return f"{torch.cuda.get_device_name()} driver {driver_version} torch {torch.__version__}" if torch.cuda.is_available() else "cuda"

    def control(self, defect: str) -> StepSource:
        """The CUDA control."""
        return control(defect)

    def time_from_host(self, run: Callable[[int], None], *, repetitions: int, runs_per_repetition: int) -> tuple[float, ...]:
        """By CUDA events around launches from the host."""
        from .timing import time_eagerly

        return time_eagerly(run, repetitions, runs_per_repetition)

    def check(self, source: StepSource, target: Target) -> None:
        """Refuse launches that no CUDA device takes."""
        check_launches(source)

    def include_dirs(self) -> tuple[Path, ...]:
        """The device library of CUDA sources."""
        return (include_dir(),)

    def expect(self, dtype: DType, build: OwnBuild) -> None:
        """Begin to build the usual kernels of prompts and to use torch's libraries, where there is a GPU that runs them."""
        if self.live_target() is not None:
            import torch

            self._ahead.begin(getattr(torch, dtype.value), build, self._rows.start)

    def build_own(self, source: StepSource, target: Target) -> Kernel:
        """A kernel of this package's own that no search chooses, as ``expect`` was told. Raises BuildError."""
        return self._ahead.build(source, target)

    def build(self, source: StepSource, target: Target, deadline_s: float = 120.0) -> Kernel:
        """Compile ``source`` to a cubin for ``target.arch``, or the variant of it that the source needs, in a guarded child process.

        Raises:
            BuildError: no compiler, an error in the source (its first line; the whole log is a note), the deadline
                passed, an entry is missing, a launch needs more shared memory or registers than the target has, or one that declares
                ``pdl`` never waits.
        """
        self._check_source(source, target)
        compiler = self._compiler
        if isinstance(compiler, Reject):
            raise BuildError(compiler.reason)
        start = time.monotonic()
        binary, log = compiler.compile(source, built_arch(source, target), deadline_s)
        resources = resources_of(source, target, ptxas.parse(log))
        machine_code.check_waits(source, target, binary)
        return Kernel(digest=source.digest, backend=self.name, arch=target.arch, binary=binary,
                      sha256=hashlib.sha256(binary).hexdigest(), compiler=self.compiler(), resources=resources,
                      build_s=time.monotonic() - start)

    def load(self, kernel: Kernel) -> launching.LoadedKernel:
        """Load a cubin into torch's context of the current device.

        Raises:
            CudaError: the driver refuses it, for example because it is for another architecture.
        """
        import torch

        torch.cuda.init()
        key = (torch.cuda.current_device(), kernel.sha256)
        with self._lock:
            if key not in self._loaded:
                torch.cuda.synchronize()  # makes torch's primary context current in this thread
                self._loaded[key] = launching.LoadedKernel(driver(), kernel.binary, kernel.sha256)
            return self._loaded[key]

    def prepare_launch(self, handle: Any, launch: Launch, arguments: Sequence[int | float],
                       pdl: bool) -> Callable[[int], None]:
        """``run(stream)`` enqueues the launch on a CUstream, eagerly or captured. ``pdl`` needs ``launch.pdl`` too.

        Addresses are not kept alive: whoever owns the tensors keeps them as long as ``run`` may be called.
        """
        return launching.prepare(handle, launch, arguments, pdl)

    def prepare_moving(self, handle: Any, launch: Launch, arguments: Sequence[int | float], pdl: bool,
                       places: Sequence[int]) -> Callable[..., None] | None:
        """By writing the addresses into the launch; None where the driver makes something of one, as for tiles."""
        if any(launch.arguments[place].kind is not ArgumentKind.POINTER for place in places):
            return None
        return launching.prepare(handle, launch, arguments, pdl, places)

    def prepare_runs(self, source: StepSource, arguments: Sequence[Sequence[Sequence[int | float]]]
                     ) -> tuple[Callable[[int], None], ...] | None:
        """By a kernel made of the text of one run; see ``agentcompile_cuda_kit.several``."""
        return self._several(source, arguments)

    def time(self, run: Callable[[int], None], *, repetitions: int,
             runs_per_repetition: int) -> "tuple[float, ...] | Reject":
        """Microseconds per run of each repetition; see ``timing``."""
        from .timing import time_captured

        usable = self.available()
        return usable if isinstance(usable, Reject) else time_captured(run, repetitions, runs_per_repetition, self._captures)

    def capture(self, run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1, owner: object = None) -> Callable[[], None] | Reject:
        """A CUDA graph; see ``capturing``."""
        usable = self.available()
        return usable if isinstance(usable, Reject) else self._captures(run, warm_ups=warm_ups, runs=runs, owner=owner)

    def reserve(self, nbytes: Sequence[int]) -> Reserved | Reject:
        """By the driver's virtual memory; see ``reserving``."""
        from .reserving import reserve

        usable = self.available()
        return usable if isinstance(usable, Reject) else reserve(nbytes)

    def attend(self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", *, causal: bool,
               scale: float) -> "tuple[torch.Tensor, torch.Tensor] | None":
        """By cuDNN or flash attention; see ``attending``."""
        return self._attending(q, k, v, causal=causal, scale=scale)

    def attend_cached(self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", out: "torch.Tensor", *, scale: float,
                      scoring: Scoring | None = None) -> bool:
        """By the kernel of ``attend.cu`` where it is faster than the libraries; see ``attending``."""
        if scoring is None:
            return self._attending.over_all((q, k, v, out), DeviceScoring(scale=scale))
        slopes = None if scoring.slopes is None else self._attending.slopes(scoring.slopes, q)
        if scoring.slopes is not None and slopes is None:
            return False
        scores = DeviceScoring(scale=scale, window=scoring.window, softcap=scoring.softcap, sinks=scoring.sinks, slopes=slopes)
        return self._attending.over_all((q, k, v, out), scores)

    def any_length(self) -> AbstractContextManager[None]:
        """See ``lengths``."""
        return any_length()

    def draw(self, logits: "torch.Tensor", odds: Odds, clocks: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor] | None":
        """In three launches; see ``drawing``."""
        return self._drawing(logits, odds, clocks)

    def merge(self, parts: "list[tuple[torch.Tensor, torch.Tensor]]", out: "torch.Tensor") -> bool:
        """In one launch; see ``rows``."""
        return self._rows.merge(parts, out)

    def place(self, heads: Sequence[Heads]) -> bool:
        """In one launch; see ``rows``."""
        return self._rows.place(heads)

    def body(self, *ops: str) -> "Callable[..., Any] | None":
        """Norms, sums with norms, rotations, gates and products of few rows in one launch each; see ``rows``."""
        return self._rows.body(*ops)

    def traced(self, source: StepSource, tag: str) -> StepSource | None:
        """See ``agentcompile_cuda_kit.tracing``."""
        return tracing.traced(source, tag)

    def noted(self, handle: Any, source: StepSource) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By the device's global timer."""
        self.synchronize()
        return tracing.phases_of(handle.symbol(tracing.SYMBOL), source)

    def emit(self, programs: Mapping[str, ProgramParts], kernels: Mapping[str, Kernel], target: Target) -> dict[str, bytes]:
        """A pybind11 package that launches every kernel by name; it needs a driver, and nothing of AgentCompile."""
        return extension.files(programs, {d: k for d, k in kernels.items() if k.backend == self.name}, target)

    def _built(self, source: StepSource) -> Kernel:
        """For the current device, once in a process. Raises BuildError."""
        target = self.live_target()
        if target is None:
            raise BuildError("this GPU has no preset")
        return build_once(self, source, target).result()

    @functools.cached_property
    def _streams(self) -> tuple[Callable[[int], int], Callable[[], int]]:
        import torch

        torch.cuda.init()
        return torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    @functools.cached_property
    def _compiler(self) -> Compiler | Reject:
        return choose(self._preferred)

    def _check_source(self, source: StepSource, target: Target) -> None:
        if source.language not in self.languages:
            raise BuildError(f"language {source.language!r} is not built by the cuda backend; allowed: cuda")
        missing = [feature for feature in source.features if not target.has(feature)]
        if missing:
            raise BuildError(f"{target.arch} has no {', '.join(missing)}, which the source declares to use")


def _capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()
