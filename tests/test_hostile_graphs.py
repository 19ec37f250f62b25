"""Graphs of a bundle that compute something else than its model, anywhere: at late positions, for rare numbers, by other weights."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core import api
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.graph import GraphSet
from agentcompile_core.ir.graph_difference import unlike_graphs
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.store import Store

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"
Document = dict[str, Any]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One that has the capture of the model."""
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def folder(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("hostile") / "b"
    shutil.copytree(tiny_bundle, found)
    return found


@pytest.fixture(scope="module")
def honest(tiny_bundle: Path) -> Document:
    return json.loads((tiny_bundle / "graphs.json").read_text())


@pytest.fixture(scope="module")
def served_honestly(folder: Path, honest: Document, store: Store) -> GraphSet:
    """What is served where nobody changed anything."""
    graphs: GraphSet = load(tampered(folder, honest), store).graphs
    return graphs


def copied(graphs: Document) -> Document:
    """In a fifth of the time that ``copy.deepcopy`` takes."""
    made: Document = json.loads(json.dumps(graphs))
    return made


def tampered(folder: Path, graphs: Document) -> Path:
    """The bundle with these graphs, all of whose nodes the framework runs, and its manifest made to agree."""
    programs = [{"graph": g["name"], "segments": [{"nodes": [n["name"] for n in g["nodes"]]}], "sources": []} for g in graphs["graphs"]]
    texts = {"graphs.json": json.dumps(graphs), "programs.json": json.dumps(programs)}
    manifest = json.loads((folder / "manifest.json").read_text()) | {name: graphs[name] for name in ("model", "workload")}
    for name, text in texts.items():
        (folder / name).write_text(text)
        next(e for e in manifest["files"] if e["path"] == name)["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def load(bundle: Path, store: Store, **options: Any) -> Any:
    return api.load(bundle, str(TINY), device="cpu", run_on="framework", store=store, **options)


def windowed(graphs: Document, rows: int) -> None:
    for node in (n for g in graphs["graphs"] for n in g["nodes"] if n["op"] == "agentcompile.attention.default"):
        node["args"] = [*node["args"][:7], rows, *node["args"][8:]]


def inserted(graphs: Document, behind: str, op: str, *args: Any) -> None:
    """A node between the first result of ``behind`` and everybody who reads it, in every graph."""
    for graph in graphs["graphs"]:
        at = next(i for i, n in enumerate(graph["nodes"]) if n["op"] == behind)
        made = graph["nodes"][at]["outputs"][0]
        for node in graph["nodes"][at + 1:]:
            text = json.dumps([node["args"], node["kwargs"]]).replace(json.dumps({"ref": made}), json.dumps({"ref": "other"}))
            node["args"], node["kwargs"] = json.loads(text)
        value = copy.deepcopy(next(v for v in graph["values"] if v["name"] == made))
        graph["values"].append({**value, "name": "other"})
        graph["nodes"].insert(at + 1, {**graph["nodes"][at], "name": "other", "op": op, "args": [{"ref": made}, *args], "kwargs": [],
                                       "outputs": ["other"], "mutates": []})


CHANGES: dict[str, Callable[[Document], object]] = {
    "a window that few tokens do not fill": lambda graphs: windowed(graphs, 12),
    "numbers are cut where they are rare": lambda graphs: inserted(graphs, "aten.silu.default", "aten.clamp.default", -16.0, 16.0),
    "another number that is hardly another": lambda graphs: inserted(graphs, "aten.silu.default", "aten.mul.Scalar", 1.0001),
    "no graph reads prompts": lambda graphs: graphs.update(graphs=[g for g in graphs["graphs"] if g["kind"] == "decode"]),
    "ids are not checked": lambda graphs: graphs["model"].update(vocab_size=0),
}


@pytest.mark.parametrize("what", CHANGES)
def test_graphs_that_are_not_the_models_are_refused(folder: Path, honest: Document, store: Store, what: str) -> None:
    """However seldom it shows: nothing that runs on a few tokens could tell."""
    graphs = copied(honest)
    CHANGES[what](graphs)
    bundle = tampered(folder, graphs)
    if what == "ids are not checked":  # facts of the model are the model's, whatever a bundle says
        assert load(bundle, store).graphs.model.vocab_size == honest["model"]["vocab_size"]
        assert load(bundle, store, trust_graphs=True).graphs.model.vocab_size == honest["model"]["vocab_size"]
        return
    with pytest.raises(UsageError) as caught:
        load(bundle, store)
    said = str(caught.value)
    assert "\n" not in said and str(bundle) in said and ("--trust-graphs" in said or "emit it again" in said), said


@pytest.mark.parametrize("source", ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_norm.weight"])
def test_what_is_read_under_the_name_of_something_else_is_refused(folder: Path, honest: Document, store: Store, source: str) -> None:
    """Also by who trusts its graphs: the comparison reads by names and programs by sources, which must be the same thing."""
    graphs = copied(honest)
    for value in (v for g in graphs["graphs"] for v in g["values"] if v["name"] == "model.layers.0.self_attn.q_proj.weight"):
        value["source"] = source
    for trusting in (False, True):
        with pytest.raises(UsageError, match="is read from"):
            load(tampered(folder, graphs), store, trust_graphs=trusting)


@pytest.mark.parametrize("change", [{"layers": 2**40}, {"capacity": 2**40}, {"capacity": 16}, {"kv_heads": 3}, {"head_dim": 1},
                                    {"layers": 1}])
def test_what_is_said_of_the_cache_is_what_graphs_read(folder: Path, honest: Document, store: Store, change: Document) -> None:
    """In a moment, and before anything is allocated."""
    graphs = copied(honest)
    graphs["kv"].update(change)
    for trusting in (False, True):
        with pytest.raises(UsageError, match="as the graphs say themselves"):
            load(tampered(folder, graphs), store, trust_graphs=trusting)


def test_who_trusts_graphs_has_them_compared_on_a_few_tokens(folder: Path, honest: Document, store: Store) -> None:
    rare, plain = copied(honest), copied(honest)
    windowed(rare, 12)
    inserted(plain, "aten.silu.default", "aten.mul.Scalar", 2.0)
    assert load(tampered(folder, rare), store, trust_graphs=True).graphs.graphs
    with pytest.raises(UsageError, match="compute something else"):
        load(tampered(folder, plain), store, trust_graphs=True)


def places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """(container, key) of every number and text of a document."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    found = [(value, key) for key in keys if isinstance(value[key], int | float | str)]
    return found + [place for key in keys if depth < 12 for place in places(value[key], depth + 1)]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_number_or_name_changed_is_refused_or_changes_nothing(folder: Path, honest: Document, store: Store, served_honestly: GraphSet,
                                                                  data: Any) -> None:
    """Of those that can be read: what is served are the graphs of the model."""
    graphs = copied(honest)
    among = places(graphs["graphs"]) + 40 * places({"kv": graphs["kv"], "workload": graphs["workload"]})
    container, key = data.draw(st.sampled_from(among), label="place")
    before = container[key]
    alike = [c[k] for c, k in among if type(c[k]) is type(before) and c[k] != before][:200]
    container[key] = data.draw(st.sampled_from([*alike, before * 2 if isinstance(before, int | float) else before]), label="instead")
    bundle = tampered(folder, graphs)
    try:
        read = bundle_reader.read(bundle)
        served = load(bundle, store)
    except UsageError as exc:
        assert "\n" not in str(exc)
    else:
        assert unlike_graphs(read.graphs, served.graphs) == "" == unlike_graphs(served_honestly, served.graphs)
