"""Putting the layers into a model, and taking them out again."""

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from attrs import field, frozen
from torch import nn
from torch.nn.utils import parametrize

from agentcompile_core import compile as compile_module
from agentcompile_core.plugin_api import AgentCompileError, UsageError

from .layer import CUDALinear

SERVED = (torch.float16, torch.bfloat16, torch.float32)
Place = tuple[nn.Module, str, nn.Module]  # a parent, the name of its child there, and who was there before


@frozen(kw_only=True)
class Replaced:
    """What was done to a model; ``undo`` puts every layer back. Also a context: at its end the layers are as they were.

    ``layers``: by qualified name, what serves a call with one token (``gemv/gemv``). ``left``: why a linear layer was left alone.
    """

    layers: Mapping[str, str]
    left: Mapping[str, str]
    _places: tuple[Place, ...] = field(repr=False)

    def undo(self) -> None:
        """Put the layers back that were there before, where nobody has put another one since."""
        for parent, name, before in self._places:
            if isinstance(parent._modules.get(name), CUDALinear):
                parent._modules[name] = before

    def __enter__(self) -> "Replaced":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def replace_linears(model: nn.Module, **options: Any) -> Replaced:
    """Have every linear layer of ``model`` run its calls with one token by a kernel that was compiled for its shape.

    The first layer of each shape is compiled as a module of its own (``agentcompile_core.compile``): kernels are validated, measured and
    compared with the layer before they serve, and the framework keeps what is faster there. The others of that shape run its program
    over their own parameters, each compared with the framework too. Layers with hooks or parametrizations, subclasses of ``nn.Linear``
    and parameters of other types than float16, bfloat16 and float32 are left alone, and so are those whose compilation fails; ``left``
    says why.

    Args:
        model: any module; changed in place. Its parameters stay where they are, or move as compiling moves them (to 16 bytes).
        options: of ``agentcompile_core.compile``: ``config``, ``catalog``, ``store``, ``device``, ``target``, ``run_on``, budgets, ...

    Raises:
        UsageError: the options are not such.
    """
    places = _places(model)
    made: dict[int, tuple[nn.Module, str]] = {}
    layers, left, done, compiled = {}, {}, [], _Compiled(options)
    try:
        for full, (parent, name, linear) in places.items():
            why = _why_not(linear)
            if why:
                left[full] = why
                continue
            if id(linear) not in made:
                made[id(linear)] = compiled.of(linear)
            layer, what = made[id(linear)]
            if layer is linear:
                left[full] = what
                continue
            layers[full] = what
            parent._modules[name] = layer
            done.append((parent, name, linear))
    except BaseException:  # such as one of the device's memory: nothing half done stays
        Replaced(layers=layers, left=left, places=tuple(done)).undo()
        raise
    return Replaced(layers=layers, left=left, places=tuple(done))


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str, nn.Linear]]:
    """Every linear layer by qualified name, with its parent; a layer in several places has several names."""
    found = {}
    for prefix, parent in model.named_modules(remove_duplicate=False):
        for name, child in parent._modules.items():
            if isinstance(child, nn.Linear) and not isinstance(child, CUDALinear):
                found[f"{prefix}.{name}".lstrip(".")] = (parent, name, child)
    return found


def _why_not(linear: nn.Linear) -> str:
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}"
    if parametrize.is_parametrized(linear):
        return "it is parametrized"
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    if any(hooks) or "forward" in linear.__dict__:
        return "it has hooks, or a forward of its own"
    if linear.weight.dtype not in SERVED:
        return f"its weight is {linear.weight.dtype}"
    return "its parameters hold no data" if linear.weight.is_meta else ""


class _Compiled:
    """What layers of one shape share: the first one is compiled, programs of its form then read the parameters of the others."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options, self._first = options, dict[tuple[Any, ...], Any]()

    def of(self, linear: nn.Linear) -> tuple[nn.Module, str]:
        """The layer that takes the place of ``linear`` and what serves it; or the layer itself and why it stays."""
        try:
            compiled = self._model(linear)
        except UsageError:
            raise
        except AgentCompileError as exc:
            return linear, str(exc).splitlines()[0]
        steps = [step for selection in compiled.compilation.selections for step in selection.steps] if compiled.compilation else []
        run = getattr(compiled.session, "run", None)
        if not steps or run is None:
            return linear, "the framework's own is not slower"
        lost = [note for note in compiled.notes if "framework's operators" in note]
        return (linear, lost[0]) if lost else (CUDALinear(linear, run), steps[0].step.implementation)

    def _model(self, linear: nn.Linear) -> Any:
        weight, key = linear.weight, _key(linear)
        if key in self._first:
            with contextlib.suppress(UsageError):  # it differs in something else: it is compiled by itself
                return self._first[key].sibling(linear)
        generator = torch.Generator().manual_seed(linear.in_features)
        row = torch.randn(1, 1, linear.in_features, generator=generator).to(weight.device, weight.dtype)
        compiled = compile_module(linear, **{"device": weight.device.type, **self._options, "example_inputs": (row,)})
        self._first.setdefault(key, compiled)
        return compiled


def _key(linear: nn.Linear) -> tuple[Any, ...]:
    """What layers have in common that can share a program."""
    return linear.in_features, linear.out_features, linear.bias is None, linear.weight.dtype, linear.weight.device
