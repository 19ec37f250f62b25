"""Implementations (callables instead of generated source) from plan to bundle, through ``compile`` and ``load`` on the tiny model.

Origins are restricted to those of the implementations, so that no clock and no generated kernel decides what is selected.
"""

import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core import api
from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Cause, ContractError
from agentcompile_core.ir import serial
from agentcompile_core.ir.bundle import PROGRAMS
from agentcompile_core.ir.candidate import Candidate
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, TensorSpec, Value, ValueKind
from agentcompile_core.ir.plan import Origin, Schedule
from agentcompile_core.ir.selection import Basis
from agentcompile_core.ir.verdict import Outcome
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.report import explain_text
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.runtime.binder import bind
from agentcompile_core.runtime.bound_program import Piece
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.graph_capture import record_program
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.sources import source_of
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages import plan
from agentcompile_core.stages.emit import evidence
from agentcompile_core.stages.select import chain
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import measurement
from agentcompile_core.worker import judge
from agentcompile_core.worker.chain_question import ChainAnswer, ChainQuestion

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"
DOUBLES = Path(__file__).parent / "implementation_doubles" / "acme_doubles.py"
PLUGINS = ("vendor", "acme", "emulation", "numerics", "transformers_rules", "cuda")
COMMON = {"dtype": "float32", "device": "cpu"}


class Installation:
    """A folder on both processes' path, with the plugin ``acme`` in it as its settings say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(DOUBLES, folder)
        info = folder / "acme_doubles-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-doubles\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[agentcompile.v1]\nacme = acme_doubles\n")

    def catalog(self, *plugins: str, **settings: str) -> Any:
        """A catalog of ``plugins``, freshly imported."""
        (self.folder / "acme_settings").write_text("\n".join(f"{k}={v}" for k, v in settings.items()))
        sys.modules.pop("acme_doubles", None)
        importlib.invalidate_caches()
        return load_catalog(only=(*plugins, "emulation", "numerics", "transformers_rules", "cuda"), strict=False)


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("acme")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("AGENTCOMPILE_PLUGINS", ",".join(PLUGINS))
        yield Installation(folder)
    sys.modules.pop("acme_doubles", None)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Captures are shared by the compilations of this module."""
    return Store(tmp_path_factory.mktemp("store"))


def compiled(catalog: Any, store: Store, *origins: str, **more: Any) -> Any:
    model = api.compile(str(TINY), max_context=64, target="h200", store=store, catalog=catalog,
                        config=Config(origins=origins, rounds=1, budget_s=240.0), **{"run_on": "emulation", **COMMON, **more})
    model.context.close()
    return model


@pytest.fixture(scope="module")
def vendor(acme: Installation, store: Store) -> Any:
    return compiled(acme.catalog("vendor"), store, "third_party")


@pytest.fixture(scope="module")
def outside(acme: Installation, store: Store) -> Any:
    """With an implementation that no CUDA graph may hold."""
    return compiled(acme.catalog("acme", set="outside"), store, "handwritten")


@pytest.fixture(scope="module")
def expected(vendor: Any) -> list[int]:
    """What HuggingFace says."""
    ids = prompt(vendor)
    out = vendor.loaded.module.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0,
                                        disable_compile=True)
    return out[0].tolist()


def prompt(model: Any) -> torch.Tensor:
    return model.tokenizer("When an exception", return_tensors="pt").input_ids


def tokens(model: Any) -> list[int]:
    return model.generate(prompt(model), 24)[0].tolist()


def steps(model: Any) -> list[Any]:
    return [step for selection in model.compilation.selections for step in selection.steps]


def decode_calls(model: Any) -> list[Any]:
    return [s for s in model.session.bound("decode").program.segments if s.is_call]


def test_what_plugins_bind_is_selected_and_generates_the_same_tokens(vendor: Any, expected: list[int]) -> None:
    assert {s.step.implementation for s in steps(vendor)} == {"vendor/linear", "vendor/attention"}
    assert all((s.source, s.version, s.basis) == (None, 2, Basis.PROVISIONAL) for s in steps(vendor))
    assert len(decode_calls(vendor)) == 5 * 6 + 1, "five layers of QKV, attention, O, gate, up, down, and the head"
    assert tokens(vendor) == expected


