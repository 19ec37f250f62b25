"""The size of the cache: within its limit after every write, what was used last stays, concurrent processes do no harm."""

import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.store import Store
from agentcompile_core.store.entries import Entries

LIMIT = 40_000
ACTION = st.tuples(st.sampled_from(["write", "read"]), st.integers(0, 9), st.integers(0, 15_000))
PROCESS = """
import sys, random
from pathlib import Path
from agentcompile_core.store.entries import Entries
entries, rng = Entries(Path(sys.argv[1]), 60_000), random.Random(int(sys.argv[2]))
for turn in range(120):
    key = f"key{rng.randrange(30)}"
    if rng.random() < 0.6:
        entries.write("kernels", key, {"binary": key.encode() * 500})
    else:
        found = entries.read("kernels", key)
        assert found is None or found == {"binary": key.encode() * 500}, key
"""


def held(root: Path) -> dict[str, int]:
    return {path.parent.name: sum(f.stat().st_size for f in path.parent.iterdir()) for path in root.glob("*/??/*/manifest.json")}


@settings(derandomize=True, deadline=None, max_examples=40, database=None)
@given(st.lists(ACTION, min_size=1, max_size=30))
def test_after_every_write_the_limit_holds_and_what_was_used_last_is_there(tmp_path_factory, actions) -> None:
    root = tmp_path_factory.mktemp("entries")
    entries, used = Entries(root, LIMIT), []
    for what, number, size in actions:
        key = f"key{number}"
        if what == "read" and entries.read("kernels", key) is None:
            continue
        if what == "write":
            entries.write("kernels", key, {"binary": b"x" * size})
            assert entries.read("kernels", key) == {"binary": b"x" * size}
        used = [k for k in used if k != key] + [key]
        there = held(root)
        assert sum(there.values()) <= LIMIT or set(there) == {key}
        assert set(there) == set(used[len(used) - len(there):]), "something used later went before something used earlier"
        used = used[len(used) - len(there):]
    assert list((root / "tmp").iterdir()) == [] if (root / "tmp").exists() else True


def test_without_a_limit_nothing_goes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(5):
        store.put_text("captures", f"c{number}", "x" * 100_000)
    assert all(store.text("captures", f"c{number}") for number in range(5))


def test_a_store_with_a_limit_forgets_what_was_not_used_longest(tmp_path: Path) -> None:
    import random

    texts = {f"c{n}": random.Random(n).randbytes(6000).hex() for n in range(6)}
    store = Store(tmp_path, max_bytes=30_000)
    for key, text in texts.items():
        store.put_text("captures", key, text)
        assert store.text("captures", "c0") == texts["c0"]
    assert store.text("captures", "c1") is None and store.text("captures", "c5") == texts["c5"]
    assert store.warnings == []


def test_processes_that_write_and_read_at_once_see_whole_entries_or_none(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), str(seed)], stderr=subprocess.PIPE, text=True)
               for seed in range(3)]
    assert [(process.communicate()[1], process.returncode) for process in running] == [("", 0)] * 3
    # Each looks again after a twentieth of the limit, so that together they are never far beyond it.
    assert sum(held(tmp_path).values()) <= 60_000 * (1 + 3 * 0.05) + 3 * 3000
