"""What a bundle's steps run on counts as known here only with a passing record of the same checks; else it is validated before it runs."""

import shutil
from pathlib import Path
from typing import Any

import agentcompile_rules_transformers
import pytest
import torch
from faults import cheap

from agentcompile_core.ir.plan import Origin, Schedule, ScheduleSpace
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.interfaces import Implementation
from agentcompile_core.store import Store, keys
from agentcompile_core.testing import doubles

A, B = torch.randn(100), torch.randn(100)
CALL = "with no record of passing these checks: validated here"
AGAIN, NOT = f"{CALL} again", "and not validated: the framework's operators run instead"


class Sum(Implementation):
    """Adds; or, where it is told to, is off by 1 % from its third call on, or in what comes behind the first run."""

    name, version, origin = "sum", 1, Origin.HANDWRITTEN
    off_from: int | None = None

    def accepts(self, match: Any, target: Any) -> Any:
        return True

    def space(self, match: Any, target: Any) -> ScheduleSpace:
        return ScheduleSpace(parameters=(), points=(Schedule({}),))

    def bind(self, match: Any, schedule: Any, target: Any) -> Any:
        calls = []

        def run(in0: torch.Tensor, in1: torch.Tensor, out: torch.Tensor) -> None:
            calls.append(1)
            wrong = self.off_from is not None and len(calls) > self.off_from
            torch.add(in0, in1, out=out).mul_(1.01 if wrong else 1.0)

        return run


def steps(model: Any) -> int:
    return sum(1 for s in model.session.program.segments if s.step)


def notes(model: Any) -> list[str]:
    return [note for note in model.notes if "of the bundle" in note]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A compile of the user's own: what was compiled, its model and its store."""
    folder = tmp_path_factory.mktemp("own")
    model = cheap.module(folder)
    return cheap.compiled(model, Store(folder / "store"), workers=cheap.HERE), model, folder / "store"


def test_an_own_kernel_with_its_record_runs_at_once(made: tuple[Any, Path, Path], judged: list[Any], tmp_path: Path) -> None:
    compiled, model, store = made
    shutil.copytree(store, tmp_path / "mine")
    found = cheap.loaded(compiled.save(tmp_path / "b"), model, Store(tmp_path / "mine"), workers=cheap.HERE)
    assert steps(found) == 1 and judged == [] and notes(found) == []


@pytest.mark.parametrize("what", ["records are gone", "the checks have changed"])
def test_an_own_kernel_without_a_record_of_these_checks_is_validated_again(
        made: tuple[Any, Path, Path], judged: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    compiled, model, store = made
    shutil.copytree(store, tmp_path / "mine")
    if what == "records are gone":
        for path in (tmp_path / "mine" / "v1").glob("*.sqlite*"):
            path.unlink()
    else:
        monkeypatch.setattr(keys, "judging_code", lambda: "another oracle")
    bundle = compiled.save(tmp_path / "b")
    for first in (True, False):
        found = cheap.loaded(bundle, model, Store(tmp_path / "mine"), workers=cheap.HERE)
        assert steps(found) == 1 and torch.equal(found(A, B), A + B) and len(judged) == 1
        assert [AGAIN in note for note in notes(found)] == [True] * first


# ---- what an implementation binds


@pytest.fixture
def with_sum(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plugin that offers ``sum`` here and in the worker, and the ways to compile and load with it."""
    offered = Sum()
    plugin = ("acme", cheap.offers(implementations=offered))
    own = cheap.offers(template_families=cheap.Family(), backends=cheap.Backend(), validators=doubles.SimpleValidator())
    monkeypatch.setattr(cheap.Here, "catalog", staticmethod(lambda: load_catalog(
        only=(), extra=[("doubles", own), ("rules", agentcompile_rules_transformers), plugin])))
    return offered, {"extra": (plugin,), "workers": cheap.HERE, "family": cheap.Family(), "origins": (Origin.HANDWRITTEN.value,)}


def test_what_is_bound_is_validated_where_no_record_says_that_it_passed(with_sum: Any, judged: list[Any], tmp_path: Path) -> None:
    _, with_it = with_sum
    model = cheap.module(tmp_path)
    compiled = cheap.compiled(model, Store(tmp_path / "author"), **with_it)
    bundle = compiled.save(tmp_path / "b")
    assert steps(compiled) == 1 and len(judged) == 1
    own = cheap.loaded(bundle, model, Store(tmp_path / "author"), **with_it)
    assert steps(own) == 1 and len(judged) == 1 and notes(own) == [], "its author's store holds the record"
    for expected in (True, False):
        found = cheap.loaded(bundle, model, Store(tmp_path / "mine"), **with_it)
        assert steps(found) == 1 and torch.equal(found(A, B), A + B) and len(judged) == 2
        assert [CALL in note for note in notes(found)] == [True] * expected


@pytest.mark.parametrize("off_from", [0, 5])
def test_what_is_bound_and_wrong_here_never_runs(with_sum: Any, tmp_path: Path, off_from: int) -> None:
    """It has the version that was validated elsewhere, and is right the first times: all that the look at an installed program sees."""
    offered, with_it = with_sum
    model = cheap.module(tmp_path)
    bundle = cheap.compiled(model, Store(None), **with_it).save(tmp_path / "b")
    offered.off_from = off_from
    found = cheap.loaded(bundle, model, Store(None), **with_it)
    assert steps(found) == 0 and all(torch.equal(found(A, B), A + B) for _ in range(20))
    (note,) = notes(found)
    assert note.startswith("1 step of the bundle bound to an installed implementation") and NOT in note and "sum" in note


def test_a_step_of_another_version_is_not_judged(with_sum: Any, judged: list[Any], tmp_path: Path) -> None:
    offered, with_it = with_sum
    model = cheap.module(tmp_path)
    bundle = cheap.compiled(model, Store(None), **with_it).save(tmp_path / "b")
    before = len(judged)
    offered.version = 2
    found = cheap.loaded(bundle, model, Store(None), **with_it)
    assert steps(found) == 0 and len(judged) == before and any("version 1 was validated" in note for note in found.notes)


def test_words_of_several_are_plural(made: tuple[Any, Path, Path]) -> None:
    from agentcompile_core.installation import trust

    assert trust._notes(["known again", "known again", "call again"], "") == (
        f"2 kernels of the bundle known to this machine's cache, {AGAIN}",
        f"1 step of the bundle bound to an installed implementation, {CALL}")
