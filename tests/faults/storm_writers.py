"""The first storm: four processes write one store without pause, are killed at random moments and started again, while others read."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentcompile_core.ir.candidate import Kernel
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.private_folders import sweep
from agentcompile_core.store import Store

WRITERS, KEYS = 4, 40
LIFE_S = (0.3, 2.0)  # of a writer before it is killed


def kernel(seed: int) -> Kernel:
    """A kernel that can be told whole from torn: one byte, many times."""
    binary = bytes([seed % 256]) * (1000 + seed % 7 * 20_000)
    return Kernel(digest=f"d{seed}", backend="cuda", arch="sm_90", binary=binary, sha256=hashlib.sha256(binary).hexdigest(),
                  compiler="nvrtc 13.0")


def record(key: str, seed: int) -> TuningRecord:
    """A record whose parts name the same seed."""
    step = Step(match_id="m", implementation="gemv/gemv", origin=Origin.GENERATED, schedule=Schedule({"warps": seed}))
    return TuningRecord(key=key, signature=f"s{seed % 5}", step=step, source_digest=f"d{seed}", verdict=None, measurement=None)


def text(seed: int) -> str:
    """A text that names its seed many times."""
    return f"text {seed} " * 500


def write(root: str, writer: str, seed: str) -> None:
    """A writer: says each record that is committed (``key seed``) once ``put_record`` has returned."""
    store, number = Store(Path(root)), int(seed)
    while True:
        key = f"w{writer}k{number % KEYS}"
        store.put_record(record(key, number))
        os.write(1, f"{key} {number}\n".encode())
        store.put_kernel(f"k{number % KEYS}", kernel(number))  # the writers share these keys
        store.put_text("captures", f"k{number % KEYS}", text(number))
        number += 1


class Writer:
    """A running writer, and what it said to be committed."""

    def __init__(self, root: Path, name: int, seed: int, rng: random.Random) -> None:
        command = [sys.executable, "-c", "import sys; from faults.storm_writers import write; write(*sys.argv[1:])"]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
        self.name, self.seed = name, seed
        self._log = (root / f"writer{name}.log").open("ab+")
        self._process = subprocess.Popen([*command, str(root / "store"), str(name), str(seed)], stdout=self._log, env=env)
        self._start = self._log.seek(0, os.SEEK_END)
        self._life_s, self._dies_at = rng.uniform(*LIFE_S), float("inf")

    def is_due(self) -> bool:
        """Whether its life is over, which begins with the first record that it has committed."""
        now = time.monotonic()
        if self._dies_at == float("inf") and os.fstat(self._log.fileno()).st_size > self._start:
            self._dies_at = now + self._life_s
        return now > self._dies_at

    def kill(self) -> dict[str, int]:
        """Kill it; returns key and seed of what it had committed. A line that the kill cut off is no promise."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._log.seek(self._start)
        lines = self._log.read().decode().split("\n")[:-1]
        self._log.close()
        said = {key: int(seed) for key, seed in (line.split() for line in lines)}
        self.seed = max([self.seed, *said.values()]) + 1
        return said


def _wrong(store: Store, number: int) -> int:
    """Wrong reads among a kernel, a text and a record of each writer: what is found must be whole."""
    found = store.kernel(f"k{number}")
    bad = found is not None and found != kernel(int(found.digest[1:]))
    read = store.text("captures", f"k{number}")
    bad += read is not None and read != text(int(read.split()[1]))
    for writer in range(WRITERS):
        key = f"w{writer}k{number}"
        row = store.record(key)
        bad += row is not None and row != record(key, int(row.source_digest[1:]))
    return bad


def storm(root: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Let it rage for ``seconds``; returns the counts of one row of the results."""
    rng = random.Random(seed)
    writers = [Writer(root, name, 0, rng) for name in range(WRITERS)]
    committed: dict[str, int] = {}
    reads = wrong = kills = 0
    end, store = time.monotonic() + seconds, Store(root / "store")
    while time.monotonic() < end:
        wrong += _wrong(store, rng.randrange(KEYS))
        reads += 2 + WRITERS
        for index, writer in enumerate(writers):
            if writer.is_due():
                committed.update(writer.kill())
                kills += 1
                writers[index] = Writer(root, writer.name, writer.seed, rng)
    for writer in writers:
        committed.update(writer.kill())
        kills += 1
    survivor = Store(root / "store")
    wrong += sum(_wrong(survivor, number) for number in range(KEYS))
    reads += KEYS * (2 + WRITERS)
    lost = [key for key, last in committed.items() if (row := survivor.record(key)) is None or int(row.source_digest[1:]) < last]
    shelf = survivor.shelf
    assert shelf is not None
    swept = shelf.entries.remove_stale(0.0) + sweep(root / "tmp", "", 0.0)
    left = [*shelf.folder.glob("tmp/*"), *root.glob("tmp/*")]
    return {"storm": "writers", "seconds": round(seconds), "writers": WRITERS, "kills": kills, "reads": reads, "wrong_reads": wrong,
            "committed": sum(1 for _ in committed), "writes": sum(writer.seed for writer in writers), "lost": len(lost), "swept": swept,
            "left": len(left), "warnings": store.warnings + survivor.warnings}
