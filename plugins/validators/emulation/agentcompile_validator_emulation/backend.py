"""The backend ``emulation``: kernels on the CPU, on the addresses of CPU tensors."""

import ctypes
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import agentcompile_cuda_kit as cuda_kit
from agentcompile_cuda_kit.several import SeveralRuns
from agentcompile_cuda_kit.targets import preset
from attrs import field, frozen

from agentcompile_core.plugin_api import (
    ArgumentKind,
    Backend,
    BuildError,
    Feature,
    Kernel,
    KernelArgument,
    Launch,
    PrivateFolder,
    Reject,
    StepSource,
    Target,
    UsageError,
)

from .engine import Mode, build, default_cache_folder, prepare, prepare_cache, runtime_digest
from .module import SCHEDULES, Argument, Buffer, EmulatedModule, EmulationError, LaunchOptions, PreparedLaunch
from .tiles import check_tiles, tiles_of
from .toolchain import COMPILER, GXX, find_toolchain

FEATURES = (Feature.BULK_COPY, Feature.MBARRIER, Feature.GRIDDEPCONTROL, Feature.MMA_SYNC, Feature.ATOMICS,
            Feature.CLUSTER, Feature.LARGE_CLUSTER, Feature.BF16, Feature.WGMMA)
LAUNCH_DEADLINE_S = 120.0


@frozen(kw_only=True)
class Settings:
    """``[plugin.emulation]``, as far as it is the backend's."""

    compiler: str = field(default=GXX, metadata=COMPILER)


class EmulationBackend(Backend):
    """Builds with g++ for any target and runs on this machine's CPU. It cannot time, so what it validated is provisional.

    A kernel's binary is a shared library for this machine: native code, to be loaded only where its source is trusted.
    """

    name = "emulation"
    version = 1
    device = "cpu"
    languages = ("cuda",)
    features = FEATURES
    clock = False
    emulated = True
    window = 2
    side_by_side = True
    largest_match_bytes = 32 << 20
    suffixes: ClassVar[Mapping[str, str]] = MappingProxyType({"cuda": ".cu"})
    environment = ("CUDA_HOME", "CUDA_PATH")  # where the headers may be
    settings_class = Settings

    def __init__(self, cache_folder: Path | None = None) -> None:
        self._cache_folder = cache_folder
        self._loaded: dict[str, EmulatedModule] = {}
        self._lock = threading.Lock()
        self._launches = 0
        self._several = SeveralRuns(self, lambda source: self.build(source, preset("h200")), "cpu")

    def available(self) -> Literal[True] | Reject:
        """True where g++ and the CUDA headers are found."""
        try:
            find_toolchain(self.settings.compiler)
        except UsageError as exc:
            return Reject(str(exc))
        return True

    def can_build(self, target: Target) -> Literal[True] | Reject:
        """True for every target of CUDA kernels: emulated ones know no architecture."""
        if not set(self.languages) & set(target.languages):
            return Reject(f"{target.name} runs {', '.join(target.languages) or 'nothing'}; the emulation backend runs CUDA kernels")
        return self.available()

    def live_target(self) -> Target | None:
        """None: there is no GPU."""
        return None

    def compiler(self) -> str:
        """The compiler's version line and the digests of the CUDA headers and of the emulator's own source."""
        if isinstance(self.available(), Reject):
            return "none"
        toolchain = find_toolchain(self.settings.compiler)
        return f"{toolchain.version}, headers {toolchain.headers[:12]}, emulator {runtime_digest()[:12]}"

    def control(self, defect: str) -> StepSource:
        """The CUDA control."""
        return cuda_kit.control(defect)

    def check(self, source: StepSource, target: Target) -> None:
        """Refuse launches that no CUDA device takes."""
        cuda_kit.check_launches(source)

    def include_dirs(self) -> tuple[Path, ...]:
        """The device library of CUDA sources."""
        return (cuda_kit.include_dir(),)

    def prepare(self) -> None:
        """Compile the emulator itself and the CUDA headers, while the model is captured."""
        prepare(self._cache_folder, self.settings.compiler)

    def build(self, source: StepSource, target: Target, deadline_s: float = 120.0) -> Kernel:
        """Compile ``source`` to a shared library.

        Raises:
            BuildError: an unknown language or feature, no toolchain, an error in the source, or the deadline passed.
        """
        check_emulated(source)
        start = time.monotonic()
        library = build_source(source, Mode.PLAIN, self._cache_folder, deadline_s, self.settings.compiler)
        binary = library.read_bytes()
        return Kernel(digest=source.digest, backend=self.name, arch=target.arch, binary=binary, sha256=hashlib.sha256(binary).hexdigest(),
                      compiler=self.compiler(), build_s=time.monotonic() - start)

    def load(self, kernel: Kernel) -> EmulatedModule:
        """Load the library into this process, once per binary."""
        if kernel.backend != self.name:
            raise UsageError(f"a kernel of backend {kernel.backend!r} was given to backend emulation; build it with emulation")
        with self._lock:
            if kernel.sha256 not in self._loaded:
                self._loaded[kernel.sha256] = EmulatedModule(self._library(kernel), checked=False)
            return self._loaded[kernel.sha256]

    def prepare_launch(self, handle: Any, launch: Launch, arguments: Sequence[int | float], pdl: bool) -> Callable[[int], None]:
        """``run(stream)`` runs the launch to its end; the stream is ignored. Tensors must outlive ``run``.

        Every launch that is prepared begins with the next of the emulator's thread orders, and every run of it takes the one behind
        that, random ones drawn anew; copies land as late as they may in most of them. Who runs a kernel several times and compares
        sees what depends on either: a single random order of four blocks hid that two pairs of them shared a counter.
        """
        prepared, orders = _prepared(handle, launch, arguments, pdl), self._orders()

        def run(stream: int = 0) -> None:
            _run(prepared, next(orders))

        return run

    def prepare_moving(self, handle: Any, launch: Launch, arguments: Sequence[int | float], pdl: bool,
                       places: Sequence[int]) -> Callable[..., None] | None:
        """Prepared anew at every run, which the emulated kernel takes long enough to hide; orders as above."""
        orders = self._orders()

        def run(stream: int, *addresses: int) -> None:
            now = dict(zip(places, addresses, strict=True))
            _run(_prepared(handle, launch, [now.get(index, value) for index, value in enumerate(arguments)], pdl), next(orders))

        return run

    def _orders(self) -> Iterator[int]:
        """Numbers of the thread orders of one launch's runs."""
        self._launches += 1
        return itertools.count(self._launches - 1)

    def prepare_runs(self, source: StepSource, arguments: Sequence[Sequence[Sequence[int | float]]]
                     ) -> tuple[Callable[[int], None], ...] | None:
        """As on a GPU, see ``agentcompile_cuda_kit.several``; for whichever target, of which nothing is known here."""
        return self._several(source, arguments)

    def time(self, run: Callable[[int], None], *, repetitions: int, runs_per_repetition: int) -> tuple[float, ...] | Reject:
        """Always a Reject: the emulator's speed says nothing about a GPU's."""
        return Reject("the emulation backend cannot time; results stay provisional until they are measured on a GPU")

    def _library(self, kernel: Kernel) -> Path:
        """The binary as a file, in a folder that only this user can write."""
        folder = self._cache_folder or default_cache_folder()
        prepare_cache(folder)
        path = folder / f"{kernel.sha256}.so"
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != kernel.sha256:
            if hashlib.sha256(kernel.binary).hexdigest() != kernel.sha256:
                raise UsageError(f"the binary of kernel {kernel.digest} is damaged; build it again")
            with PrivateFolder(folder) as private:
                (private / path.name).write_bytes(kernel.binary)
                os.replace(private / path.name, path)
        return path