ORIGINS = {(): set(), ("generated",): {"gemv"}, ("handwritten",): {"acme"}, ("third_party",): {"vendor"},
           ("generated", "handwritten", "third_party"): {"gemv", "acme", "vendor"}}


@pytest.mark.parametrize("origins", ORIGINS, ids=lambda origins: "+".join(origins) or "none")
def test_only_the_origins_that_are_allowed_are_planned(vendor: Any, acme: Installation, origins: tuple[str, ...]) -> None:
    ctx = Context(catalog=acme.catalog("vendor", "acme", "gemv"), target=vendor.context.target, config=Config(origins=origins),
                  store=Store(None))
    spaces = [planned.space for planned in plan.run(vendor.compilation.analyses, ctx)]
    found = {(s.implementation.split("/")[0], s.origin.value) for space in spaces for s in space.steps}
    assert {name for name, _ in found} == ORIGINS[origins]
    assert {origin for _, origin in found} == set(origins)


def test_explain_shows_the_origin_of_each_step(vendor: Any, tmp_path: Path) -> None:
    bundle = bundle_reader.read(vendor.save(tmp_path / "b"))
    text = explain_text(bundle.manifest, bundle.selections, bundle.records, evidence.read(tmp_path / "b"))
    assert re.search(r"^step +implementation +origin ", text, re.M)
    assert re.search(r"^attention +vendor/attention +third_party ", text, re.M)


def test_a_bundle_names_the_steps_and_holds_no_code_of_them(vendor: Any, tmp_path: Path) -> None:
    folder = vendor.save(tmp_path / "b")
    assert not (folder / "kernels").exists()
    (decode,) = (p for p in json.loads((folder / PROGRAMS).read_text()) if p["graph"] == "decode")
    named = {(s["step"]["implementation"], s["version"], str(s["step"]["schedule"]["items"])) for s in decode["segments"] if s["step"]}
    assert ("vendor/linear", 2, "[['call', 'matrix']]") in named and ("vendor/attention", 2, "[]") in named
    assert not (folder / "extension").exists(), "a backend that built nothing adds nothing"


def test_a_bundle_is_bound_again_from_what_is_installed(vendor: Any, acme: Installation, expected: list[int], tmp_path: Path) -> None:
    folder = vendor.save(tmp_path / "b")
    again = api.load(folder, str(TINY), device="cpu", run_on="emulation", catalog=acme.catalog("vendor"))
    assert len(decode_calls(again)) == len(decode_calls(vendor))
    assert not any("framework" in note for note in again.notes)
    assert tokens(again) == expected


LOST = {
    "uninstalled": ({}, "acme/residual version 1 is not installed"),
    "updated": ({"version": "2"}, "acme/residual is installed as version 2, version 1 was validated"),
    "refuses": ({"fails": "accepts"}, "acme/residual version 1 does not accept its match here: its library is too old here"),
    "bind": ({"fails": "bind"}, "OSError: libacme.so was not found"),  # seen in the worker, where it is validated before it runs here
    "run": ({"fails": "run"}, "RuntimeError: no kernel image for this device"),
}


@pytest.mark.parametrize("case", LOST)
def test_what_cannot_be_bound_any_more_runs_on_the_framework(outside: Any, acme: Installation, expected: list[int], tmp_path: Path,
                                                            case: str) -> None:
    settings, reason = LOST[case]
    folder = outside.save(tmp_path / "b")
    assert len(decode_calls(outside)) == 10, "O and down projection of five layers"
    catalog = acme.catalog(*(() if case == "uninstalled" else ("acme",)), set="outside", **settings)
    again = api.load(folder, str(TINY), device="cpu", run_on="emulation", catalog=catalog)
    (note,) = (note for note in again.notes if "acme" in note)
    if case in ("bind", "run"):
        assert note.startswith("2 steps of the bundle bound to an installed implementation and not validated: ") and reason in note
    else:
        assert note == f"{reason}: the nodes of 2 steps run on the framework's operators"
    told = [f for f in again.context.failures if f.plugin == "acme/residual"]
    assert len(told) == 1, told
    assert decode_calls(again) == []
    assert tokens(again) == expected


