"""docs/hooks.md says exactly what hookspecs.py and interfaces.py say: every hook, every method, every argument."""

import inspect
import re
from pathlib import Path

import pytest

from agentcompile_core.plugin import hookspecs, interfaces
from agentcompile_core.plugin.catalog import EVENTS, OFFERS

TEXT = (Path(__file__).parent.parent / "docs" / "hooks.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)\([^)]*\)`\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S))
HEADINGS = re.findall(r"^### `(\w+)\(([^)]*)\)`$", TEXT, re.M)
HOOKS = {name: function for name, function in vars(hookspecs).items() if name.startswith("agentcompile_")}


def arguments(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def documented(section: str) -> dict[str, list[str]]:
    """Methods of a section as ``name(arguments)`` in code spans that open a bullet or follow a role."""
    spans = re.findall(r"`(\w+)\(([^)`]*)\)` →", section)
    return {name: [a.strip() for a in given.split(",") if a.strip()] for name, given in spans}


def test_every_hook_is_documented_once_in_the_order_of_the_run() -> None:
    assert [name for name, _ in HEADINGS] == list(HOOKS)
    assert set(HOOKS) == {*OFFERS, *EVENTS}, "the loader and the hookspecs know the same hooks"


@pytest.mark.parametrize("name", HOOKS)
def test_arguments_are_exact(name: str) -> None:
    given = dict(HEADINGS)[name]
    assert [a.strip() for a in given.split(",") if a.strip()] == arguments(HOOKS[name])
    if name in EVENTS:
        for argument in arguments(HOOKS[name]):
            kind = inspect.signature(HOOKS[name]).parameters[argument].annotation
            assert f"`{argument}: {kind if isinstance(kind, str) else getattr(kind, '__name__', kind)}".split("[")[0] in SECTIONS[name]


def abstract(kind: type) -> frozenset[str]:
    """What a plugin must write; nothing of a plain value."""
    return getattr(kind, "__abstractmethods__", frozenset())


def classes_of(name: str) -> list[type]:
    base = OFFERS[name]
    return [interfaces.KVCacheRuntime, interfaces.DecodeRuntime] if base is interfaces.RuntimeIntegration else [base]


@pytest.mark.parametrize("name", OFFERS)
def test_methods_of_what_a_hook_returns_are_exact(name: str) -> None:
    assert f"Returns `{OFFERS[name].__name__}` objects" in SECTIONS[name]
    assert inspect.signature(HOOKS[name]).parameters == {}
    methods = {method: arguments(getattr(kind, method)) for kind in classes_of(name) for method in sorted(abstract(kind))}
    assert documented(SECTIONS[name]) == methods


@pytest.mark.parametrize("name", OFFERS)
def test_methods_with_a_default_are_named_with_their_arguments(name: str) -> None:
    for kind in classes_of(name):
        own = {method: function for method, function in vars(kind).items() if inspect.isfunction(function) and not method.startswith("_")}
        optional = [f"`{method}({', '.join(arguments(own[method]))})`" for method in own if method not in abstract(kind)]
        assert [text for text in optional if text not in " ".join(SECTIONS[name].split())] == []


@pytest.mark.parametrize("name", OFFERS)
def test_class_attributes_that_a_plugin_sets_are_named(name: str) -> None:
    for kind in classes_of(name):
        own = [a for a in vars(kind).get("__annotations__", {}) if a not in ("name", "version")]
        assert not [a for a in own if f"`{a}`" not in SECTIONS[name] and f"role `{getattr(kind, a, '')}`" not in SECTIONS[name]]


def test_the_api_version_and_group_are_those_of_the_code() -> None:
    assert f"`{hookspecs.GROUP}`" in TEXT and f"hook API {hookspecs.API[0]}.{hookspecs.API[1]}" in TEXT
    assert f"AGENTCOMPILE_API = {hookspecs.API}" in TEXT


def test_hook_arguments_have_no_defaults() -> None:
    """pluggy passes defaults to nobody: a hook argument with one is a trap."""
    for function in HOOKS.values():
        assert all(p.default is inspect.Parameter.empty for p in inspect.signature(function).parameters.values())
