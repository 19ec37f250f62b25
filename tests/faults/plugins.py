"""Plugins: whatever their code does, they are named, the others go on, and the program is right."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from test_plugins import BROKEN

from agentcompile_core.errors import Reject
from agentcompile_core.ir.candidate import StepSource
from agentcompile_core.ir.plan import Parameter, Schedule, ScheduleSpace
from agentcompile_core.plugin import catalog as catalogs
from agentcompile_core.plugin import failures
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import GROUP, hookimpl
from agentcompile_core.plugin.interfaces import RegionRule
from agentcompile_core.report import plugins_text
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles

from . import cheap
from .registry import add, fault
from .seen import right, told

AREA, KEPT = "plugins", "the other plugins served, the program is right"
SENTENCE = "the table of shapes has no row for this one. " * 12 + "Write the row and install the plugin again."


def _module(name: str) -> Any:
    text, cause, words = BROKEN[name]

    def run(folder: Path) -> str:
        (folder / f"fault_{name}.py").write_text(text)
        info = folder / f"fault_{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fault-{name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = fault_{name}\n")
        sys.path.insert(0, str(folder))
        try:
            with cheap.lenient():
                catalog = load_catalog(strict=False)
        finally:
            sys.path.remove(str(folder))
            sys.modules.pop(f"fault_{name}", None)
        said = [f for f in catalog.failures if f.plugin.startswith(name)]
        assert said and said[0].cause is cause and words in said[0].message, [str(f) for f in catalog.failures]
        assert name in plugins_text(catalog) and catalog.template_families, "the others are there"
        assert any(one["plugin"].startswith(name) for one in failures.document(catalog.failures))
        return str(said[0])

    return run


MODULES = {"broken_import": "imports what is not there", "exits": "ends the process while it is imported", "syntax": "is no Python",
           "wrong_type": "offers a text as an advisor", "twice": "offers one name twice", "bad_name": "offers a name with a blank",
           "bad_version": "has a text as its version", "unknown_hook": "implements a hook that does not exist",
           "wrong_arguments": "implements a hook with other arguments", "raises": "raises in a hook",
           "raises_late": "raises in the middle of its offers", "nothing": "offers nothing at all, not even a list"}
for _name, _what in MODULES.items():
    add(AREA, f"a plugin that {_what}", f"an entry point whose module {_what}", _module(_name), "every other plugin was loaded")


class Broken(doubles.FakeFamily):
    """A second family, broken in one of its methods."""

    name = "broken"
    behaviours = ("honest",)

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.__dict__.update(methods)


def _raise(*_: Any) -> Any:
    raise KeyError(SENTENCE)


def _forever(*_: Any) -> Any:
    while True:
        pass


def _many(match: Any, target: Any) -> ScheduleSpace:
    points = tuple(Schedule({"behave": "honest", "us": float(i)}) for i in range(1000))
    return ScheduleSpace(parameters=(Parameter(name="us", values=tuple(float(i) for i in range(1000))),), points=points)


def _endless(match: Any, target: Any) -> Any:
    raise RecursionError("maximum recursion depth exceeded")


def _unknown_operand(match: Any, schedule: Any, target: Any) -> StepSource:
    source = doubles.fake_source("honest", 5.0, match.need("out").spec.numel)
    launch = source.launches[0]
    return evolve(source, digest="other", launches=(evolve(launch, arguments=(evolve(launch.arguments[0], name="secret"),)),))


FAMILIES: dict[str, tuple[dict[str, Callable[..., Any]], str, str]] = {
    "accepts raises": ({"accepts": _raise}, SENTENCE, "accepts() raises for every match, with a message of 600 characters"),
    "accepts answers a number": ({"accepts": lambda m, t: 7}, "broken", "accepts() returns 7"),
    "space raises": ({"space": _raise}, SENTENCE, "space() raises"),
    "space has a thousand points": ({"space": _many}, "broken", "space() returns 1000 points"),
    "space is nothing": ({"space": lambda m, t: None}, "broken", "space() returns None"),
    "lower raises": ({"lower": _raise}, SENTENCE, "lower() raises"),
    "lower answers a text": ({"lower": lambda m, s, t: "void kernel()"}, "broken", "lower() returns a text"),
    "lower names an operand that is not there": ({"lower": _unknown_operand}, "broken", "lower() launches with an unknown operand"),
    "accepts ends the process": ({"accepts": lambda m, t: sys.exit(3)}, "SystemExit", "accepts() calls sys.exit"),
    "accepts recurses": ({"accepts": _endless}, "RecursionError", "accepts() recurses without end"),
    "accepts never returns": ({"accepts": _forever}, "did not come back within", "accepts() loops"),
    "space never returns": ({"space": _forever}, "did not come back within", "space() loops"),
    "lower never returns": ({"lower": _forever}, "did not come back within", "lower() loops"),
}


def _beside(folder: Path, **offers: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogs, "CALL_S", 1.5)
        return _served(folder, **offers)


def _served(folder: Path, **offers: Any) -> Any:
    made = cheap.compiled(cheap.module(folder), Store(folder / "store"), workers=cheap.HERE, family=cheap.Family("honest"),
                          extra=(("acme", cheap.offers(**offers)),), budget_plans=12)
    right(made)
    assert made.statistics["selected"] == 1
    return made


def _family(methods: dict[str, Callable[..., Any]], words: str) -> Any:
    return lambda folder: told(_beside(folder, template_families=Broken(**methods)), words, folder)


for _name, (_methods, _words, _injected) in FAMILIES.items():
    add(AREA, f"a family whose {_name}", _injected, _family(_methods, _words), KEPT)


class Rule(RegionRule):
    """A rule that finds what a function returns."""

    name = "broken"

    def __init__(self, find: Callable[..., Any]) -> None:
        self._find = find

    def find(self, graph: Any, target: Any) -> Any:
        """What the function says."""
        return self._find(graph, target)


def _match(**changes: Any) -> Callable[..., Any]:
    def find(graph: Any, target: Any) -> Any:
        match, _ = doubles.fake_match(100)
        (node,) = [n for n in graph.nodes if n.kind == "add"][:1]
        values = (*node.inputs, *node.outputs)
        operands = tuple(evolve(o, values=(v,)) for o, v in zip(match.operands, values))
        return [evolve(match, nodes=(node.name,), operands=operands, **changes)]

    return find


RULES: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (_raise, SENTENCE), "finds a text": (lambda g, t: ["everything"], "acme/broken"),
    "finds nodes that are not there": (lambda g, t: [evolve(doubles.fake_match(100)[0], nodes=("ghost",))], "acme/broken"),
    "finds a kind that nobody offers": (_match(kind="magic"), "acme/broken"),
    "leaves an attribute out": (_match(attributes=()), "acme/broken"),
    "raises in the middle": (lambda g, t: (1 / 0 for _ in range(1)), "ZeroDivisionError"),
    "never returns": (_forever, "did not come back within"),
    "finds without end": (lambda g, t: iter(object, None), "gave more than"),
}
for _name, (_find, _words) in RULES.items():
    add(AREA, f"a rule that {_name}", f"find() {_name}",
        lambda folder, find=_find, words=_words: told(_beside(folder, region_rules=Rule(find)), words, folder), KEPT)


@fault(AREA, "a listener raises on every event", KEPT)
def _a_listener_that_raises(folder: Path) -> str:
    @hookimpl
    def agentcompile_stage_finished(stage: str) -> None:
        raise OSError("no space for my log")

    made = cheap.compiled(cheap.module(folder), Store(folder / "store"), workers=cheap.HERE,
                          extra=(("listener", SimpleNamespace(agentcompile_stage_finished=agentcompile_stage_finished)),))
    right(made)
    return told(made, "no space for my log")


@fault(AREA, "a family refuses politely", KEPT)
def _a_family_that_refuses(folder: Path) -> str:
    made = _beside(folder, template_families=Broken(accepts=lambda m, t: Reject("only on Tuesdays")))
    (tried,) = [t for t in made.compilation.tried if t.refused == "only on Tuesdays"]
    assert not made.compilation.failures
    return f"not tried: {tried.implementation}: {tried.refused}"