def test_the_program_is_cut_where_no_graph_may_hold_a_step(outside: Any, expected: list[int]) -> None:
    pieces = outside.session.bound("decode").pieces()
    assert [p.capturable for p in pieces] == [True, False] * 10 + [True]
    assert outside.session.bound("decode").uncapturable == ("acme/residual",) * 10
    assert tokens(outside) == expected


def test_what_can_be_captured_is_one_piece(vendor: Any) -> None:
    assert [p.capturable for p in vendor.session.bound("decode").pieces()] == [True]


PLANNED = {"raises_in_accepts": "ValueError: accepts is broken", "answers_nothing": "accepts() returned None",
           "raises_in_space": "ValueError: space is broken"}
JUDGED = {
    "raises_in_bind": (Cause.EXCEPTION, "bind: OSError: libacme.so was not found"),
    "binds_nothing": (Cause.CONTRACT, "bind() returned str; it must return a callable"),
    "raises_in_run": (Cause.EXCEPTION, "ValueError: run is broken"),
    "takes_other_operands": (Cause.EXCEPTION, "unexpected keyword argument 'aux0'"),
    "is_wrong": (Cause.TOLERANCE, ""),
    "returns_a_new_tensor": (Cause.TOLERANCE, ""),
    "writes_half": (Cause.TOLERANCE, ""),
    "writes_outside": (Cause.MEMORY_FAULT, "wrote outside: out"),
    "changes_its_input": (None, "changed: x"),
    "remembers_addresses": (None, ""),
    "aborts": (Cause.CRASH, ""),
}


def test_every_broken_one_is_refused_for_its_reason_and_the_model_is_right(acme: Installation, store: Store,
                                                                           expected: list[int]) -> None:
    catalog = acme.catalog("acme", set="broken")
    model = compiled(catalog, store, "handwritten")
    assert steps(model) == [] and tokens(model) == expected
    failures = {f.plugin: f.message for f in (*catalog.failures, *model.context.failures)}
    for name, message in PLANNED.items():
        assert message in failures[f"acme/{name}"]
    records = {r.step.implementation: r for r in model.compilation.records}
    assert records.keys() == {f"acme/{name}" for name in JUDGED}
    for name, (cause, message) in JUDGED.items():
        record = records[f"acme/{name}"]
        assert record.failure is not None and cause in (record.failure, None), (name, record.failure, record.message)
        assert record.message and message in record.message, (name, record.message)


class Repeated:
    """Stands for captured graphs in the chain's judge: runs the program, and "takes" less the more products are of vectors."""

    def __init__(self, bound: Any, states: Any, backend: Any) -> None:
        states.reset()
        bound.run()
        calls = [dict(s.step.schedule.items).get("call") for s in bound.program.segments if s.is_call]
        self.us = 100.0 - calls.count("vector")

    def sample_us(self) -> float:
        return self.us

    def wrong(self) -> str:
        return ""


