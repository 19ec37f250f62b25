"""Runs one launch in a child process: needed for sanitizer builds, and for kernels that may corrupt or hang their process."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from attrs import asdict, field, frozen

from agentcompile_core.plugin_api import BuildError, PrivateFolder

from .engine import Mode
from .module import Access, Buffer, EmulatedModule, EmulationError, LaunchOptions, Scalar, ThreadOrder
from .toolchain import find_toolchain

_FINDING = re.compile(r"(?:runtime error: |ERROR: AddressSanitizer: )([^\n]*)")
_PLACE = re.compile(r"(?:^|[\s(])(?:\./|\S*/)?((?:kernel\.cu|\w+\.cuh):\d+)", re.MULTILINE)
_SCALARS: dict[str, type[Scalar]] = {"i32": ctypes.c_int, "i64": ctypes.c_longlong, "f32": ctypes.c_float}


@frozen(kw_only=True)
class IsolatedLaunch:
    """A launch whose buffers are bytes: (name, contents, access, written by the chain), or a ctypes scalar, in order."""

    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[tuple[str, bytes, Access, bool] | Scalar, ...]
    dynamic_shared_bytes: int = 0
    options: LaunchOptions = field(factory=LaunchOptions)


def run_isolated(library: Path, mode: Mode, launch: IsolatedLaunch) -> dict[str, bytes]:
    """Run ``launch`` in a child and return the contents of every buffer it may write, by name.

    Every buffer is a heap block of its exact size, so that a sanitizer sees one byte too many.

    Raises:
        EmulationError: the kernel broke a rule, a sanitizer found something, or the child died or hung.
    """
    with PrivateFolder() as folder:
        _write_request(folder, library, mode, launch)
        code, errors = _run_child(folder, mode, launch.options.deadline_s + 30.0)
        reply = folder / "reply.json"
        if code or not reply.exists():
            raise EmulationError(_explain(code, errors))
        failure = json.loads(reply.read_text())["failure"]
        if failure:
            raise EmulationError(failure)
        return {path.name.removesuffix(".out"): path.read_bytes() for path in folder.glob("*.out")}


def _write_request(folder: Path, library: Path, mode: Mode, launch: IsolatedLaunch) -> None:
    described: list[dict[str, object]] = []
    for index, argument in enumerate(launch.arguments):
        if isinstance(argument, tuple):
            name, contents, access, chain = argument
            (folder / f"{index}.in").write_bytes(contents)
            described.append({"name": name, "access": int(access), "chain": chain, "nbytes": len(contents)})
        else:
            kind = next(kind for kind, scalar in _SCALARS.items() if type(argument) is scalar)
            described.append({"kind": kind, "value": argument.value})
    request = {"library": str(library), "checked": mode is Mode.CHECKED, "entry": launch.entry, "grid": launch.grid, "block": launch.block,
               "dynamic_shared_bytes": launch.dynamic_shared_bytes, "options": asdict(launch.options), "arguments": described}
    (folder / "request.json").write_text(json.dumps(request))


def _run_child(folder: Path, mode: Mode, deadline_s: float) -> tuple[int, str]:
    from agentcompile_core.plugin_api import child_environment

    environment = {**child_environment(), "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    if mode is Mode.SANITIZER:
        environment |= {"LD_PRELOAD": ":".join(_sanitizer_libraries()), "PYTHONMALLOC": "malloc",
                        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0",
                        "UBSAN_OPTIONS": "print_stacktrace=1"}
    process = subprocess.Popen([sys.executable, "-m", f"{__package__}.isolate", str(folder)], env=environment, start_new_session=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        errors = process.communicate(timeout=deadline_s)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise EmulationError(f"deadline: the child did not end within {deadline_s:g} s and was killed") from None
    return process.returncode, errors.decode(errors="replace")


def _sanitizer_libraries() -> list[str]:
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [find_toolchain().compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
        if not os.path.isabs(path):
            raise BuildError(f"g++ has no {name}; install the sanitizer libraries of this compiler or use another mode")
        found.append(path)
    return found


def _explain(code: int, errors: str) -> str:
    finding = _FINDING.search(errors)
    if finding is None:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        return f"the child process ended with code {code}: {last[0]}"
    place = _PLACE.search(errors, max(0, errors.rfind("\n", 0, finding.start())))
    return f"sanitizer: {finding.group(1).split(' on address')[0]}" + (f" [{place.group(1)}]" if place else "")


# --- the child ------------------------------------------------------------------------------------------------------------------
def _child(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    module = EmulatedModule(Path(request["library"]), checked=request["checked"])
    options = request["options"]
    options["order"] = ThreadOrder(options["order"])
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    arguments: list[Buffer | Scalar] = []
    for index, described in enumerate(request["arguments"]):
        if "kind" in described:
            arguments.append(_SCALARS[described["kind"]](described["value"]))
            continue
        contents = (folder / f"{index}.in").read_bytes()
        address = libc.malloc(len(contents)) if contents else 0
        ctypes.memmove(address, contents, len(contents))
        arguments.append(Buffer(name=described["name"], address=address or 0, nbytes=len(contents), access=Access(described["access"]),
                                written_by_the_chain=described["chain"]))
    failure = ""
    try:
        module.launch(request["entry"], request["grid"], request["block"], arguments, request["dynamic_shared_bytes"],
                      LaunchOptions(**options))
    except EmulationError as exc:
        failure = str(exc)
    for argument in arguments:
        if isinstance(argument, Buffer) and argument.access is not Access.READ:
            (folder / f"{argument.name}.out").write_bytes(ctypes.string_at(argument.address, argument.nbytes))
    (folder / "reply.json").write_text(json.dumps({"failure": failure}))




if __name__ == "__main__":
    _child(Path(sys.argv[1]))
