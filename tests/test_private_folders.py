"""What killed runs leave behind goes with the next one; what somebody owns, or never was ours, stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentcompile_core.private_folders import MARKER, PrivateFolder, sweep
from agentcompile_core.store import Store

OWNER = """
import sys, time
from pathlib import Path
from agentcompile_core.private_folders import PrivateFolder
made = [PrivateFolder(Path(sys.argv[1])) for _ in range(3)]
(made[0].path / "half").write_text("half")
print(*[m.path for m in made], flush=True)
time.sleep(60)
"""


def started(folder: Path) -> tuple["subprocess.Popen[str]", list[Path]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [Path(word) for word in process.stdout.readline().split()]


def test_folders_of_a_killed_process_go_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    (killed, lost), (living, kept) = started(tmp_path), started(tmp_path)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert sweep(tmp_path) == 0 and all(folder.is_dir() for folder in lost), "too young to be sure"
        assert sweep(tmp_path, young_s=0.0) == 3
        assert not any(folder.exists() for folder in lost) and all(folder.is_dir() for folder in kept)
    finally:
        living.kill()
        living.wait()


def test_the_folder_goes_with_its_block_and_with_its_object(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700 and sweep(tmp_path, young_s=0.0) == 0
    made = PrivateFolder(tmp_path)
    path = made.path
    assert path.is_dir()
    del made
    assert not folder.exists() and not path.exists()


@pytest.mark.parametrize("content", [True, False])
def test_what_bears_no_marker_is_somebody_elses(tmp_path: Path, content: bool) -> None:
    for name in ("agentcompile-private-results", "others"):
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / "table.csv").write_text("1")
        os.utime(tmp_path / name, (1.0, 1.0))
    (tmp_path / "agentcompile-private-link").symlink_to(tmp_path / "others")
    (tmp_path / "others" / MARKER).touch()  # a marker under another name does not make it ours
    sweep(tmp_path, young_s=0.0)
    assert (tmp_path / "others").is_dir() and (tmp_path / "agentcompile-private-link").is_symlink()
    assert (tmp_path / "agentcompile-private-results").is_dir() is content, "an empty one of a day ago was killed before its marker"


def test_a_store_sweeps_after_a_killed_writer(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_text("captures", "c", "x")
    assert store.shelf is not None
    process, lost = started(store.shelf.folder / "tmp")
    process.kill()
    process.wait()
    for folder in lost:
        os.utime(folder, (time.time() - 120.0,) * 2)
    again = Store(tmp_path)
    assert not any(folder.exists() for folder in lost) and again.text("captures", "c") == "x"
