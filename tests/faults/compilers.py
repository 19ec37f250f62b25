"""Compilers: one that refuses, hangs, forks, eats memory or lies costs the source that it was given, and leaves nothing behind."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentcompile_core.errors import BuildError
from agentcompile_core.processes.toolchain import GuardedServer, run_guarded
from agentcompile_core.store import Store

from . import cheap
from .registry import add, fault
from .seen import refused, right, told

AREA = "compilers"
ECHO = ("import struct, sys\nwhile True:\n    (n,) = struct.unpack('<Q', sys.stdin.buffer.read(8))\n    data = sys.stdin.buffer.read(n)\n"
        "    {act}\n    sys.stdout.buffer.write(struct.pack('<Q', len(data)) + data); sys.stdout.buffer.flush()\n")


def _python(code: str, **options: Any) -> Any:
    return run_guarded([sys.executable, "-c", code], deadline_s=options.pop("deadline_s", 60.0), **options)


def _folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("agentcompile-private-")}


@fault(AREA, "a compiler refuses one of two sources", "the other source was built, the program is right")
def _a_source_that_does_not_compile(folder: Path) -> str:
    made = cheap.compiled(cheap.module(folder), Store(folder / "store"), workers=cheap.HERE, family=cheap.Family("no_build", "honest"))
    right(made)
    (record,) = [r for r in made.compilation.records if r.failure is not None]
    assert "told to refuse" in record.message and record.failure.value == "compile"
    return f"{record.failure.value}: {record.message}"


@fault(AREA, "nothing of a region compiles", "the framework runs, the result is right")
def _nothing_that_compiles(folder: Path) -> str:
    made = cheap.compiled(cheap.module(folder), Store(folder / "store"), workers=cheap.HERE, family=cheap.Family("no_build"))
    right(made)
    (selection,) = made.compilation.selections
    assert not selection.steps
    return next(why for _, why in selection.fallback_reasons if "fake compiler" in why)


@fault(AREA, "a backend's build() raises", "the framework runs, the result is right")
def _a_backend_that_raises(folder: Path) -> str:
    from agentcompile_core.testing import doubles

    def build(self: Any, *_: Any, **__: Any) -> Any:
        raise OSError("the licence server is away")

    real, doubles.FakeBackend.build = doubles.FakeBackend.build, build  # type: ignore[method-assign]
    try:
        made = cheap.compiled(cheap.module(folder), Store(folder / "store"), workers=cheap.HERE)
    finally:
        doubles.FakeBackend.build = real  # type: ignore[method-assign]
    right(made)
    return told(made, "the licence server is away", folder)


@fault(AREA, "a compiler never ends", "it was killed with its children, its temporary folder is gone")
def _an_endless_compiler(folder: Path) -> str:
    before, mark = _folders(), folder / "child"
    code = f"import subprocess, sys, time; subprocess.Popen(['sleep', '1003']); open({str(mark)!r}, 'w').close(); time.sleep(60)"
    said = refused(lambda: _python(code, deadline_s=4.0), "did not finish within 4 s", BuildError)
    assert mark.exists() and not (_folders() - before) and subprocess.run(["pgrep", "-f", "^sleep 1003$"], check=False).returncode == 1
    return said


@fault(AREA, "a compiler ends and leaves a process behind", "the process was killed")
def _children_that_stay(folder: Path) -> str:
    done = _python("import subprocess; print(subprocess.Popen(['sleep', '1004'], stdout=subprocess.DEVNULL).pid)")
    pid, end = int(done.stdout), time.monotonic() + 5.0
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
    return f"exit code {done.returncode}, and its child is gone"


@fault(AREA, "a compiler asks for 64 GiB", "this process kept its memory")
def _a_compiler_that_eats_memory(folder: Path) -> str:
    done = _python("x = bytearray(64 << 30)", memory_bytes=2 << 30)
    assert done.returncode != 0 and "MemoryError" in done.stderr
    return f"exit code {done.returncode}: MemoryError"


@fault(AREA, "a compiler writes without end to its log", "1 MiB of it is kept")
def _an_endless_log(folder: Path) -> str:
    done = _python("import sys; sys.stdout.write('x' * (8 << 20))")
    assert len(done.stdout) == 1 << 20
    return f"the last {len(done.stdout)} characters were kept"


add(AREA, "a compiler that is not there", "the named compiler does not exist",
    lambda folder: str(run_guarded(["/nowhere/nvcc"], deadline_s=5.0).stderr), "a failed command, no exception")


@fault(AREA, "keys of services in the environment", "the compiler did not get them")
def _keys_beside_a_compiler(folder: Path) -> str:
    os.environ["OPENAI_API_KEY"] = "sk-canary-0123456789"
    try:
        done = _python("import os; print(sorted(os.environ))")
    finally:
        del os.environ["OPENAI_API_KEY"]
    assert "OPENAI" not in done.stdout
    return f"it saw {done.stdout.strip()}"


SERVERS = {"dies in the middle": ("sys.exit(7)", "ended with code 7"), "hangs": ("import time; time.sleep(60)", "did not answer within"),
           "answers without end": ("sys.stdout.buffer.write(struct.pack('<Q', 1 << 60)); sys.stdout.buffer.flush()", "at most"),
           "closes its output": ("import os; os.close(1); import time; time.sleep(9)", "closed its output")}


def _server(act: str, words: str) -> Any:
    def run(folder: Path) -> str:
        server = GuardedServer([sys.executable, "-c", ECHO.format(act=f"data == b'bad' and exec({act!r})")], name="nvrtc")
        try:
            assert server.request(b"good", 60.0) == b"good"
            said = refused(lambda: server.request(b"bad", 3.0), words, BuildError)
            assert server.request(b"again", 60.0) == b"again", "the next request gets a new one"
        finally:
            server.close()
        return said

    return run


for _name, (_act, _words) in SERVERS.items():
    add(AREA, f"a compiler process that {_name}", f"the compiler kept for many sources {_name}", _server(_act, _words),
        "the next source was built by a new one")
