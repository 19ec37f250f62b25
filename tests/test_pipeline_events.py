"""A plugin that listens hears every stage with its counts, and every evaluated candidate."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults import cheap

import agentcompile_core as ac
from agentcompile_core.configuration import Config
from agentcompile_core.installation import install as installation
from agentcompile_core.ir.graph import DType
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.events import Captured, StageFinished, StageStarted
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import Backend
from agentcompile_core.store import Store

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
FEW = ("transformers_rules", "cuda", "elementwise", "argmax", "emulation", "numerics")  # every stage has work, and none much


def test_stages_and_candidates_are_announced_with_their_counts() -> None:
    stages: list[tuple[str, dict[str, int]]] = []
    candidates: list[object] = []

    @hookimpl
    def agentcompile_stage_finished(stage: str, seconds: float, facts: dict[str, int]) -> None:
        assert seconds >= 0.0
        stages.append((stage, facts))

    @hookimpl
    def agentcompile_candidate_finished(record: object) -> None:
        candidates.append(record)

    listener = SimpleNamespace(agentcompile_stage_finished=agentcompile_stage_finished,
                               agentcompile_candidate_finished=agentcompile_candidate_finished)
    catalog = load_catalog(only=FEW, extra=[("listener", listener)])
    compiled = ac.compile(str(TINY), dtype="float32", device="cpu", run_on="nothing", catalog=catalog,
                          store=Store(None), config=Config(budget_plans=2, budget_s=40.0, rounds=1))
    seen = dict(stages)
    assert list(seen) == ["analyze", "plan", "advise", "lower", "validate", "select", "build"]
    statistics = compiled.statistics
    assert seen["analyze"]["regions"] == statistics["regions"] and seen["analyze"]["merged_regions"] == statistics["merged_regions"]
    assert seen["plan"]["candidates"] == statistics["candidates"]
    assert seen["validate"]["records"] == len(candidates) > 0
    assert seen["select"]["steps"] == statistics["selected"]


def test_installing_is_a_stage_of_compile_and_of_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What binds, captures and compares is said and counted: a user waits for it."""
    install, seen = installation.install, list[object]()

    def slow(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.2)
        return install(*arguments, **more)

    monkeypatch.setattr(installation, "install", slow)
    model, store = cheap.module(tmp_path), Store(tmp_path / "store")
    made = cheap.compiled(model, store, workers=cheap.HERE, report=seen.append)
    cheap.loaded(made.save(tmp_path / "bundle"), model, store, workers=cheap.HERE, report=seen.append)
    begun = [event.stage for event in seen if isinstance(event, StageStarted)]
    ended = [event for event in seen if isinstance(event, StageFinished) and event.stage == "install"]
    assert begun.count("install") == 2 and all(event.seconds >= 0.2 and event.facts == {"programs": 1} for event in ended)
    seconds = made.statistics["seconds"]
    assert len(ended) == 2 and list(seconds)[-1] == "install" and seconds["install"] == ended[0].seconds


@pytest.mark.parametrize("raises", [False, True])
def test_a_backend_is_told_of_a_language_model_before_it_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    seen: list[object] = []

    def expect(self: object, dtype: DType) -> None:
        seen.append(dtype)
        if raises:
            raise ValueError("no room")

    monkeypatch.setattr(Backend, "expect", expect)
    cheap.compiled(cheap.module(tmp_path), Store(None), workers=cheap.HERE)
    assert not seen, "a plain module has no prompts"
    with cheap.lenient():
        catalog = load_catalog(only=FEW)
        ac.compile(str(TINY), dtype="float16", device="cpu", run_on="framework", catalog=catalog, store=Store(None), report=seen.append,
                   config=Config(origins=(), validators=("numerics",)))
    told, captured = seen.index(DType.F16), next(i for i, event in enumerate(seen) if isinstance(event, Captured))
    assert told < captured and seen.count(DType.F16) == 1
