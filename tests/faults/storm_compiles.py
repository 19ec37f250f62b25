"""The second storm: compiles killed at random moments after the first write to the store, one after another on one cache.

The process that runs this has compiled once, on one thread, so that each compile is a quick fork of it.
"""

import contextlib
import os
import random
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.private_folders import sweep
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.store import Store, care
from agentcompile_core.store.shelf import Shelf

from . import cheap

SIZES = 60  # models of as many sizes: some runs begin anew, others go on where one was killed
SPAN_S = 0.3  # after the first write within which a compile is killed; follows how long compiles take
WITH_WORKER_EVERY = 10  # runs between two that have their worker in a process of its own, as users have
WORKER_SPAN_S = 8.0


class Told(Store):
    """A store that says on a pipe what it has written: the first write, and every record that is committed."""

    def __init__(self, root: Path, pipe: int) -> None:
        self._pipe = pipe
        super().__init__(root)

    def _put(self, doing: str, kind: str, key: str, write: Any) -> bool:
        done = super()._put(doing, kind, key, write)
        os.write(self._pipe, f"{'record' if 'database' in doing else 'entry'} {key}\n".encode())
        return done


def _compile(root: Path, size: int, workers: str, pipe: int) -> None:
    """In the child: compile, save the bundle over the one before, end."""
    os.setsid()
    tempfile.tempdir = str(root / "tmp")
    os.environ["TMPDIR"] = tempfile.tempdir
    model = cheap.module(root / "models", size=size, name=f"addition{size}")
    made = cheap.compiled(model, Told(root / "store", pipe), family=cheap.Family("honest", "wrong", "unwritten"), workers=workers,
                          run_on="nothing")
    os.write(pipe, b"saving bundle\n")
    made.save(root / "bundle")
    os.write(pipe, b"done all\n")


def _forked(root: Path, size: int, workers: str) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
                _compile(root, size, workers, write)
            code = 0
        except BaseException as exc:
            sys.stderr.write(f"a compile of the storm failed: {type(exc).__name__}: {exc}\n")
        finally:
            os._exit(code)
    os.close(write)
    return pid, read


def _until(read: int, end: float) -> str:
    """What the child says until it ends, or until ``end``."""
    said = b""
    while (left := end - time.monotonic()) > 0 and select.select([read], [], [], left)[0]:
        part = os.read(read, 1 << 16)
        if not part:
            break
        said += part
    return said.decode()


def _one(root: Path, size: int, workers: str, span_s: float, rng: random.Random) -> tuple[bool, str]:
    """One compile: (whether it was killed before it ended, what it said)."""
    pid, read = _forked(root, size, workers)
    said = ""
    while "\n" not in said:
        part = os.read(read, 1 << 16)
        if not part:
            break
        said += part.decode()
    said += _until(read, time.monotonic() + rng.uniform(0.0, span_s))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    said += _until(read, time.monotonic() + 5.0)
    os.close(read)
    return os.WIFSIGNALED(status), said


def _damage(root: Path, records: set[str]) -> tuple[int, int]:
    """Wrong reads and lost records after one kill: everything in the store, and the bundle if there is one."""
    store = Store(root / "store")
    wrong = len(care.verify(store)["damaged"])
    if (root / "bundle").exists():
        try:
            bundle_reader.read_manifest(root / "bundle")
            bundle_reader._files(root / "bundle", bundle_reader.read_manifest(root / "bundle"))
        except Exception:
            wrong += 1
    lost = [key for key in records if not isinstance(store.record(key), TuningRecord)]
    store.close()
    return wrong, len(lost)


def _processes() -> list[int]:
    """Workers of killed compiles that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_worker = b"agentcompile_core.worker\0" in (path / "cmdline").read_bytes()
            if is_worker and (path / "environ").read_bytes().count(f"AGENTCOMPILE_STORM={os.getpid()}".encode()):
                found.append(int(path.name))
    return found


def _answers(root: Path) -> int:
    """In a child: models of the storm compiled to the end on the cache that it left, and compared with torch; wrong ones."""
    pid = os.fork()
    if pid == 0:
        wrong = 9
        with contextlib.suppress(BaseException):
            import torch

            wrong = 0
            for size in (100, 100 + SIZES // 2):
                made = cheap.compiled(cheap.module(root / "models", size=size, name=f"addition{size}"), Store(root / "store"),
                                      family=cheap.Family("honest", "wrong", "unwritten"), workers=cheap.HERE)
                a, b = torch.randn(size), torch.randn(size)
                wrong += not torch.equal(made(a, b), a + b) or made.statistics["selected"] != 1
        os._exit(wrong)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def storm(root: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill ``kills`` compiles; returns the counts of one row of the results."""
    rng, began = random.Random(seed), time.monotonic()
    os.environ["AGENTCOMPILE_STORM"] = str(os.getpid())
    (root / "models").mkdir()
    _warm(root)
    done = ended = wrong = lost = saving = with_worker = 0
    records: set[str] = set()
    span_here_s = SPAN_S
    while done < kills:
        real = (done + ended) % WITH_WORKER_EVERY == WITH_WORKER_EVERY - 1
        workers, span_s = ("agentcompile_core.testing.doubles:catalog", WORKER_SPAN_S) if real else (cheap.HERE, span_here_s)
        killed, said = _one(root, 100 + rng.randrange(SIZES), workers, span_s, rng)
        if not real:
            span_here_s *= 1.1 if killed else 0.8
        done, ended, with_worker = done + killed, ended + (not killed), with_worker + (killed and real)
        saving += killed and "saving" in said
        records |= {line.split()[1] for line in said.split("\n")[:-1] if line.startswith("record ")}
        if os.environ.get("AGENTCOMPILE_STORM_SAYS"):
            sys.stderr.write(f"{time.monotonic() - began:.1f} s: {done} killed, {ended} ended, {len(records)} records\n")
        one = _damage(root, records)
        wrong, lost = wrong + one[0], lost + one[1]
    time.sleep(2.0)  # workers end by themselves when their parent is gone
    swept, left = _swept(root)
    return {"storm": "compiles", "seconds": round(time.monotonic() - began), "kills": done, "ended_before": ended,
            "with_worker": with_worker, "while_saving": saving, "committed": len(records), "lost": lost, "wrong_reads": wrong,
            "wrong_answers": _answers(root), "swept": swept, "left": left, "processes": len(_processes()),
            "warnings": Store(root / "store").warnings}


def _warm(root: Path) -> None:
    import torch

    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    cheap.compiled(cheap.module(root / "models"), Store(None), workers=cheap.HERE).save(root / "bundle")


def _swept(root: Path) -> tuple[int, int]:
    """Folders of killed runs that a later run removes, and those that stay."""
    shelf = Shelf(root / "store" / "v1")
    swept = shelf.entries.remove_stale(0.0) + sweep(root / "tmp", young_s=0.0) + sweep(root, ".bundle-private-", 0.0)
    # torch keeps a cache of its own among temporary files
    left = [*shelf.folder.glob("tmp/*"), *root.glob("tmp/agentcompile-private-*"), *root.glob(".bundle-*")]
    for path in left:
        sys.stderr.write(f"left behind: {path}\n")
    return swept, len(left)
