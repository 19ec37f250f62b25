"""Builds CUDA source for the CPU: g++, the emulator's runtime, and a content-addressed cache of shared libraries."""

import contextlib
import enum
import functools
import hashlib
import os
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import agentcompile_cuda_kit as cuda_kit

from agentcompile_core.plugin_api import BuildError, PrivateFolder, UsageError, default_root, run_guarded, sweep

from .toolchain import GXX, Toolchain, find_toolchain

UNUSED_S = 30 * 24 * 3600.0
RUNTIME_FOLDER = Path(__file__).parent / "src"
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")


class Mode(enum.Enum):
    """What a build is for.

    PLAIN is the fastest to run. CHECKED instruments every load and store for the emulator's own checks. SANITIZER uses g++'s
    address and undefined-behaviour sanitizers and runs only in a child process (``isolate.run_isolated``).
    """

    PLAIN = "plain"
    CHECKED = "checked"
    SANITIZER = "sanitizer"


# -fno-strict-aliasing: kernels reinterpret vectors. -fno-finite-loops: a hang must stay a hang.
# -fno-aggressive-loop-optimizations: a loop beyond the end of an array must stay one. -fno-gnu-unique: many
# modules live in one process. -fno-threadsafe-statics: g++ guards shared arrays of half, whose constructor does nothing.
_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-ffp-contract=off", "-fno-strict-aliasing",
           "-fno-finite-loops", "-fno-aggressive-loop-optimizations", "-fno-threadsafe-statics")
# Source lines for messages. Where variables are is not written at -g1, but followed by passes that take a quarter of a checked build.
_LINES = ("-g1", "-gdwarf-4", "-fno-var-tracking", "-fno-var-tracking-assignments")
# Passes that a checked kernel does without: it is built in five sixths of the time and runs as fast. None of them is missed by a check:
# all but one come behind the pass that instruments accesses, and that one could only have left some of these out.
_HASTY = ("-fno-tree-loop-optimize", "-fno-tree-dominator-opts", "-fno-tree-slsr", "-fno-if-conversion", "-fno-if-conversion2",
          "-fno-reorder-blocks", "-fno-shrink-wrap", "-fno-move-loop-invariants", "-fno-branch-count-reg")
_VECTORS = ("-fsanitize=alignment", "-fno-sanitize-recover=alignment")  # of whose loads g++ may make loads of elements
# Arrays of a thread, whose ends no address tells; strict: also those at the end of a struct, which may be meant to be longer in C.
_BOUNDS = ("-fsanitize=bounds-strict", "-fno-sanitize-recover=bounds-strict")
_SANITIZERS = ("-fsanitize=address,undefined", "-fsanitize=bounds-strict", "-fno-sanitize-recover=all")
# What a thread reads of a variable that it cannot have written is no kernel's meaning, whatever it does with it. Of what it may not have
# written g++ is often wrong.
_UNSET = ("-Werror=uninitialized", "-Wno-maybe-uninitialized")
_RUNTIME_FLAGS: dict[Mode, tuple[str, ...]] = {
    Mode.PLAIN: ("-O2", "-w"), Mode.CHECKED: ("-O2", "-w"), Mode.SANITIZER: ("-O1", "-w", "-fno-omit-frame-pointer", *_SANITIZERS)}
_KERNEL_FLAGS: dict[Mode, tuple[str, ...]] = {
    Mode.PLAIN: ("-O1", "-w", *_VECTORS),  # most run a few times: -O3 takes 0.25 s longer to build and saves 5 ms of a run of 2048 x 2048
    Mode.CHECKED: ("-O1", *_HASTY, *_LINES, "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0",
                   *_BOUNDS, *_VECTORS, *_UNSET),
    Mode.SANITIZER: ("-O1", "-w", *_LINES, "-fno-omit-frame-pointer", "-fsanitize-sections=emu_shared", *_SANITIZERS)}
_LINK_FLAGS: dict[Mode, tuple[str, ...]] = {Mode.PLAIN: ("-s",), Mode.CHECKED: (), Mode.SANITIZER: _SANITIZERS}


def default_cache_folder() -> Path:
    """The folder ``emulation`` of the core's cache; where there is none or none can be written, one of this user among temporary files."""
    root = default_root()
    if root is not None and _can_write(root / "emulation"):
        return root / "emulation"
    return Path(tempfile.gettempdir()) / f"agentcompile-emulation-{os.getuid()}"


