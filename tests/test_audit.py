"""``agentcompile audit`` and ``agentcompile cache``: decisions made again from a bundle, and a cache that is looked after."""

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from faults import cheap
from faults.kernels import Times
from faults.seen import command
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store_faults import filled

from agentcompile_core.report import audit, audit_words
from agentcompile_core.store import Store, care, exchange


def audited(made: Any) -> tuple[audit.Decision, ...]:
    c = made.compilation
    return audit.audit(c.selections, c.records, c.decisions, c.programs)


def test_the_tiny_models_decisions_follow(cli, tiny_bundle: Path) -> None:
    code, out, err = cli("audit", tiny_bundle, "--json")
    assert code == 0, err
    found = json.loads(out)
    kinds = {row["kind"] for row in found["decisions"]}
    assert found["do_not_follow"] == 0 and kinds == {"advice", "region", "step", "program"}
    assert all(row["evidence"] for row in found["decisions"] if row["kind"] in ("region", "step"))
    code, out, _ = cli("audit", tiny_bundle)
    assert code == 0 and out.endswith("each follows from the records\n") and "of the error budget" in out


@settings(max_examples=4)
@given(times_us=st.lists(st.sampled_from([2.0, 5.0, 9.0, 9.99, 10.5, 20.0]), min_size=1, max_size=3, unique=True),
       margin=st.sampled_from([-1.0, -0.2, 0.01, 0.3]))
def test_whatever_select_decides_the_audit_decides_too(tmp_path_factory: pytest.TempPathFactory, times_us: list[float],
                                                       margin: float) -> None:
    folder = tmp_path_factory.mktemp("audit")
    made = cheap.compiled(cheap.module(folder), Store(None), workers=cheap.HERE, family=Times(*times_us), margin=margin)
    assert [one for one in audited(made) if one.problems] == []
    steps = made.compilation.selections[0].steps
    if steps:  # and it sees every other decision
        c = made.compilation
        for wrong in (evolve(c.selections[0], steps=()), evolve(c.selections[0], steps=(evolve(steps[0], measurement=None),))):
            assert any(d.problems for d in audit.audit((wrong,), c.records, c.decisions, c.programs))


def test_the_audit_names_advice_that_was_refused(tmp_path: Path) -> None:
    from faults.advice import OUTSIDE, Does

    made = cheap.compiled(cheap.module(tmp_path), Store(None), workers=cheap.HERE, advisor="does",
                          extra=(("acme", cheap.offers(advisors=Does(lambda q: OUTSIDE))),))
    text = audit_words.text(audited(made))
    assert "refused 3 items" in text and "refused by rule A1: acme/magic" in text


def test_a_cache_is_shown_verified_and_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCOMPILE_CACHE_DIR", str(tmp_path))
    filled(tmp_path)
    (tmp_path / "v0").mkdir()
    shown = json.loads(command("cache", "show", "--json")[1])
    assert shown["entries"] == {"records": 1, "kernels": 1, "text-captures": 1} and shown["older"] == [str(tmp_path / "v0")]
    assert command("cache", "verify")[0] == 0
    next(tmp_path.glob("v1/kernels/*/*/binary")).write_bytes(b"other")
    code, out, _ = command("cache", "verify")
    assert code == 1 and "damaged: kernels/k1" in out
    assert json.loads(command("cache", "prune", "--json")[1])["damaged"] == ["kernels/k1"]
    assert command("cache", "verify")[0] == 0 and not (tmp_path / "v0").exists()
    assert care.show(Store(tmp_path))["entries"] == {"records": 1, "text-captures": 1}


def test_what_is_exported_is_imported_and_kernels_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCOMPILE_CACHE_DIR", str(tmp_path / "a"))
    store = filled(tmp_path / "a")
    store.put_text("searches", "s1", "ended")
    assert command("cache", "export", tmp_path / "x.gz")[0] == 0
    assert [p.name for p in tmp_path.iterdir()] != [] and not list(tmp_path.glob(".x.gz-*"))
    monkeypatch.setenv("AGENTCOMPILE_CACHE_DIR", str(tmp_path / "b"))
    first, second = (json.loads(command("cache", "import", tmp_path / "x.gz", "--json")[1]) for _ in range(2))
    assert (first["added"], first["known"]) == (2, 0) and (second["added"], second["known"]) == (0, 2)
    other = Store(tmp_path / "b")
    assert other.record("r1") == store.record("r1") and other.text("searches", "s1") == "ended" and other.kernel("k1") is None


@given(st.binary(max_size=200))
def test_any_other_file_is_refused_in_a_sentence(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    from agentcompile_core.errors import UsageError

    path = tmp_path_factory.mktemp("import") / "x.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        exchange.read(Store(path.parent / "cache"), path)
