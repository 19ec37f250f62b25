"""What somebody puts in the place of a library's function counts by what it does, whatever it is wrapped in and says that it is."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.runtime.held import held_by
from agentcompile_core.runtime.module_changes import AsBound
from agentcompile_core.stages.capture import libraries
from agentcompile_core.stages.capture.identity import identity


def written(body: str, **scope: Any) -> Any:
    """``relu`` as of a prompt or a program from standard input, which is no file."""
    exec(compile(f"def relu(x, inplace=False):\n    return {body}\n", "<stdin>", "exec"), scope)
    return scope["relu"]


def cached(body: str) -> Any:
    return functools.lru_cache(written(body, __name__="__main__"))


def closed_over(body: str) -> Any:
    """As a decorator of an installed package leaves it that tells nobody what it is around."""
    inner = written(body, __name__="__main__")
    text = "def made(inner):\n    def relu(x, inplace=False):\n        return inner(x)\n    return relu\n"
    exec(compile(text, "/env/site-packages/acme/of.py", "exec"), scope := {"__name__": "acme.of"})
    return scope["made"](inner)


def of_a_class_without_a_module(body: str) -> Any:
    exec(f"class Relu:\n    def __call__(self, x, inplace=False):\n        return {body}\n", scope := {})
    return scope["Relu"]()


class Owner:
    """Has a method that takes the place of a function."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def relu(self, x: Tensor, inplace: bool = False) -> Tensor:
        return x * self.factor


WAYS: dict[str, Callable[[str], Any]] = {
    "as it is": lambda body: written(body, __name__="__main__"),
    "decorated by torch": lambda body: torch.no_grad()(written(body, __name__="__main__")),
    "decorated by an installed package": closed_over,
    "a wrapper of the original": lambda body: functools.wraps(F.relu)(written(body, __name__="__main__")),
    "a wrapper of the original, of code without a module": lambda body: functools.wraps(F.relu)(written(body)),
    "cached": cached,
    "a partial call": lambda body: functools.partial(written(body, __name__="__main__"), inplace=False),
    "a partial call of its own kind": lambda body: functools.partial(lambda x, inplace, by: x * by, by=float(body[-1])),
    "a method": lambda body: Owner(float(body[-1])).relu,
    "an object of a class without a module": of_a_class_without_a_module,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_stands_in_the_place_of_a_function_is_looked_into(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {identity(LoadedModel(module=nn.ReLU(), name="m")).capture}
    for body in ("x * 2", "x * 3"):
        monkeypatch.setattr(F, "relu", WAYS[way](body))
        found.add(identity(LoadedModel(module=nn.ReLU(), name="m")).capture)
    assert len(found) == 3


@pytest.mark.parametrize("made", ["a class", "a class within another"])
def test_a_class_of_code_that_names_no_module_is_ones_own(made: str) -> None:
    """It says that it is of ``builtins``."""
    text = ("from torch import nn\nclass Outer:\n class Holds(nn.Module):\n  sizes = [{0}]\n  def __init__(self):\n   super().__init__()\n"
            "   self.notes = {{'by': 2.0}}\n  def forward(self, x):\n   return x * self.sizes[0]\n")
    text = text if "within" in made else text.replace("class Outer:\n ", "").replace("\n ", "\n")
    found = set()
    for size in (2, 3):
        exec(text.format(size), scope := {})
        kind = scope["Outer"].Holds if "within" in made else scope["Holds"]
        assert kind.__module__ == "builtins" and libraries.is_foreign(kind)
        assert [one.path for one in held_by(kind())] == ["notes"]
        found.add(identity(LoadedModel(module=kind(), name="m")).capture)
    assert len(found) == 2


@pytest.mark.parametrize("chosen", ["acme", "sdpa"])
@pytest.mark.parametrize("table", [transformers.AttentionInterface, transformers.AttentionMaskInterface])
def test_attention_and_masks_that_somebody_registered_count(table: Any, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(one, "_global_mapping", {**one._global_mapping, "acme": one._global_mapping["sdpa"]})
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
                                      attn_implementation=chosen)
    model = LoadedModel(module=transformers.LlamaForCausalLM(config), name="m")
    found = [identity(model)]
    for body in ("x * 2", "x * 3"):
        table.register(chosen, functools.wraps(table()["sdpa"])(written(body, __name__="__main__")))
        found.append(identity(model))
    assert len({one.capture for one in found}) == 3 and not any(one.unstable for one in found)


def test_named_tuples_of_ones_own_have_a_stable_form() -> None:
    found = []
    for names in ("first second", "second first", "first second"):
        scope: dict[str, Any] = {"Pair": collections.namedtuple("Pair", names), "__name__": "acme"}
        exec("def pair(x):\n    return Pair(x, x + 1).first", scope)
        found.append(identity(LoadedModel(module=Calls(scope["pair"]), name="m")))
    assert found[0] == found[2] != found[1] and not found[0].unstable


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def test_functions_without_a_module_are_watched_like_others() -> None:
    exec("def helper(x):\n    return x\ndef forward(self, x):\n    return helper(x)", scope := {})
    kind = type("Part", (nn.Module,), {"forward": scope["forward"]})
    bound = AsBound(nn.Sequential(kind()), with_mode=False)
    assert scope["forward"].__module__ is None and bound.change() == ""
    scope["helper"] = lambda x: x + 1
    assert bound.change() == "helper was replaced by another function"
