"""A helper that changed is seen however a module's code comes to it, or the module has no identity at all."""

import collections
import functools
import operator
import sys
import time
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from agentcompile_core.stages.capture.identity import Identity, identity

HELPERS = """
def clip(x): return x.clamp(-LIMIT, LIMIT)
class Clip:
    def go(self, x): return x.clamp(-LIMIT, LIMIT)
LIMIT, TABLE, OBJECT = {limit}, {{"clip": clip}}, Clip()
limit, kPair, NUMBERS = {limit}.0, (1, {limit}), {{"limit": [{limit}]}}
import functools, torch
@torch.no_grad()
def without_gradients(x): return x.clamp(max={limit})
@torch.autocast("cpu", enabled=False)
def as_it_is(x): return x.clamp(max={limit})
@functools.lru_cache
def remembered(): return {limit}
bound = functools.partial(torch.clamp, max={limit})
"""
PICKER = "def pick(owner, name): return getattr(owner, name)\n"
MAIN = """
import torch
{imports}
class Model(torch.nn.Module):
    def forward(self, x):
        {body}
"""
MATCH = "\n        match helpers:\n            case object({}): return {}"
SEEN = {  # how code comes to the helper: imports, body; of these the digest tells
    "an attribute": ("import helpers", "return helpers.clip(x)"),
    "getattr": ("import helpers", "return getattr(helpers, 'clip')(x)"),
    "a dict of functions": ("import helpers", "return helpers.TABLE['clip'](x)"),
    "an object": ("import helpers", "return helpers.OBJECT.go(x)"),
    "a number": ("import helpers", "return x.clamp(-helpers.LIMIT, helpers.LIMIT)"),
    "an import as it runs": ("", "import helpers as h; return h.clip(x)"),
    "a name as it runs": ("", "from helpers import clip; return clip(x)"),
    "its namespace": ("import helpers", "return vars(helpers)['clip'](x)"),
    "its __dict__": ("import helpers", "return helpers.__dict__['clip'](x)"),
    "attrgetter": ("import helpers, operator", "return operator.attrgetter('clip')(helpers)(x)"),
    "methodcaller": ("import helpers, operator", "return operator.methodcaller('clip', x)(helpers)"),
    "getattr elsewhere": ("import helpers\nfrom picker import pick", "return pick(helpers, 'clip')(x)"),
    "getattr_static": ("import helpers, inspect", "return inspect.getattr_static(helpers, 'clip')(x)"),
    "its members": ("import helpers, inspect", "return dict(inspect.getmembers(helpers))['clip'](x)"),
    "object's own": ("import helpers", "return object.__getattribute__(helpers, 'clip')(x)"),
    "a module's own": ("import helpers, types", "return types.ModuleType.__getattribute__(helpers, 'clip')(x)"),
    "a format": ("import helpers", "return x.clamp(max=float('{0.LIMIT}'.format(helpers)))"),
    "a format of a map": ("import helpers", "return x.clamp(max=float('{h.LIMIT}'.format_map({'h': helpers})))"),
    "a number in lower case by a format": ("import helpers", "return x.clamp(max=float('{0.limit}'.format(helpers)))"),
    "a number in lower case by a pattern": ("import helpers", MATCH.format("limit=n", "x.clamp(max=n)")),
    "a number in lower case": ("import helpers", "return x.clamp(max=vars(helpers)['limit'])"),
    "a tuple by a format": ("import helpers", "return x.clamp(max=float('{0.kPair[1]}'.format(helpers)))"),
    "a list in a dict": ("import helpers", "return x.clamp(max=vars(helpers)['NUMBERS']['limit'][0])"),
    "behind no_grad": ("import helpers", "return vars(helpers)['without_gradients'](x)"),
    "behind no_grad by a pattern": ("import helpers", MATCH.format("without_gradients=f", "f(x)")),
    "behind autocast": ("import helpers, operator", "return operator.attrgetter('as_it_is')(helpers)(x)"),
    "behind a cache by a pattern": ("import helpers", MATCH.format("remembered=f", "x.clamp(max=f())")),
    "a partial by a pattern": ("import helpers", MATCH.format("bound=f", "f(x)")),
    "a pattern": ("import helpers", MATCH.format("clip=f", "f(x)")),
}
UNSTABLE = {
    "sys.modules": ("import sys", "return sys.modules['helpers'].clip(x)"),
    "get of sys.modules": ("import sys", "return sys.modules.get('helpers').clip(x)"),
    "sys.modules by another name": ("from sys import modules as known", "return known['helpers'].clip(x)"),
    "a search through them": ("import sys", "return [m for m in sys.modules.values() if m.__name__ == 'helpers'][0].clip(x)"),
    "import_module": ("import importlib", "return importlib.import_module('helpers').clip(x)"),
    "import_module by another name": ("from importlib import import_module as bring", "return bring('helpers').clip(x)"),
    "resolve_name": ("import pkgutil", "return pkgutil.resolve_name('helpers:clip')(x)"),
    "globals by another name": ("import helpers\nnames = globals", "return names()['helpers'].clip(x)"),
    "eval by another name": ("import helpers\nrun = eval", "return run('h.clip(x)', {'h': helpers, 'x': x})"),
    "a function's globals": ("import helpers\ndef other(): pass", "return other.__globals__['helpers'].clip(x)"),
    "a frame": ("import helpers, sys", "return sys._getframe().f_globals['helpers'].clip(x)"),
    "the current frame": ("import helpers, inspect", "return inspect.currentframe().f_globals['helpers'].clip(x)"),
}


