"""Build a wheel of every distribution, or of given folders, into one folder, without a network: setuptools must be installed."""

import argparse
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

from setuptools import build_meta

sys.path.insert(0, str(Path(__file__).parent))
from setup_environment import ROOT, distributions


def build(folder: Path, out: Path) -> None:
    """Build one wheel from a copy, so that no build folder of an earlier state leaks into it."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "source"
        ignored = shutil.ignore_patterns(
            ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", *(("plugins",) if folder == ROOT else ())
        )
        shutil.copytree(folder, copy, ignore=ignored)
        log = Path(scratch) / "log"
        child = os.fork()  # setuptools is imported once for all, and a build leaves nothing to the next one
        if not child:
            _build_here(copy, out, log)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"no wheel of {folder.name}:\n{log.read_text(errors='replace')}")


def _build_here(source: Path, out: Path, log: Path) -> NoReturn:
    """Build with the back end that every pyproject.toml here names, without pip around it; ends the process."""
    code = 1
    try:
        with log.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.chdir(source)
        build_meta.build_wheel(str(out))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for buffered in (sys.stdout, sys.stderr):
            buffered.flush()
        os._exit(code)


def main() -> int:
    """Build them and list what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("folders", type=Path, nargs="*", help="folders of distributions; default: all of the repository")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for folder in options.folders or distributions():
        build(folder, options.out.resolve())
    for wheel in sorted(options.out.glob("*.whl")):
        print(wheel.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
