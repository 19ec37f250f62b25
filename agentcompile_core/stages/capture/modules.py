"""Plain modules: example inputs in, one forward graph out; and the files and folders that define such a module."""

import contextlib
import hashlib
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ...errors import UsageError
from ...ir.graph import GraphKind, GraphSet, Workload
from ...plugin.interfaces import LoadedModel
from ...runtime.calls import Call, Shapeless, by_name, canonical, names_of, tree_of, written
from .attention import Unsupported
from .describe import describe, dtype_of
from .evaluating import evaluating
from .export import Exported, export_forward
from .functional import check_writes
from .importer import import_program, returned
from .language_model import why_not
from .left_behind import ParametersKept, undisturbed
from .normalize import normalize

FORM = "a module file defines Model, get_inputs() and get_init_inputs()"


class LoadedModule(LoadedModel):
    """A plain module with the call that says what it is compiled for.

    ``example_inputs`` and ``example_keywords`` are as calls.canonical makes them.
    """

    def __init__(self, *, example_inputs: tuple[Any, ...], example_keywords: dict[str, Any] | None = None, **facts: Any) -> None:
        super().__init__(**facts)
        self.example_inputs, self.example_keywords = example_inputs, example_keywords or {}


def load_module(module: nn.Module, example_inputs: Any, *, dtype: str | None, device: str) -> LoadedModule:
    """A live module with example inputs: a tuple or list of its arguments, or a dict of them by name; tensors may be nested in them.

    Raises:
        UsageError: there are no example inputs, they do not fit the module, or it has another element type than ``dtype``.
    """
    if not isinstance(example_inputs, (tuple, list, dict)) or not any(isinstance(a, Tensor) for a in pytree.tree_leaves(example_inputs)):
        raise UsageError("a plain module needs example inputs; pass example_inputs=(tensor, ...), or a dict of them by name")
    lazy = next((name for name, t in (*module.named_parameters(), *module.named_buffers()) if is_lazy(t)), None)
    if lazy is not None:
        raise UsageError(f"{lazy} of {type(module).__name__} has no shape yet; call the module once, then compile it")
    check_dtype(module, dtype)
    by_name = isinstance(example_inputs, dict)
    args, keywords = canonical(module, () if by_name else tuple(example_inputs), dict(example_inputs) if by_name else {})
    args, keywords = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, keywords))
    return LoadedModule(module=module.to(device), name=type(module).__name__, example_inputs=args, example_keywords=keywords)


def check_dtype(module: nn.Module, dtype: str | None) -> None:
    """Refuse to convert a live module behind its owner's back.

    Raises:
        UsageError: most of its parameters are of another type than ``dtype``.
    """
    found = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.is_floating_point()})
    if dtype is not None and found and dtype_of(module).value != dtype:
        raise UsageError(f"the live model is {', '.join(found)} and {dtype} was asked for; call model.to(torch.{dtype}) first")


def load_file(path: Path, *, dtype: str | None, device: str, meta: bool) -> LoadedModule:
    """Run the Python file ``path`` and build its Model. Only for files that the user names: this executes them.

    Raises:
        UsageError: there is no such file, it fails, or it lacks one of its parts.
    """
    if not path.is_file():
        raise UsageError(f"no file {path}; {FORM}")
    source = run_file(path)
    missing = [name for name in ("Model", "get_inputs", "get_init_inputs") if not callable(getattr(source, name, None))]
    if missing:
        raise UsageError(f"{path} lacks {', '.join(missing)}; {FORM}")
    try:
        with torch.device("meta" if meta else device):
            module = source.Model(*source.get_init_inputs())
            inputs = inputs_of(source, dtype)
    except Exception as exc:
        raise UsageError(f"{path} could not build its Model: {type(exc).__name__}: {exc}") from exc
    if not isinstance(module, nn.Module):
        raise UsageError(f"Model of {path} is a {type(module).__name__}; it must be a torch.nn.Module")
    if dtype is not None:
        module = module.to(getattr(torch, dtype))
    loaded = load_module(module.eval().requires_grad_(False), inputs, dtype=None, device="meta" if meta else device)
    loaded.name, loaded.path = path.stem, path
    return loaded


def inputs_of(source: ModuleType, dtype: str | None) -> Any:
    """What ``get_inputs()`` of a module file gives now, floating-point tensors as ``dtype`` (None: as they are): a tuple, or a dict."""
    given = source.get_inputs()
    inputs = given if isinstance(given, dict) else tuple(given)
    if dtype is None:
        return inputs
    return pytree.tree_map_only(Tensor, lambda a: a.to(getattr(torch, dtype)) if a.is_floating_point() else a, inputs)