@pytest.fixture
def model_of() -> Iterator[Callable[[str, str, int], nn.Module]]:
    """Makes a model of its imports, its body and the helper's limit, in modules that are imported anew."""
    known = dict(sys.modules)

    def made(imports: str, body: str, limit: int) -> nn.Module:
        texts = (("picker", PICKER), ("helpers", HELPERS.format(limit=limit)), ("mainmod", MAIN.format(imports=imports, body=body)))
        for name, text in texts:
            module = types.ModuleType(name)
            module.__file__ = f"/somewhere/{name}.py"
            sys.modules[name] = module
            exec(compile(text, module.__file__, "exec"), vars(module))
        return sys.modules["mainmod"].Model()

    yield made
    for name in ("picker", "helpers", "mainmod"):
        sys.modules.pop(name, None)
    sys.modules.update(known)


def identity_of(module: nn.Module) -> Identity:
    given: Any = SimpleNamespace(module=module, example_inputs=(torch.ones(2, 4),), example_keywords={}, path=None, name="m")
    return identity(given)


@pytest.mark.parametrize("how", SEEN)
def test_a_helper_that_changed_is_another_identity(model_of: Callable[..., nn.Module], how: str) -> None:
    hundred, again, seven = (identity_of(model_of(*SEEN[how], limit)) for limit in (100, 100, 7))
    x = 50.0 * torch.ones(2, 4)
    assert not torch.equal(model_of(*SEEN[how], 100)(x), model_of(*SEEN[how], 7)(x))
    assert hundred.capture == again.capture != seven.capture and not hundred.unstable


@pytest.mark.parametrize("how", UNSTABLE)
def test_code_that_finds_modules_by_text_has_no_identity(model_of: Callable[..., nn.Module], how: str) -> None:
    assert identity_of(model_of(*UNSTABLE[how], 100)).unstable


def test_what_a_helper_holds_beside_does_not_matter_where_nobody_reads_it(model_of: Callable[..., nn.Module]) -> None:
    """An open file, a generator: no model loses its identity for what its code does not name; for what it names it does."""
    model = model_of("import helpers", "return helpers.clip(x)", 7)
    vars(sys.modules["helpers"])["places"] = iter(())
    assert not identity_of(model).unstable
    model = model_of("import helpers", "return helpers.clip(x) + len(list(helpers.places))", 7)
    vars(sys.modules["helpers"])["places"] = iter(())
    assert identity_of(model).unstable


class Private:
    __slots__ = ("__limit",)

    def __init__(self, limit: int) -> None:
        self.__limit = limit

    def get(self) -> int:
        return self.__limit


def dispatched(limit: int) -> Any:
    @functools.singledispatch
    def found(_: object) -> int:
        return 3

    found.register(int, lambda _: limit)
    return found


STATES: dict[str, Callable[[int], Any]] = {
    "slots of its own": Private,
    "what a dict makes": lambda limit: collections.defaultdict(lambda: limit),
    "an itemgetter": operator.itemgetter,
    "an attrgetter": lambda limit: operator.attrgetter(f"limit{limit}"),
    "a methodcaller": lambda limit: operator.methodcaller("clamp", -limit, limit),
    "the length of a deque": lambda limit: collections.deque([1], maxlen=limit),
    "functions by type": dispatched,
    "a class's own class": lambda limit: type("Meta", (type,), {"limit": limit})("Made", (), {}),
}


@pytest.mark.parametrize("what", STATES)
def test_the_state_of_objects_is_part_of_an_identity(what: str) -> None:
    def holding(limit: int) -> nn.Module:
        module = nn.ReLU()
        module.held = STATES[what](limit)
        return module

    hundred, again, seven = (identity_of(holding(limit)) for limit in (100, 100, 7))
    assert hundred.capture == again.capture != seven.capture and not hundred.unstable


