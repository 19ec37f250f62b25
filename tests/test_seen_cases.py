"""What a new user and a plugin author once ran into, through the command line: each of these failed at commit fc56ff7.

Plugins are small ones (seen_plugins.py) on the doubles that ship with the core; they take their names from wherever the core has
them, so that these tests can be run at older commits too.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from addition_module import MODULE
from seen_plugins import ADDING, CAPTURING, FAMILY, HARDWARE, LONG, NAMES, SAID, UNTIMED

from agentcompile_core.processes import fork_server

ROOT = Path(__file__).parents[1]
class Place:
    """A project's folder, and beside it one in which plugins are installed."""

    def __init__(self, folder: Path, cli: Any, patch: pytest.MonkeyPatch) -> None:
        self.project, self.site, self._cli, self._patch = folder / "project", folder / "site", cli, patch
        self.project.mkdir()
        self.site.mkdir()
        self.model = self.project / "module.py"
        self.model.write_text(MODULE)
        patch.chdir(self.project)
        patch.syspath_prepend(str(self.site))
        for name, value in {"PYTHONPATH": str(self.site), "AGENTCOMPILE_CACHE_DIR": str(folder / "cache"), "AGENTCOMPILE_STRICT": "0",
                            "AGENTCOMPILE_CONFIG": "", "PYTHONDONTWRITEBYTECODE": "1"}.items():
            patch.setenv(name, value)
        self.installed: list[str] = []

    def install(self, name: str, text: str) -> None:
        info = self.site / f"{name}-1.dist-info"
        info.mkdir()
        (self.site / f"{name}.py").write_text(NAMES + text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[agentcompile.v1]\n{name} = {name}\n")
        self.installed.append(name)
        self.only(*self.installed, "transformers_rules", "cuda")
        importlib.invalidate_caches()

    def only(self, *names: str) -> None:
        self._patch.setenv("AGENTCOMPILE_PLUGINS", ",".join(names))

    def run(self, *arguments: object) -> str:
        code, out, err = self._cli(*arguments)
        assert code == 0, err[-2000:]
        return out

    def compile(self, *arguments: object) -> dict[str, Any]:
        return json.loads(self.run("compile", "module.py", "--device", "cpu", "--rounds", 1, "--json", *arguments))

    def uninstall(self) -> None:
        for name in self.installed:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, cli: Any) -> Iterator[Any]:
    """``places()``: a new Place, alone on the path."""
    patches: list[pytest.MonkeyPatch] = []
    made: list[Place] = []

    def close() -> None:
        for place, patch in zip(made, patches, strict=True):
            place.uninstall()
            patch.undo()
        made.clear()
        patches.clear()

    def make() -> Place:
        close()
        patches.append(pytest.MonkeyPatch())
        made.append(Place(tmp_path_factory.mktemp("place"), cli, patches[0]))
        return made[0]

    yield make
    close()


@pytest.fixture(scope="module")
def said(places: Any) -> dict[str, Any]:
    """What one compilation with several plugins printed, logged and explains."""
    place = places()
    place.install("said", SAID)
    (place.project / "agentcompile.toml").write_text('[plugin.said]\nfirst = ["said/slow"]\nmost_us = 6.0\n')
    before = children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_servers", {})
        patch.setattr(fork_server, "_keeping", 0)  # as in a program that compiles one model
        found = place.compile("--validators", "simple,strict", "--advisor", "told", "--log", "log.jsonl", "--out", "b.bundle", "--no-cache")
    left = children() - before
    log = [json.loads(line) for line in (place.project / "log.jsonl").read_text().splitlines()]
    return {"document": found, "log": log, "explain": place.run("explain", "b.bundle"), "left": left}


def children() -> set[str]:
    """Process ids of this process's children, as Linux lists them."""
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


def test_the_worker_has_ended_when_a_compile_has(said: dict[str, Any]) -> None:
    assert not said["left"], "it would keep the memory of the device"


def test_no_more_is_built_than_lowered(said: dict[str, Any]) -> None:
    found = said["document"]["statistics"]
    assert (found["candidates"], found["lowered"], found["built"]) == (3, 3, len(said["log"])) == (3, 3, 3)


def test_the_failure_of_a_plugin_is_said_whole(said: dict[str, Any]) -> None:
    assert LONG in said["explain"]
    assert any(LONG in failure["message"] for failure in said["document"]["failures"])


def test_explain_says_what_was_not_tried_and_why(said: dict[str, Any]) -> None:
    assert "it adds on Sundays only" in said["explain"]
    assert "its plugin failed" in said["explain"]


def test_a_validator_has_its_settings_in_the_worker(said: dict[str, Any]) -> None:
    assert {e["message"] for e in said["log"] if e["implementation"] == "said/slow"} == {"slower than 6.0 us"}