def test_the_chain_judges_what_plugins_bind(vendor: Any, acme: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "CapturedVariant", Repeated)
    ctx = Context(catalog=acme.catalog("vendor"), target=vendor.context.target, config=Config(), store=Store(None))
    compilation = vendor.compilation
    regions = {r.signature: r for r in compilation.regions}
    records, candidates = [], []
    for record in compilation.records:  # as if both ways to call the library had been measured
        for call in ("matrix", "vector") if record.step.implementation == "vendor/linear" else ("",):
            step = evolve(record.step, schedule=Schedule({"call": call})) if call else record.step
            source = source_of(step, regions[record.signature].match_by_id[step.match_id], ctx.catalog, ctx.target)
            candidates.append(Candidate(signature=record.signature, step=step, source=source))
            passed = evolve(record.verdict, outcome=Outcome.PASS)
            records.append(evolve(record, step=step, source_digest=source.digest, verdict=passed, measurement=measurement(5.0)))
    found = Evaluated(candidates=tuple(candidates), records=tuple(records))
    alternatives = chain.alternatives_of(compilation.regions, compilation.selections, found, ctx)
    assert {a.selected.version for a in alternatives if a.selected} == {2}
    graph = next(g for g in compilation.graphs.graphs if g.kind is GraphKind.DECODE)
    question = ChainQuestion(graph=graph, regions=compilation.regions, selections=compilation.selections, alternatives=alternatives,
                             target=ctx.target, backend="emulation", position=8, margin=0.005, budget_s=60.0)
    session = SimpleNamespace(catalog=ctx.catalog, backend=lambda name: ctx.catalog.find("agentcompile_backends", name))
    answer = serial.loads(serial.dumps(judge.judge(serial.parse(serial.dumps(question)), session, lambda phase: None)), ChainAnswer)
    chosen = {str(s.step.schedule) for selection in answer.selections for s in selection.steps if s.step.implementation == "vendor/linear"}
    assert chosen == {"call=vector"}, "every product is taken as the chain says"
    assert 0 < answer.us < answer.first_us == answer.framework_us == 100.0
    session.catalog = acme.catalog()  # the plugin is gone: the question cannot be answered, and nothing is made up
    with pytest.raises(ContractError, match="vendor/linear version 2 is not installed"):
        judge.judge(serial.parse(serial.dumps(question)), session, lambda phase: None)


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_pieces_run_in_order_and_only_capturable_ones_are_captured(capturable: list[bool]) -> None:
    ran: list[tuple[int, str]] = []
    captured: list[int] = []

    def piece(number: int) -> Piece:
        return Piece(run=lambda: ran.append((number, "replayed" if number in captured else "run")), capturable=capturable[number])

    pieces = [piece(i) for i in range(len(capturable))]
    numbers = {p.run: i for i, p in enumerate(pieces)}

    def capture(run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1) -> Callable[[], None]:
        captured.append(numbers[run])
        return run

    step = record_program(SimpleNamespace(pieces=lambda: pieces), capture, warm_ups=0)
    assert captured == [i for i, yes in enumerate(capturable) if yes] and ran == []
    step()
    assert ran == [(i, "replayed" if yes else "run") for i, yes in enumerate(capturable)]


def counting_graph() -> Graph:
    """x -> x % 4 -> bincount (which asks the host) -> + 1."""
    spec = TensorSpec(shape=(4,), dtype=DType.I64)
    nodes = (Node(name="mod", op="aten.remainder.Scalar", kind="other", args=(Ref("x"), 4), outputs=("m",)),
             Node(name="count", op="aten.bincount.default", kind="other", args=(Ref("m"), None, 4), outputs=("c",)),
             Node(name="more", op="aten.add.Tensor", kind="add", args=(Ref("c"), 1), outputs=("out",)))
    values = (Value(name="x", spec=spec, kind=ValueKind.INPUT), *(Value(name=n, spec=spec) for n in ("m", "c", "out")))
    return Graph(name="count", kind=GraphKind.FORWARD, values=values, nodes=nodes, inputs=("x",), outputs=("out",)).verify()


def test_framework_operators_that_ask_the_host_are_cut_out_and_leave_their_results_where_a_graph_reads_them() -> None:
    x = torch.tensor([1, 5, 2, 3])
    bound = bind(framework_program(counting_graph()), WeightStore(torch.nn.Module(), "cpu"), {}, {"x": x}, Executables(device="cpu"))
    assert [(p.capturable, p.names) for p in bound.pieces()] == [(True, ("mod",)), (False, ("count",)), (True, ("more",))]
    bound.run()
    place = bound.environment["c"].data_ptr()
    assert bound.output(0).tolist() == [1, 3, 2, 2]
    x.copy_(torch.tensor([0, 0, 0, 7]))
    bound.run()
    assert bound.output(0).tolist() == [4, 1, 1, 2]
    assert bound.environment["c"].data_ptr() == place


def test_origins_follow_the_steps(vendor: Any, outside: Any) -> None:
    assert {s.origin for s in decode_calls(vendor)} == {Origin.THIRD_PARTY}
    assert {s.origin for s in decode_calls(outside)} == {Origin.HANDWRITTEN}
