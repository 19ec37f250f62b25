"""Where a bundle says that its model came from: a hint, which only opens a folder of data; and the word that a model file is executed."""

import sys
from pathlib import Path

from ..errors import UsageError
from ..runtime import bundle_reader


def model_of(bundle: Path) -> str:
    """The folder with config.json that the bundle was compiled from.

    Raises:
        UsageError: it was something else, which the user has to name: a file that would be executed, an identifier that would be
            fetched, a folder that is not here, or a live model.
    """
    source = bundle_reader.read_manifest(bundle).source
    if not source:
        raise UsageError("this bundle was compiled from a live model, so name the model whose weights it runs with: "
                         f"agentcompile generate MODEL --bundle {bundle} --prompt TEXT")
    shown = ascii(source[:200])
    try:
        path = Path(source).expanduser()
        if path.is_absolute() and (path / "config.json").is_file():
            return source
        runs = path.suffix == ".py" or (path.is_dir() and not (path / "config.json").is_file())
    except (OSError, ValueError, RuntimeError):
        runs = False
    if runs:
        raise UsageError(f"the bundle says that it was compiled from {shown}, which is not opened because a bundle names it; name the "
                         f"model file yourself: agentcompile generate MODEL.py --bundle {bundle} --prompt TEXT (it is executed)")
    raise UsageError(f"the bundle says that it was compiled from {shown}, which is no folder with config.json here; name the model: "
                     f"agentcompile generate MODEL --bundle {bundle} --prompt TEXT")


def executed(model: object) -> Path | None:
    """The Python file that is run where ``model`` is opened: itself, or that of a project folder; None for a folder of data."""
    from ..stages.capture.modules import module_file_of

    try:
        path = Path(str(model)).expanduser()
        if path.suffix == ".py":
            return path if path.is_file() else None
        if path.is_dir() and not (path / "config.json").is_file():
            return module_file_of(path)
    except (OSError, ValueError, RuntimeError):
        return None
    return None


def say_executed(model: object) -> None:
    """One line on standard error where opening ``model`` runs code."""
    found = executed(model)
    if found is not None:
        print(f"{found} is executed", file=sys.stderr)
