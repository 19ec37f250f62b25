"""The layers of a language model, and a twin of it that has only the first ones."""

import copy
import re
from typing import Any

from attrs import evolve, frozen
from torch import nn

from ...ir.graph import KVSpec
from .describe import text_config
from .states import Held

MOST_PERIOD = 8  # layers after which a model repeats itself
_PLAIN = (bool, int, float, str, type(None))


@frozen(kw_only=True)
class Depth:
    """A model of ``deep`` layers, of which each is like the one ``period`` before it from the second ``period`` of the ``shallow`` on.

    ``paths``: of the lists that hold the layers. It says what looks alike; whether it is so, no one relies on.
    """

    deep: int
    shallow: int
    period: int
    paths: tuple[str, ...]

    @property
    def repeats(self) -> int:
        """How often a period is behind the shallow model's last one."""
        return (self.deep - self.shallow) // self.period

    def layer_of(self, path: str) -> int:
        """The layer to which the module at ``path`` belongs, -1 where to none."""
        for one in self.paths:
            found = re.match(rf"{re.escape(one)}\.(\d+)(?:\.|$)", path)
            if found:
                return int(found.group(1))
        return -1


def depth_of(model: nn.Module, kv: KVSpec, held: Held) -> Depth | None:
    """How ``model`` repeats itself; None where it does not, or too late for a shallow model to be much less work."""
    deep = kv.layers if held.attending is None else getattr(text_config(model), "num_hidden_layers", 0)
    lists: dict[str, nn.ModuleList] = {}
    for path, part in model.named_modules():
        if type(part) is nn.ModuleList and len(part) == deep and not any(path.startswith(f"{outer}.") for outer in lists):
            lists[path] = part
    if deep < 2 or not lists:
        return None
    looks = _looks(list(lists.values()), text_config(model), deep)
    for period in range(1, min(MOST_PERIOD, deep // 2) + 1):
        unlike = [i for i in range(deep - period) if looks[i] != looks[i + period]]
        shallow = (unlike[-1] + 1 if unlike else 0) + 2 * period
        shallow += (deep - shallow) % period
        if pays(deep, shallow):
            return Depth(deep=deep, shallow=shallow, period=period, paths=tuple(lists))
    return None


def pays(deep: int, shallow: int) -> bool:
    """Whether a trace of ``shallow`` layers and two runs of ``deep`` ones take clearly less time than a trace of these.

    A run takes a sixth of a trace for each layer; what comes to nothing was a trace of the shallow ones for one graph.
    """
    return 3 * deep >= 4 * shallow + 12


def first_layers(model: nn.Module, depth: Depth) -> nn.Module:
    """A twin of ``model`` without the layers behind the shallow ones. It shares every module that holds no list of layers.

    Nothing of ``model`` is changed, not for a moment: another thread may run it.
    """
    return _twin(model, "", depth)


def _twin(part: nn.Module, path: str, depth: Depth) -> nn.Module:
    made = copy.copy(part)
    made.__dict__["_modules"] = dict(part._modules)
    for name, child in part._modules.items():
        inner = f"{path}.{name}" if path else name
        if child is not None and inner in depth.paths:
            made._modules[name] = nn.ModuleList(list(child.children())[: depth.shallow])
        elif child is not None and any(one.startswith(f"{inner}.") for one in depth.paths):
            made._modules[name] = _twin(child, inner, depth)
    return made


def of_first_layers(kv: KVSpec, held: Held, count: int) -> tuple[KVSpec, Held]:
    """What the cache of the first ``count`` layers holds."""
    if held.attending is None:
        return first_of(kv, count), held
    attending = tuple(layer for layer in held.attending if layer < count)
    return first_of(kv, len(attending)), evolve(held, attending=attending, states=tuple(s for s in held.states if s.layer < count))


def first_of(kv: KVSpec, count: int) -> KVSpec:
    """The cache of the first ``count`` layers that have one."""
    return evolve(kv, layers=count, others=tuple(one for one in kv.others if one.layer < count))


def _looks(lists: list[nn.ModuleList], config: Any, deep: int) -> list[dict[tuple[str, ...], Any]]:
    """What can be seen of each layer from outside, without what counts the layers."""
    looks: list[dict[tuple[str, ...], Any]] = [{} for _ in range(deep)]
    for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
        if isinstance(value, (list, tuple)) and len(value) == deep:
            for look, item in zip(looks, value, strict=True):
                look["config", name] = repr(item)
    for number, one in enumerate(lists):
        for look, layer in zip(looks, one, strict=True):
            for path, part in layer.named_modules():
                look.update(_look(part, (str(number), path)))
    seen: dict[tuple[str, ...], list[bool]] = {}
    for index, look in enumerate(looks):
        for key, value in look.items():
            seen.setdefault(key, []).append(value == repr(index))
    return [{key: value for key, value in look.items() if not all(seen[key])} for look in looks]


def _look(part: nn.Module, at: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {(*at, ""): type(part)}
    found.update({(*at, name): repr(value) for name, value in vars(part).items() if type(value) in _PLAIN})
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        found[(*at, name)] = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    return found
