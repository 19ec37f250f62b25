"""Task files: Python modules that define Model, get_inputs() and get_init_inputs(), as the public sets hold them."""

import re
from pathlib import Path

from attrs import frozen

NAME = re.compile(r"(\d+)_(.+)\.py")
LEVEL = re.compile(r"level[-_]?([\w-]+)")


class NoTasks(SystemExit):
    """A folder without task files, in one sentence."""


@frozen(kw_only=True, order=True)
class Task:
    """One file. ``level``: what its folder says, empty where tasks lie side by side."""

    level: str
    number: int
    name: str
    path: Path

    def __str__(self) -> str:
        return f"level {self.level} task {self.number} {self.name}" if self.level else f"task {self.number} {self.name}"


def find(folder: Path, level: str = "", only: str = "") -> list[Task]:
    """The tasks below ``folder`` in order: in it, or in folders ``level1``, ``level2``, ... of it or of its folder KernelBench.

    Args:
        folder: a checkout, its folder of levels, or one level.
        level: only this one.
        only: numbers and names, by commas; a range as 3-7.

    Raises:
        NoTasks: nothing is left.
    """
    if not folder.is_dir():
        raise NoTasks(f"{folder} is no folder; name one that holds task files such as 1_Name.py, or folders level1, level2, ... of them")
    root = folder / "KernelBench" if (folder / "KernelBench").is_dir() else folder
    own = LEVEL.fullmatch(root.name)
    found = [_task(own[1] if own else "", path) for path in root.glob("*.py") if NAME.fullmatch(path.name)]
    for below in root.iterdir():
        if below.is_dir() and (named := LEVEL.fullmatch(below.name)):
            found += [_task(named[1], path) for path in below.glob("*.py") if NAME.fullmatch(path.name)]
    chosen = sorted(task for task in found if level in ("", task.level) and _is_wanted(task, only))
    if not chosen:
        levels = ", ".join(sorted({task.level for task in found if task.level})) or "none"
        raise NoTasks(f"{folder} holds {len(found)} tasks (levels: {levels}), and none of them is asked for")
    return chosen


def _task(level: str, path: Path) -> Task:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return Task(level=level, number=int(match[1]), name=match[2], path=path)


def _is_wanted(task: Task, only: str) -> bool:
    if not only:
        return True
    for part in only.split(","):
        span = re.fullmatch(r"(\d+)-(\d+)", part)
        if part == task.name or part == str(task.number) or (span and int(span[1]) <= task.number <= int(span[2])):
            return True
    return False
