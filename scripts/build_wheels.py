"""Build a wheel of every distribution into one folder, without a network: setuptools must be installed."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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
        # The back end that every pyproject.toml here names, without pip around it: no second process, no isolated environment.
        command = [sys.executable, "-c", "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])", str(out)]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"no wheel of {folder.name}:\n{done.stdout}{done.stderr}")


def main() -> int:
    """Build them all and list them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dist"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for folder in distributions():
        build(folder, options.out.resolve())
    for wheel in sorted(options.out.glob("*.whl")):
        print(wheel.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
