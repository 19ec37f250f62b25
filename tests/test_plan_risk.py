"""Plans carry what is foreseen of them: registers, shared memory, blocks per SM; what is ruled out has reasons, and explain shows it."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from agentcompile_cuda_kit.targets import PRESETS, preset
from agentcompile_rules_transformers.testing import attention_case, experts_case, linear_case, rows_case
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core import report
from agentcompile_core.cli import main
from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.decisions import Decisions, choices_of
from agentcompile_core.ir.plan import Needs, Origin, RegionPlan, RiskLevel
from agentcompile_core.ir.region import Instance, Match, Region, RegionSummary
from agentcompile_core.ir.search_log import Seen, tried
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType
from agentcompile_core.stages.emit.evidence import Evidence
from agentcompile_core.stages.plan import plan
from agentcompile_core.stages.plan.risk import blocks_per_sm, risk_of
from agentcompile_core.store import Store

H200 = preset("h200")
LEVELS = list(RiskLevel)
SERVED = {
    "gemv": linear_case(n=4096, k=2048, norm="rms"), "gemm": rows_case(rows=(512,), n=1024, k=2048),
    "attention": attention_case(heads=(14, 2), head_dim=112, capacity=4489, rope="rms", dtype=DType.F32),
    "experts": experts_case(sizes=(128, 8, 768, 2048)),
}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def planned(name: str, catalog: Catalog, target: str = "h200") -> RegionPlan:
    match, graph = SERVED[name]
    region = Region(name=name, signature=f"signature of {name}", graph=graph, matches=(match,),
                    instances=(Instance(nodes=tuple((node.name, node.name) for node in graph.nodes), values=()),))
    ctx = Context(catalog=catalog, target=preset(target), config=Config(), store=Store(None))
    summary = RegionSummary(signature=region.signature, label="mixed", operators=(), instances=1, matches=(), dominant="mixed")
    return RegionPlan(region=region, summary=summary, space=plan(region, frozenset({Origin.GENERATED}), ctx))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(threads=st.sampled_from((32, 128, 256, 1024)), registers=st.integers(0, 255), shared_bytes=st.integers(0, 227 << 10),
       target=st.sampled_from(sorted(PRESETS)))
def test_more_needs_never_make_a_plan_less_risky(threads: int, registers: int, shared_bytes: int, target: str) -> None:
    most = min(255, preset(target).registers_per_sm // threads)
    needs = Needs(threads=threads, registers=registers, most_registers=most, shared_bytes=shared_bytes)
    risk = risk_of(needs, preset(target))
    assert (risk.level is RiskLevel.LOW) == (risk.reason == "")
    for name, step in (("registers", 16), ("shared_bytes", 8 << 10)):
        more = evolve(needs, **{name: getattr(needs, name) + step})
        assert LEVELS.index(risk_of(more, preset(target)).level) >= LEVELS.index(risk.level)
        assert blocks_per_sm(more, preset(target)) <= blocks_per_sm(needs, preset(target))


@pytest.mark.parametrize(("needs", "level", "word"), [
    (Needs(), RiskLevel.LOW, ""),
    (Needs(threads=256, registers=64, most_registers=255, shared_bytes=16 << 10), RiskLevel.LOW, ""),
    (Needs(threads=256, registers=250, most_registers=255), RiskLevel.HIGH, "250 of at most 255"),
    (Needs(threads=128, registers=210, most_registers=255), RiskLevel.MEDIUM, "210 of at most 255"),
    (Needs(threads=256, shared_bytes=220 << 10), RiskLevel.MEDIUM, "shared memory"),
    (Needs(threads=1024, registers=40, most_registers=64), RiskLevel.MEDIUM, "one block of 1024 threads"),
])
def test_a_level_has_its_reason(needs: Needs, level: RiskLevel, word: str) -> None:
    risk = risk_of(needs, H200)
    assert risk.level is level and word in risk.reason


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("target", ["a100", "h200", "rtx5090"])
def test_what_a_family_foresees_lies_within_what_it_left_in_its_space(name: str, target: str, catalog: Catalog) -> None:
    match = SERVED[name][0]
    family = next(f for f in catalog.template_families.values() if f.name == name)
    space = family.space(match, preset(target))
    for point in space.points[::13]:
        needs, (launch, *_) = family.needs(match, point, preset(target)), family.lower(match, point, preset(target)).launches
        assert needs.threads == launch.block[0] and launch.shared_bytes <= needs.shared_bytes <= preset(target).shared_bytes_per_block
        assert 0 <= needs.registers <= needs.most_registers <= preset(target).registers_per_sm // needs.threads
    assert all(count > 0 and len(reason) > 20 for reason, count in space.ruled_out)


def test_schedules_that_want_of_registers_or_of_blocks_rules_out_are_counted(catalog: Catalog) -> None:
    ruled_out = {name: " ".join(reason for step in planned(name, catalog).space.steps for reason, _ in step.space.ruled_out)
                 for name in SERVED}
    assert "registers" in ruled_out["gemv"] and "registers" in ruled_out["attention"] and "blocks fit on an SM" in ruled_out["gemv"]
    smaller = planned("gemm", catalog, "rtx5090").space.steps[0].space.ruled_out
    assert any("shared memory" in reason for reason, _ in smaller)


def test_a_family_that_raises_costs_its_foresight_and_nothing_else(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    family = next(f for f in catalog.template_families.values() if f.name == "gemv")

    def broken(*_: Match) -> Needs:
        raise KeyError("registers")

    monkeypatch.setattr(type(family), "needs", lambda self, *given: broken(*given))
    relaxed = load_catalog(strict=False)
    (step,) = planned("gemv", relaxed).space.steps
    assert step.risk.level is RiskLevel.LOW and step.space.points
    assert any("registers" in str(failure) for failure in relaxed.failures)


def evidence(catalog: Catalog) -> Evidence:
    plans = [planned(name, catalog) for name in SERVED]
    return Evidence(tried=tried(plans, [], Seen()), decisions=Decisions(margin=0.01, advisor="a", validators=(), regions=choices_of(plans)))


def test_explain_shows_the_risk_of_covers_and_matches_and_what_was_ruled_out(catalog: Catalog) -> None:
    found = evidence(catalog)
    document = report.region_document("attention", found)
    (match,) = document["matches"]
    (served,) = match["served"]
    assert served["ruled_out"] and served["schedules"] > 0 and match["risk"] == served["risk"] == "medium"
    assert [(cover["fusion"], cover["risk"]) for cover in document["covers"]] == [("full", "medium"), ("framework", "low")]
    assert {one["implementation"].split("/")[1] for one in match["refused"]} >= {"gemv", "norm"}
    text = report.region_text(document)
    reason = "one block of 256 threads per SM: nobody fills its pauses"
    for said in (f"medium risk ({reason})", "ruled out: ", "others serve other kinds", "full", "attention/attention: "):
        assert said in text, said
    gemv = report.region_document("gemv", found)
    assert [(cover["fusion"], cover["risk"]) for cover in gemv["covers"]] == [("full", "low"), ("framework", "low")]
    assert "low risk" in report.region_text(gemv)
    assert re.search("(medium|high) risk \\(", report.region_text(report.region_document("gemm", found)))
    assert report.region_document("signature of gem", found)["region"] == "gemv"


def test_an_unknown_region_is_refused_with_the_names_of_all(catalog: Catalog) -> None:
    with pytest.raises(UsageError, match="no region 'layers' in this bundle; its regions: gemv, gemm, attention, experts"):
        report.region_document("layers", evidence(catalog))
    with pytest.raises(UsageError, match="holds no decisions"):
        report.region_document("layers", Evidence())


def test_the_command_prints_the_region(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                       tmp_path: Path) -> None:
    from agentcompile_core.cli import commands

    monkeypatch.setattr(commands.bundle_reader, "read", lambda folder: SimpleNamespace())
    monkeypatch.setattr(commands.evidence, "read", lambda folder: evidence(catalog))
    assert main(["explain", str(tmp_path), "--region", "gemm"]) == 0
    assert "gemm/gemm: " in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "--region", "none"]) == 2