def _can_write(folder: Path) -> bool:
    nearest = next((path for path in (folder, *folder.absolute().parents) if os.path.exists(path)), folder)
    return os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)


@functools.cache
def runtime_digest() -> str:
    """SHA-256 of the emulator's C++ source: part of every cache key and of the backend's compiler name."""
    digest = hashlib.sha256()
    for path in sorted(RUNTIME_FOLDER.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def prepare_cache(folder: Path) -> None:
    """Make the cache folder, which holds native code: refuse one that others could have filled.

    Raises:
        UsageError: the folder belongs to another user or is writable for others.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o002:
        raise UsageError(f"the emulator's cache {folder} belongs to another user or is writable for others; "
                         "set AGENTCOMPILE_CACHE_DIR to a folder of your own")


def _forget_unused(cache: Path) -> None:
    """Remove what nobody has used for a month; done when the emulator itself is built, that is, rarely."""
    sweep(cache)
    oldest = time.time() - UNUSED_S
    for folder, _, names in os.walk(cache):  # which passes over folders that another process removes meanwhile
        for path in (Path(folder) / name for name in names):
            with contextlib.suppress(OSError):
                if path.is_file() and path.stat().st_mtime < oldest:
                    path.unlink()


def _run(command: Sequence[str], deadline_s: float, what: str, folders: Sequence[Path]) -> None:
    """``folders``: those whose files messages name without them, as sources do; where they lie is no matter of who wrote the kernel."""
    done = run_guarded(command, deadline_s=deadline_s)
    if done.returncode:
        said = done.stderr.strip()
        for folder in folders:
            said = said.replace(f"{folder}/", "")
        lines = said.splitlines()
        first = next((i for i, line in enumerate(lines) if "error" in line), 0)
        raise BuildError(f"g++ refused {what}:\n" + "\n".join(lines[first:first + 20]))


def _used(path: Path) -> None:
    """Note that a file of the cache is in use, so that it is kept."""
    with contextlib.suppress(OSError):
        os.utime(path)


_OWN_FOLDERS = (RUNTIME_FOLDER, cuda_kit.include_dir())


def _include_flags(toolchain: Toolchain) -> list[str]:
    return [f"-I{folder}" for folder in _OWN_FOLDERS] + [f"-isystem{folder}" for folder in toolchain.includes]


def _kernel_flags(toolchain: Toolchain, mode: Mode) -> list[str]:
    return [*_COMMON, *_KERNEL_FLAGS[mode], *toolchain.processor_flags, *toolchain.poison_flags]


_COMPILING: dict[Path, threading.Lock] = defaultdict(threading.Lock)


def prepare(cache_folder: Path | None = None, compiler: str = GXX, deadline_s: float = 120.0) -> None:
    """Compile what every plain kernel is built with, where the cache does not hold it.

    Raises:
        BuildError: g++ refuses it or passes the deadline.
        UsageError: no toolchain.
    """
    toolchain, cache = _toolchain_and_cache(cache_folder, compiler)
    _precompiled_shim(toolchain, Mode.PLAIN, cache, deadline_s)
    _runtime_object(toolchain, Mode.PLAIN, cache, deadline_s)


def _toolchain_and_cache(cache_folder: Path | None, compiler: str) -> tuple[Toolchain, Path]:
    toolchain = find_toolchain(compiler)
    cache = (cache_folder or default_cache_folder()).absolute()
    prepare_cache(cache)
    return toolchain, cache


def _compiled_once(toolchain: Toolchain, flags: Sequence[str], source: str, name: str, cache: Path, deadline_s: float) -> Path:
    """Compile a file of the emulator itself; the result is named ``name`` and lies in a folder of its own in the cache."""
    key = hashlib.sha256(repr((runtime_digest(), flags, toolchain.version, toolchain.headers)).encode()).hexdigest()[:16]
    target = cache / key / name
    with _COMPILING[target]:  # not by two threads at a time; two processes may
        if not target.exists():
            _forget_unused(cache)
            target.parent.mkdir(exist_ok=True, mode=0o700)
            with PrivateFolder(cache) as folder:
                made = folder / name
                command = [toolchain.compiler, *flags, *_include_flags(toolchain), str(RUNTIME_FOLDER / source), "-o", str(made)]
                _run(command, deadline_s, f"the emulator's own {source}", ())
                os.replace(made, target)
        else:
            _used(target)
    return target


def _runtime_object(toolchain: Toolchain, mode: Mode, cache: Path, deadline_s: float) -> Path:
    flags = [*_COMMON, *_RUNTIME_FLAGS[mode], *toolchain.processor_flags, "-c"]
    return _compiled_once(toolchain, flags, "runtime.cpp", "runtime.o", cache, deadline_s)


def _precompiled_shim(toolchain: Toolchain, mode: Mode, cache: Path, deadline_s: float) -> Path:
    """The CUDA headers take most of a kernel's compile time; precompiled they are read in 40 ms."""
    flags = [*_kernel_flags(toolchain, mode), "-x", "c++-header"]
    return _compiled_once(toolchain, flags, "shim.h", "shim.h.gch", cache, deadline_s)


def _check_request(headers: Mapping[str, str], entries: Sequence[str]) -> None:
    for name in headers:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UsageError(f"header name {name!r} leaves the build folder; use a plain relative name")
    bad = [entry for entry in entries if not _IDENTIFIER.match(entry)]
    if bad or not entries:
        raise UsageError(f"kernel entries must be C identifiers and at least one, got {list(entries)!r}; name the extern \"C\" kernels")


def _compile_unit(toolchain: Toolchain, flags: Sequence[str], folder: Path, shim: Path, deadline_s: float) -> None:
    # The map keeps the temporary folder's name out of the debug information: messages name kernel.cu.
    command = [toolchain.compiler, *flags, f"-ffile-prefix-map={folder}=.", f"-I{folder}"]
    rest = [*_include_flags(toolchain), "-c", str(folder / "unit.cpp"), "-o", str(folder / "unit.o")]
    folders = (folder, *_OWN_FOLDERS, *toolchain.includes)
    try:
        _run([*command, f"-I{shim.parent}", *rest], deadline_s, "the kernel", folders)
    except BuildError as exc:
        if "PCH" not in str(exc) and ".gch" not in str(exc):
            raise
        _run([*command, *rest], deadline_s, "the kernel", folders)  # g++ could not map the precompiled header: read the text


def _link(toolchain: Toolchain, flags: Sequence[str], folder: Path, runtime: Path, deadline_s: float) -> None:
    objects = [str(folder / "unit.o"), str(runtime), "-o", str(folder / "out.so"), "-lrt"]
    try:
        _run([toolchain.compiler, "-shared", *flags, *toolchain.linker_flags, *objects], deadline_s, "to link the kernel", (folder,))
    except BuildError:
        if not toolchain.linker_flags:
            raise
        # gold is there, but not for this g++
        _run([toolchain.compiler, "-shared", *flags, *objects], deadline_s, "to link the kernel", (folder,))


def build(code: str, headers: Mapping[str, str], entries: Sequence[str], mode: Mode = Mode.PLAIN, *,
          cache_folder: Path | None = None, deadline_s: float = 120.0, compiler: str = GXX) -> Path:
    """Compile CUDA source for the CPU and return the shared library, from the cache if it was built before.

    ``headers`` maps names as the source includes them to their text; ``<agentcompile/...>`` is the device library.
    ``entries`` are the ``extern "C" __global__`` functions to make launchable.

    Raises:
        BuildError: g++ refuses the source or passes the deadline.
        UsageError: no toolchain, or names that cannot be.
    """
    _check_request(headers, entries)
    toolchain, cache = _toolchain_and_cache(cache_folder, compiler)
    flags = _kernel_flags(toolchain, mode)
    key_parts = (code, sorted(headers.items()), tuple(entries), flags, _LINK_FLAGS[mode], toolchain.linker_flags, toolchain.version,
                 toolchain.headers, runtime_digest(), cuda_kit.digest())
    library = cache / f"{entries[0][:40]}-{mode.value}-{hashlib.sha256(repr(key_parts).encode()).hexdigest()[:24]}.so"
    if library.exists():
        _used(library)
        return library
    runtime = _runtime_object(toolchain, mode, cache, deadline_s)
    shim = _precompiled_shim(toolchain, mode, cache, deadline_s)
    with PrivateFolder(cache) as folder:
        for header, text in {**headers, "kernel.cu": code}.items():
            path = folder / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        unit = '#include "shim.h"\n#include "kernel.cu"\nEMU_GUARDS()\n' + "".join(f"EMU_EXPORT({entry})\n" for entry in entries)
        (folder / "unit.cpp").write_text(unit, encoding="utf-8")
        _compile_unit(toolchain, flags, folder, shim, deadline_s)
        _link(toolchain, _LINK_FLAGS[mode], folder, runtime, deadline_s)
        os.replace(folder / "out.so", library)
    return library