def _prepared(handle: EmulatedModule, launch: Launch, arguments: Sequence[int | float], pdl: bool) -> PreparedLaunch:
    values = [launch_argument(argument, value) for argument, value in zip(launch.arguments, arguments, strict=True)]
    options = LaunchOptions(programmatic_launch=pdl, deadline_s=LAUNCH_DEADLINE_S)
    return handle.prepare(launch.entry, launch.grid, launch.block, values, launch.shared_bytes, options, launch.cluster)


def _run(prepared: PreparedLaunch, number: int) -> None:
    prepared.reorder(SCHEDULES[number % len(SCHEDULES)], seed=number)
    prepared()


def check_emulated(source: StepSource) -> None:
    """Raises BuildError where the emulator lacks a language or feature that ``source`` declares."""
    if source.language != "cuda":
        raise BuildError(f"language {source.language!r} is not built by the emulation backend; allowed: cuda")
    missing = [feature for feature in source.features if feature not in FEATURES]
    if missing:
        raise BuildError(f"the emulator has no {', '.join(missing)}; such a source is validated on a GPU only")
    check_tiles(source)


def build_source(source: StepSource, mode: Mode, cache_folder: Path | None = None, deadline_s: float = 120.0,
                 compiler: str = GXX) -> Path:
    """``engine.build`` of a StepSource with all its entries."""
    entries = tuple(dict.fromkeys(launch.entry for launch in source.launches))
    try:
        return build(source.code, dict(source.headers), entries, mode, cache_folder=cache_folder, deadline_s=deadline_s,
                     compiler=compiler)
    except UsageError as exc:
        raise BuildError(str(exc)) from exc


def launch_argument(argument: KernelArgument, value: int | float) -> Argument:
    """The value of a kernel argument; an operand's size is unknown here and stays 0 (nothing is checked in plain mode)."""
    if argument.addressed:
        buffer = Buffer(name=argument.name, address=int(value), nbytes=0)
        return buffer if argument.kind is ArgumentKind.POINTER else tiles_of(argument, buffer)
    if argument.kind is ArgumentKind.F32:
        return ctypes.c_float(value)
    return ctypes.c_int(int(value)) if argument.kind is ArgumentKind.I32 else ctypes.c_longlong(int(value))


__all__ = ["EmulationBackend", "EmulationError", "build_source", "check_emulated", "launch_argument"]