class _AsWritten(SourceFileLoader):
    """Compiles the file that is there: Python takes kept bytecode for fresh where second and size are the same, so it can miss an edit."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def run_file(path: Path) -> ModuleType:
    """The Python file ``path``, as it is now, as a module. This executes it.

    Raises:
        UsageError: it is no Python file, or fails.
    """
    name = f"agentcompile_module_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsWritten(name, str(path)) if path.suffix == ".py" else None)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file; {FORM}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        raise UsageError(f"{path} fails when it is run: {type(exc).__name__}: {exc}") from exc
    finally:
        sys.path.remove(str(path.parent))
    return module


def module_file_of(folder: Path) -> Path | None:
    """The module file of a project folder: ``module`` of ``[tool.agentcompile]`` in its pyproject.toml, or model.py.

    Raises:
        UsageError: the pyproject is broken or names a file outside the folder.
    """
    project = folder / "pyproject.toml"
    if project.is_file():
        try:
            table = tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {}).get("agentcompile", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise UsageError(f"{project} is not valid TOML ({exc})") from exc
        if isinstance(table.get("module"), str):
            named = (folder / table["module"]).resolve()
            if folder.resolve() not in named.parents or named.suffix != ".py":
                raise UsageError(f"{project} names module {table['module']!r}; it must be a .py file inside the folder")
            return named
    return folder / "model.py" if (folder / "model.py").is_file() else None


def capture_module(loaded: LoadedModule, workload: Workload) -> GraphSet:
    """Export one forward of a plain module; an ``eager_reason`` where it cannot be exported."""
    info = describe(loaded)
    try:
        with undisturbed(loaded.module):
            _called_once(loaded)
            exported = export_forward(loaded.module, loaded.example_inputs, loaded.example_keywords)
        graph = normalize(import_program(exported, "forward", GraphKind.FORWARD))
        call = call_of(exported, loaded.example_inputs, loaded.example_keywords)
        check_writes(graph)
    except Exception as exc:  # whatever torch.export raises, the module still runs
        return GraphSet(model=info, workload=workload, graphs=(), eager_reason=f"{loaded.name} runs on the framework: {why_not(exc)}")
    return GraphSet(model=info, workload=workload, graphs=(graph,), call=call)


def _called_once(loaded: LoadedModule) -> None:
    """Call the module for real, so that what its code makes once and keeps anywhere is not made of the tensors of a trace.

    What it raises the trace raises as well.
    """
    given = (loaded.example_inputs, loaded.example_keywords)
    if any(t.is_meta for t in (*loaded.module.parameters(), *loaded.module.buffers(), *pytree.tree_leaves(given)) if isinstance(t, Tensor)):
        return
    args, keywords = by_name(loaded.module, *pytree.tree_map_only(Tensor, torch.clone, given))
    with contextlib.suppress(Exception), torch.no_grad(), evaluating(loaded.module), ParametersKept(loaded.module):
        loaded.module(*args, **keywords)


def _unflattened(leaves: Iterator[Any], spec: pytree.TreeSpec) -> Any:
    """As pytree.tree_unflatten, which makes a plain tuple of a shape."""
    if spec.is_leaf():
        return next(leaves)
    items = [_unflattened(leaves, child) for child in spec.children()]
    if spec.type is torch.Size and all(type(item) is int for item in items):
        return torch.Size(items)
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(items, spec.context)


def call_of(exported: Exported, args: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    """The shape of the exported call, as calls.py writes it: inputs in the order of the graph's inputs, results in that of its outputs.

    Raises:
        Unsupported: an argument or a result is something that cannot be written down, or no tensor is returned.
    """
    program = exported.program
    stands_for: dict[str, Tensor] = {}
    leaves = [leaf[0] if isinstance(leaf, tuple) else stands_for.setdefault(leaf, torch.empty(0)) for leaf in returned(program)]
    if not stands_for:
        raise Unsupported("it returns no tensor")
    spec = program.call_spec.out_spec
    assert spec is not None  # what torch.export made always has one
    try:
        outputs = tree_of(_unflattened(iter(leaves), spec), [], shared=True)
        call = Call(tree_of(args, []), tree_of(keywords, []), outputs, names_of(exported.model))
    except Shapeless as exc:
        raise Unsupported(f"it takes or returns {exc}, which is no container that torch knows") from exc
    return written(call)
