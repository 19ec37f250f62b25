"""A plugin that listens hears every stage with its counts, and every evaluated candidate."""

import io
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_validator_emulation.backend import EmulationBackend
from faults import cheap

import agentcompile_core as ac
from agentcompile_core.api import whole_calls
from agentcompile_core.cli.progress import Progress
from agentcompile_core.configuration import Config
from agentcompile_core.errors import UsageError
from agentcompile_core.installation import install as installation
from agentcompile_core.ir.candidate import Kernel, StepSource
from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.target import Target
from agentcompile_core.plugin.backend import OwnBuild
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.events import Captured, StageFinished, StageStarted
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import Backend
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import FakeBackend, fake_source

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
pytestmark = pytest.mark.usefixtures("shared_captures")
FEW = ("transformers_rules", "cuda", "elementwise", "argmax", "emulation", "numerics")  # every stage has work, and none much
CONTEXT = 64  # of few chunks of prompts, since each is traced and compared, whatever is announced of them


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
    compiled = ac.compile(str(TINY), dtype="float32", device="cpu", run_on="nothing", catalog=catalog, max_context=CONTEXT,
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
    seen: list[object] = []

    def slowly(call: Any) -> Any:
        return lambda *arguments, **more: (time.sleep(0.2), call(*arguments, **more))[1]

    monkeypatch.setattr(installation, "install", slowly(installation.install))
    monkeypatch.setattr(whole_calls, "settle", slowly(whole_calls.settle))
    model, store = cheap.module(tmp_path), Store(tmp_path / "store")
    made = cheap.compiled(model, store, workers=cheap.HERE, report=seen.append)
    cheap.loaded(made.save(tmp_path / "bundle"), model, store, workers=cheap.HERE, report=seen.append)
    begun = [event.stage for event in seen if isinstance(event, StageStarted)]
    text = io.StringIO()
    for event in seen:
        if getattr(event, "stage", "") == "install":
            Progress(stream=text)(event)  # type: ignore[arg-type]
    assert re.findall(r"install[^\n]*", text.getvalue()) == 2 * ["install ...", "install: 0.4 s, 1 programs"]
    ended = [event for event in seen if isinstance(event, StageFinished) and event.stage == "install"]
    assert begun.count("install") == 2 and all(event.seconds >= 0.4 and event.facts == {"programs": 1} for event in ended)
    seconds = made.statistics["seconds"]
    assert len(ended) == 2 and list(seconds)[-1] == "install" and seconds["install"] == ended[0].seconds


class Told:
    """Notes of what types backends were told, in one list with the events of a compile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, raises: bool = False) -> None:
        self.seen: list[object] = []
        self.builds: list[OwnBuild] = []
        told = self

        def expect(self: object, dtype: DType, build: OwnBuild) -> None:
            told.seen.append(dtype)
            told.builds.append(build)
            if raises:
                raise ValueError("no room")

        monkeypatch.setattr(Backend, "expect", expect)

    @property
    def types(self) -> list[object]:
        return [one for one in self.seen if isinstance(one, DType)]

    def compiled(self, **options: Any) -> Any:
        with cheap.lenient():
            given = {"dtype": "float16", "device": "cpu", "run_on": "framework", "config": Config(origins=(), validators=("numerics",)),
                     "store": Store(None), "max_context": CONTEXT, **options}
            return ac.compile(str(TINY), report=self.seen.append, catalog=load_catalog(only=FEW), **given)


@pytest.mark.parametrize("raises", [False, True])
def test_a_backend_is_told_of_a_language_model_before_it_is_captured(monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    told = Told(monkeypatch, raises)
    told.compiled()
    captured = next(i for i, event in enumerate(told.seen) if isinstance(event, Captured))
    assert told.types == [DType.F16] and told.seen.index(DType.F16) < captured


def test_what_a_backend_builds_of_its_own_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    class Building(FakeBackend):
        def build(self, source: StepSource, target: Target, deadline_s: float = 120.0) -> Kernel:
            built.append(source.digest)
            return super().build(source, target, deadline_s)

    source, found = fake_source("honest"), []
    for _ in range(2):
        told = Told(monkeypatch)
        made = told.compiled(store=Store(tmp_path))
        found.append(told.builds[0](Building(), source, PRESETS["h200"]))
    assert built == [source.digest] and found[0] == found[1] and found[1].binary == found[0].binary
    told.builds[0](Building(), fake_source("slow"), PRESETS["h200"])
    assert len(built) == 2 and made.context.store is not None


def test_a_backend_is_not_told_of_what_will_not_run_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    cheap.compiled(cheap.module(tmp_path), Store(None), workers=cheap.HERE)
    assert not told.types, "a plain module has no prompts"
    told.compiled(run_on="nothing")
    told.compiled(meta=True)
    assert not told.types, "the result is saved, and runs elsewhere"
    monkeypatch.setattr(EmulationBackend, "device", "meta")
    told.compiled(config=Config(origins=(), validators=("numerics",), backend="emulation"))
    assert not told.types, "the model runs on another device than the backend's"


def test_a_backend_is_told_of_a_bundle_that_fits_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.compiled(run_on="nothing", dtype="float32").save(tmp_path / "bundle")
    loading = {"device": "cpu", "run_on": "framework", "store": Store(None)}
    with cheap.lenient():
        ac.load(tmp_path / "bundle", str(TINY), catalog=load_catalog(only=FEW), **loading)
        assert told.types == [DType.F32]
        other = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
                                                                       num_hidden_layers=1, num_attention_heads=2))
        with pytest.raises(UsageError):
            ac.load(tmp_path / "bundle", other, catalog=load_catalog(only=FEW), **loading)
    assert told.types == [DType.F32], "a bundle of another model begins nothing"
