"""Whatever breaks in a plugin is in the result, once, in whole sentences, with plugin and subject in words, wherever it broke."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentcompile_core as ac
from agentcompile_core import report
from agentcompile_core.configuration import Config
from agentcompile_core.errors import MAX_MESSAGE, Cause, Failure, StageName, bounded
from agentcompile_core.ir import serial
from agentcompile_core.plugin import failures
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.events import Event, FailureRecorded
from agentcompile_core.plugin.failures import Failures
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import Advisor, RegionRule, TemplateFamily
from agentcompile_core.stages.emit import evidence
from agentcompile_core.store import Store

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
SENTENCE = "the table of shapes has no row for this one. " * 12 + "Write the row and install the plugin again."


class RaisingFamily(TemplateFamily):
    """Its ``accepts`` raises for every match, with a message that differs from match to match."""

    name = "raising"

    def accepts(self, match: Any, target: Any) -> Any:
        raise KeyError(f"{match.id!r}: {SENTENCE}")

    def space(self, match: Any, target: Any) -> Any:
        raise AssertionError

    def lower(self, match: Any, schedule: Any, target: Any) -> Any:
        raise AssertionError


class RaisingRule(RegionRule):
    """Its ``find`` raises."""

    name = "raising"

    def find(self, graph: Any, target: Any) -> Any:
        raise RuntimeError("this rule is broken")


class RaisingAdvisor(Advisor):
    """Its ``advise`` raises."""

    name = "raising"

    def advise(self, question: Any) -> Any:
        raise ConnectionError("the service said: " + SENTENCE)


def plugin(**offers: Any) -> SimpleNamespace:
    def hook(offer: Any) -> Any:
        return lambda: [offer]

    return SimpleNamespace(**{name: hookimpl(hook(offer)) for name, offer in offers.items()})


@pytest.fixture(scope="module")
def broken() -> tuple[Any, list[Event], list[Failure]]:
    """The tiny model compiled beside a family, a rule and an advisor that raise, with every event and every call of the hook."""
    heard: list[Failure] = []
    events: list[Event] = []

    @hookimpl
    def agentcompile_failed(failure: Failure) -> None:
        heard.append(failure)

    offers = plugin(agentcompile_template_families=RaisingFamily(), agentcompile_region_rules=RaisingRule(),
                    agentcompile_advisors=RaisingAdvisor())
    extra = [("acme", offers), ("listener", SimpleNamespace(agentcompile_failed=agentcompile_failed))]
    catalog = load_catalog(only=("norm", "transformers_rules", "cuda"), extra=extra, strict=False)
    compiled = ac.compile(str(TINY), dtype="float32", device="cpu", run_on="nothing", meta=True, max_context=64, catalog=catalog,
                          store=Store(None), report=events.append, config=Config(advisor="raising", budget_s=5.0, budget_plans=1))
    assert not catalog.failures, "the failures of a compilation are its own, not the catalog's"
    return compiled, events, heard


def test_failures_of_every_stage_reach_the_result_once(broken) -> None:
    compiled, _, _ = broken
    found = {(f.stage, f.plugin): f for f in compiled.compilation.failures if f.plugin in ("acme/raising", "raising")}
    assert set(found) == {(StageName.ANALYZE, "acme/raising"), (StageName.PLAN, "acme/raising"), (StageName.ADVISE, "raising")}
    matches = sum(len(r.matches) for r in compiled.compilation.regions)
    assert found[StageName.PLAN, "acme/raising"].count == matches > 20
    assert compiled.statistics["failures"] == len(compiled.compilation.failures)


def test_messages_are_whole_and_subjects_are_words(broken) -> None:
    compiled, _, _ = broken
    signatures = {r.signature for r in compiled.compilation.regions}
    for failure in compiled.compilation.failures:
        assert failure.subject and not any(s in failure.subject for s in signatures)
        if failure.stage in (StageName.PLAN, StageName.ADVISE):
            assert SENTENCE.strip() in failure.message
    advise = next(f for f in compiled.compilation.failures if f.stage is StageName.ADVISE)
    assert advise.subject.startswith("region ") and advise.subject.removeprefix("region ") in {r.name for r in compiled.compilation.regions}


def test_hooks_and_the_observer_hear_every_failure(broken) -> None:
    compiled, events, heard = broken
    recorded = [e for e in events if isinstance(e, FailureRecorded)]
    assert len(recorded) == len(heard) == sum(f.count for f in compiled.compilation.failures)
    assert sum(1 for e in recorded if e.first) == len(compiled.compilation.failures)


def test_text_json_and_bundle_tell_the_same(broken, tmp_path: Path) -> None:
    compiled, _, _ = broken
    text = report.compilation_text(compiled, None)
    folder = compiled.save(tmp_path / "b")
    stored = evidence.read(folder)
    explained = report.untried_text(stored.tried) + report.failures_text(stored.failures)
    for failure in compiled.compilation.failures:
        assert text.count(failure.message) == 1 and failure.message in explained
    assert "acme/raising on match" in text and "more: KeyError" in text
    assert failures.document(stored.failures) == failures.document(compiled.compilation.failures)
    assert json.loads(serial.dumps(failures.document(stored.failures)))
    assert not any(f.traceback for f in stored.failures), "a bundle holds no path of this machine"


def failure(message: str, subject: str = "s", plugin: str = "p") -> Failure:
    return Failure(stage=StageName.PLAN, cause=Cause.EXCEPTION, plugin=plugin, subject=subject, message=message)


def test_another_plugin_cause_or_message_is_another_failure() -> None:
    book = Failures([failure("x is 1"), failure("x is 2", "t"), failure("y is 1"), failure("x is 1", plugin="q")])
    assert [(f.message, f.count, f.subject) for f in book] == [("x is 1", 2, "s"), ("y is 1", 1, "s"), ("x is 1", 1, "s")]
    assert str(book[0]) == "[plan/exception] p on s and 1 more: x is 1"
    book.copy().add(failure("z"))
    assert len(book) == 3


@settings(derandomize=True, max_examples=100)
@given(st.text(alphabet="ab .\n", max_size=3 * MAX_MESSAGE))
def test_a_message_is_whole_or_ends_at_a_word_with_an_ellipsis(text: str) -> None:
    kept = Failures([failure(text)])[0].message
    assert kept == text or (kept.endswith(" ...") and len(kept) <= MAX_MESSAGE and text.startswith(kept.removesuffix(" ...")))


def test_a_long_message_ends_with_a_sentence() -> None:
    text = "One sentence is here. " * 200
    assert bounded(text).endswith("here. ...") or bounded(text).endswith("here ...") or bounded(text).endswith("is here. ...")


@given(st.text())
def test_no_words_of_a_plugin_are_obeyed_by_a_terminal(text: str) -> None:
    one = Failure(stage=StageName.ADVISE, cause=Cause.EXCEPTION, plugin="evil", subject=text, message=f"boom\x1b[31m{text}\x00\u202e")
    assert all(ch.isprintable() or ch in "\n\t" for ch in str(one)) and "\\x1b[31m" in one.message
    assert serial.structure(serial.unstructure(one), Failure) == one
