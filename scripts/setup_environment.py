"""Make the virtual environment that `make demo` and `make test` use: torch, transformers, the core and every plugin."""

import argparse
import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = (
    "setuptools>=77",
    "wheel",
    "pytest>=8",
    "hypothesis>=6.100",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "pybind11>=2.12",
    "ruff>=0.9",
    "mypy>=1.14",
    "import-linter>=2.1",
    "shtab>=1.7",
)
CORE_NEEDS = ("attrs>=23.3", "cattrs>=24.1", "pluggy>=1.5", "safetensors>=0.4", "platformdirs>=4", "numpy")
CUDA_NEEDS = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-cuda-crt", "cuda-bindings", "cuda-pathfinder")
LITELLM = ("litellm>=1.83,<2",)


def distributions() -> list[Path]:
    """The core, every plugin, and the example plugin."""
    return [
        ROOT,
        *sorted(p.parent for p in ROOT.glob("plugins/*/*/pyproject.toml")),
        *sorted(p.parent for p in ROOT.glob("examples/*/pyproject.toml")),
    ]


def pip(python: Path, *arguments: str, offline: bool = False) -> None:
    """Run pip quietly; ``offline`` refuses every index."""
    extra = ["--no-index"] if offline else []
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *extra, *arguments], check=True)


def install_projects(python: Path) -> None:
    """Install the distributions in editable mode, without touching their dependencies or the network."""
    arguments: list[str] = []
    for folder in distributions():
        if folder.parent.name != "examples":
            arguments += ["-e", str(folder)]
    pip(python, "--no-deps", "--no-build-isolation", *arguments, offline=True)


def main() -> int:
    """Create the environment and install everything; safe to run again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--use-system", action="store_true", help="build on the torch and transformers that are installed already")
    parser.add_argument("--torch", default="torch==2.13.0")
    parser.add_argument("--transformers", default="transformers>=5.17,<6")
    options = parser.parse_args()
    again = Path(sys.prefix).resolve() == options.venv.resolve()  # it is active itself: its torch and transformers stay
    with_installed = _parent_link(options.venv).exists() if again else options.use_system
    print(f"setting up {options.venv} ({'with the torch that is installed' if with_installed else options.torch}) ...", flush=True)
    python = options.venv / "bin" / "python"
    if not again:
        venv.EnvBuilder(with_pip=True, system_site_packages=with_installed).create(options.venv)
    if again and not with_installed and all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        pip(python, *TOOLS, *CORE_NEEDS, *CUDA_NEEDS, *LITELLM)
    elif not with_installed:
        pip(python, *TOOLS)
        pip(python, options.torch)
        pip(python, options.transformers, *CORE_NEEDS)
        pip(python, *CUDA_NEEDS)
        pip(python, *LITELLM, options.transformers, options.torch)
    elif not again:
        _complete_installed(options.venv, python)
    install_projects(python)
    print("ready", flush=True)
    return 0


def _complete_installed(folder: Path, python: Path) -> None:
    """Build on the packages of the environment that this runs in, and add what it lacks."""
    _link_parent_environment(folder)
    missing = [
        name
        for name in ("attrs", "cattrs", "pluggy")
        if importlib.util.find_spec(name.replace("attrs", "attr") if name == "attrs" else name) is None
    ]
    if not _has_setuptools(python):  # Python 3.11 puts an old one into every environment, in front of the installed one
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"], check=True)
        missing += [] if _has_setuptools(python) else [TOOLS[0], TOOLS[1]]
    if missing:
        pip(python, *missing)


def _has_setuptools(python: Path) -> bool:
    """Whether the environment sees a setuptools that reads our project files."""
    code = "import setuptools, sys; sys.exit(int(setuptools.__version__.split('.')[0]) < 77)"
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0


def _link_parent_environment(folder: Path) -> None:
    """Inside a virtual environment, system_site_packages means the base interpreter; point at this one's packages as well.

    NVIDIA's own search for NVRTC and its headers looks into folders of packages alone, not at what they point to: those are linked.
    """
    found = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    link = _parent_link(folder)
    link.write_text("\n".join(p for p in found if p) + "\n")
    libraries = next((Path(p) / "nvidia" for p in found if p and (Path(p) / "nvidia").is_dir()), None)
    place = link.parent / "nvidia"
    if place.is_symlink() and not place.exists():  # what it pointed to has moved
        place.unlink()
    if libraries is not None and not place.exists():
        place.symlink_to(libraries.resolve(), target_is_directory=True)


def _parent_link(folder: Path) -> Path:
    """The file that names the folders of the environment around."""
    return next((folder / "lib").glob("python3*"), folder / "lib") / "site-packages" / "parent_environment.pth"


if __name__ == "__main__":
    sys.exit(main())