def test_an_advisor_has_its_settings(said: dict[str, Any]) -> None:
    assert said["log"][0]["implementation"] == "said/slow", "without them quick would be first"


def test_a_file_says_which_advisor_is_asked(places: Any, cli: Any) -> None:
    place = places()
    (place.project / "agentcompile.toml").write_text('advisor = "oracle"\n')
    code, _, err = cli("compile", "module.py", "--device", "cpu", "--no-cache", "--budget-plans", 1, "--budget-s", 0.01)
    assert code == 2 and "unknown advisor 'oracle'" in err


def test_a_family_that_was_installed_since_is_tried_on_a_warm_cache(places: Any) -> None:
    place = places()
    place.install("untimed", UNTIMED)
    place.compile("--validators", "simple", "--log", "cold.jsonl")
    place.install("late", FAMILY)
    place.compile("--validators", "simple", "--log", "warm.jsonl", "--out", "b.bundle")
    log = [json.loads(line) for line in (place.project / "warm.jsonl").read_text().splitlines()]
    assert "late/late" in {entry["implementation"] for entry in log}
    text = place.run("explain", "b.bundle")
    assert "untimed/first: 1 schedules of 1 matches: a rival served its nodes already, and nothing can be timed here" in text


def test_an_implementation_is_selected_bundled_and_bound_again(places: Any) -> None:
    import agentcompile_core
    from agentcompile_core.context import Config

    place = places()
    place.install("adding", ADDING)
    a, b = torch.randn(100), torch.randn(100)
    made = agentcompile_core.compile("module.py", device="cpu", run_on="emulation", config=Config(validators=("simple",), rounds=1))
    assert torch.equal(made(a, b), a + b)
    made.save("b.bundle")
    assert torch.equal(agentcompile_core.load("b.bundle", "module.py", device="cpu", run_on="emulation")(a, b), a + b)
    (step,) = json.loads(place.run("explain", "b.bundle", "--json"))["selections"][0]["steps"]
    assert (step["implementation"], step["origin"], step["version"]) == ("adding/add", "handwritten", 1)


def test_hardware_comes_from_outside_with_its_own_language(places: Any) -> None:
    import agentcompile_core

    place = places()
    place.install("acme", HARDWARE)
    found = place.compile("--target", "acme_one", "--validators", "simple", "--no-cache", "--out", "b.bundle")
    assert found["statistics"]["selected"] == 1 and "acme_one (acme-v1)" in place.run("explain", "b.bundle")
    assert [p.suffix for p in Path("b.bundle").rglob("*.*") if p.suffix in (".words", ".cu")] == [".words"]
    a, b = torch.randn(100), torch.randn(100)
    assert torch.equal(agentcompile_core.load("b.bundle", "module.py")(a, b), a + b)


def test_explain_does_not_say_that_no_alternative_was_faster_where_none_was_tried(places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core.worker import Worker

    def no_time(self: Any, entry: str, question: Any, **_: Any) -> Any:
        if "selections" not in question:  # to make ready
            return None
        selections = json.loads(json.dumps(question["selections"]))  # as from another process
        return {"selections": selections, "us": 5.0, "first_us": 5.0, "framework_us": 10.0, "tried": 0, "accepted": 0}

    place = places()
    monkeypatch.setenv("SEEN_PARENT", "1")
    monkeypatch.setattr(Worker, "call", no_time)
    place.install("capturing", CAPTURING)
    place.compile("--validators", "simple", "--no-cache", "--out", "b.bundle")
    text = place.run("explain", "b.bundle")
    assert "inside the captured chain" in text and "alternative was faster" not in text
    assert "none of its 1 alternatives was tried" in text


def test_region_rules_come_from_a_distribution_of_their_own(places: Any) -> None:
    place = places()
    place.only()
    document = json.loads(place.run("plugins", "--json"))
    assert [o for p in document["plugins"] for o in p["offers"] if o.startswith("RegionRule:")] == []


def test_shipped_plugins_use_implementations_and_settings(places: Any) -> None:
    place = places()
    offers = [o for p in json.loads(place.run("plugins", "--json"))["plugins"] for o in p["offers"]]
    assert [o for o in offers if o.startswith("Implementation:")] and [o for o in offers if o.startswith("Target:")]
    values = {v["key"] for v in json.loads(place.run("config", "--json"))["values"]}
    assert {"plugin.litellm.model", "plugin.replay.file", "advisor"} <= values


def test_few_modules_lie_at_the_root_of_the_core() -> None:
    assert len(list((ROOT / "agentcompile_core").glob("*.py"))) <= 9