def test_helpers_that_know_each_other_are_walked_once() -> None:
    """Also what is digested in passing: of a dozen modules that all hold all others there are more ways than time."""
    names = [f"ring{i}" for i in range(12)]
    try:
        for at, name in enumerate(names):
            module = sys.modules[name] = types.ModuleType(name)
            module.__file__ = f"/somewhere/{name}.py"
            own = "".join(f"def {other}_too(x): return {other}.f(x) + {name}.LIMIT{i}\n" for i, other in enumerate(names))
            exec(compile(f"LIMIT = {at}\ndef f(x): return x.clamp(-1, 1)\n{own}", module.__file__, "exec"), vars(module))
            vars(module)["open_file"] = iter(())  # has no stable form, and is not read
        for name in names:
            vars(sys.modules[name]).update({other: sys.modules[other] for other in names})
        text = "import ring0\ndef f(x): return ring0.f(x) + ring0.ring1.f(x)"
        scope: dict[str, Any] = {"__name__": "outer"}
        exec(compile(text, "/somewhere/outer.py", "exec"), scope)
        holder, began = nn.ReLU(), time.monotonic()
        holder.held = scope["f"]
        assert not identity_of(holder).unstable and time.monotonic() - began < 5.0
    finally:
        for name in names:
            sys.modules.pop(name, None)


def test_what_transformers_leaves_in_torchs_module_is_no_other_identity() -> None:
    """It is put there as any model is given random weights: a module that was compiled before is the same one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    put = vars(nn.Module).get("smart_apply")
    if put is not None:
        del nn.Module.smart_apply
    before = identity_of(nn.ReLU())
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    LlamaForCausalLM(config).init_weights()
    if "smart_apply" not in vars(nn.Module):
        pytest.skip("this transformers puts nothing there")
    assert identity_of(nn.ReLU()) == before


def ring(names: list[str], texts: dict[str, str], place: str = "/somewhere") -> nn.Module:
    """A module that calls ``f`` of the first of some modules, made of their texts."""
    for name in names:
        module = sys.modules[name] = types.ModuleType(name)
        module.__file__ = f"{place}/{name}.py"
    for name in names:
        exec(compile(texts[name], f"{place}/{name}.py", "exec"), vars(sys.modules[name]))
    scope: dict[str, Any] = {"__name__": "outer"}
    exec(compile(f"import {names[0]}\ndef f(x): return {names[0]}.f(x)", "/somewhere/outer.py", "exec"), scope)
    holder = nn.ReLU()
    holder.held = scope["f"]
    return holder


@pytest.fixture
def gone() -> Iterator[None]:
    known = dict(sys.modules)
    yield
    for name in sys.modules.keys() - known.keys():
        del sys.modules[name]


def test_a_module_that_raises_where_it_is_looked_at_stops_no_compile(gone: None) -> None:
    text = "def __getattr__(name): raise RuntimeError('not configured: ' + name)\ndef f(x): return x\n"
    raising = "class Raising:\n    def __getattr__(self, name): raise RuntimeError(name)\n    __slots__ = ()\nRAISING = Raising()\n"
    model = ring(["lazy", "holds"], {"lazy": "import holds\n" + text, "holds": text + raising})
    for name in ("lazy", "holds"):
        del vars(sys.modules[name])["__file__"]
    assert identity_of(model) == identity_of(model)


@pytest.mark.parametrize("depth", [5, 150, 298])
def test_helpers_too_deep_to_be_read_are_seen_or_told(gone: None, depth: int) -> None:
    names = [f"deep{i}" for i in range(300)]
    found = []
    for limit in (1, 7):
        own = "import deep{} as next\ndef f(x): return x\ndef g(x): return next.g(x) + {}\n"
        texts = {name: own.format((i + 1) % 300, limit if i == depth else 0) for i, name in enumerate(names)}
        found.append(identity_of(ring(names, texts)))
    assert found[0].capture != found[1].capture or found[0].unstable


def test_helpers_of_an_installed_package_are_its_own_modules_too(gone: None) -> None:
    """A package of the user's that is installed is read as one that is not; what it takes from another one is that one's."""
    found = []
    for limit in (1, 7):
        texts = {"first": "import second\ndef f(x): return x\n", "second": f"def g(x): return x.clamp(max={limit})\n"}
        found.append(identity_of(ring(["first", "second"], texts, "/usr/lib/python3/site-packages/acme")))
    assert found[0].capture != found[1].capture and not found[0].unstable
