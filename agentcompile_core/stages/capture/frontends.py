"""The core's own frontends, as a plugin: HuggingFace, live models and modules, module files and project folders."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...ir.graph import GraphSet, Workload
from ...plugin.hookspecs import hookimpl
from ...plugin.interfaces import Frontend, LoadedModel

_OPTIONS = {"dtype", "device", "meta", "random_weights", "example_inputs"}
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def _options(given: dict[str, Any], **allowed: Any) -> dict[str, Any]:
    """The options named in ``allowed``, with those defaults where they are absent or None.

    Raises:
        UsageError: an unknown option or element type.
    """
    unknown = sorted(given.keys() - _OPTIONS)
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(_OPTIONS), 1)
        raise UsageError(f"unknown option {unknown[0]!r}; a model takes {', '.join(sorted(_OPTIONS))}"
                         + (f"; did you mean {near[0]}?" if near else ""))
    found = {key: default if given.get(key) is None else given[key] for key, default in allowed.items()}
    if found.get("dtype") not in (None, *_DTYPES):
        raise UsageError(f"unknown dtype {found['dtype']!r}; allowed: {', '.join(_DTYPES)}")
    return found


def _path(what: object) -> Path | None:
    return Path(what).expanduser() if isinstance(what, (str, Path)) else None


def _is_module(what: object) -> bool:
    return any(cls.__module__ == "torch.nn.modules.module" and cls.__name__ == "Module" for cls in type(what).__mro__)


def _is_causal(what: object) -> bool:
    """Whether a live module is a transformers model that predicts tokens from ids."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(what).__mro__) and hasattr(what, "prepare_inputs_for_generation")


class HuggingFaceFrontend(Frontend):
    """A model identifier, or a folder with config.json (weights and tokenizer where there)."""

    name = "huggingface"
    runs_files = False

    def accepts(self, what: object) -> bool:
        path = _path(what)
        if path is None or path.suffix == ".py" or path.is_file():
            return False
        return not (path.is_dir() and not (path / "config.json").is_file() and _project_file(path) is not None)

    def load(self, what: object, options: dict[str, Any]) -> LoadedModel:
        path = _path(what)
        text = str(what)
        looks_like_path = isinstance(what, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
        if path is not None and not path.is_dir() and looks_like_path:
            raise UsageError(f"no folder {text}; give a folder with config.json, a model identifier, or a .py file")
        from .huggingface import load_pretrained

        return load_pretrained(text, **_options(options, dtype=None, device="cpu", meta=False, random_weights=None))

    def capture(self, loaded: LoadedModel, workload: Workload) -> GraphSet:
        from .language_model import capture_language_model

        return capture_language_model(loaded.module, loaded.name, workload)


class LiveModelFrontend(Frontend):
    """A live causal language model of transformers."""

    name = "live_model"
    runs_files = False

    def accepts(self, what: object) -> bool:
        return _is_module(what) and _is_causal(what)

    def load(self, what: Any, options: dict[str, Any]) -> LoadedModel:
        from .modules import check_dtype

        chosen = _options(options, dtype=None, device="cpu", meta=False)
        check_dtype(what, chosen["dtype"])
        loaded = LoadedModel(module=what, name=getattr(what.config, "_name_or_path", "") or type(what).__name__)
        if loaded.has_weights:
            what.to(chosen["device"])
        return loaded

    def capture(self, loaded: LoadedModel, workload: Workload) -> GraphSet:
        return HuggingFaceFrontend().capture(loaded, workload)


class LiveModuleFrontend(Frontend):
    """A live ``torch.nn.Module`` with the option ``example_inputs``."""

    name = "live_module"
    runs_files = False

    def accepts(self, what: object) -> bool:
        return _is_module(what) and not _is_causal(what)

    def load(self, what: Any, options: dict[str, Any]) -> LoadedModel:
        from .modules import load_module

        return load_module(what, **_options(options, example_inputs=None, dtype=None, device="cpu"))

    def capture(self, loaded: LoadedModel, workload: Workload) -> GraphSet:
        from .modules import LoadedModule, capture_module

        if not isinstance(loaded, LoadedModule):
            raise UsageError(f"{loaded.name} was opened without example inputs; pass example_inputs=(tensor, ...)")
        return capture_module(loaded, workload)


class ModuleFileFrontend(LiveModuleFrontend):
    """A ``.py`` file that defines Model, get_inputs() and get_init_inputs(). It is executed."""

    name = "module_file"
    runs_files = True

    def accepts(self, what: object) -> bool:
        path = _path(what)
        return path is not None and path.suffix == ".py" and not path.is_dir()

    def load(self, what: Any, options: dict[str, Any]) -> LoadedModel:
        from .modules import load_file

        return load_file(Path(what).expanduser(), **_options(options, dtype=None, device="cpu", meta=False))


class ProjectFolderFrontend(ModuleFileFrontend):
    """A folder without config.json whose pyproject.toml or model.py names such a file."""

    name = "project_folder"

    def accepts(self, what: object) -> bool:
        path = _path(what)
        return path is not None and path.is_dir() and not (path / "config.json").is_file() and _project_file(path) is not None

    def load(self, what: Any, options: dict[str, Any]) -> LoadedModel:
        from .modules import module_file_of

        found = module_file_of(Path(what).expanduser())
        if found is None:
            raise UsageError(f"{what} holds neither config.json nor model.py")
        loaded = super().load(found, options)
        loaded.name = Path(what).expanduser().resolve().name
        return loaded


def _project_file(folder: Path) -> Path | None:
    """A file that makes ``folder`` a project; what it says is read when it is loaded."""
    return next((folder / name for name in ("model.py", "pyproject.toml") if (folder / name).is_file()), None)


def frontend_of(loaded: LoadedModel) -> Frontend:
    """The frontend that captures a model which is open already."""
    return HuggingFaceFrontend() if _is_causal(loaded.module) else LiveModuleFrontend()


@hookimpl
def agentcompile_frontends() -> Iterable[Frontend]:
    """The core's frontends; what they accept does not overlap."""
    return [HuggingFaceFrontend(), LiveModelFrontend(), LiveModuleFrontend(), ModuleFileFrontend(), ProjectFolderFrontend()]
