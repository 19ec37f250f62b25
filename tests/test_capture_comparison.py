"""A graph that computes something else than its module is never served: it is made anew, or the framework runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from capture_models import SIZES, WORKLOAD, tiny
from torch import nn

from agentcompile_core import api
from agentcompile_core.ir import serial
from agentcompile_core.ir.graph import DType, Graph, GraphSet, Workload
from agentcompile_core.ops.operator_names import ATTENTION
from agentcompile_core.ops.schema import with_argument
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.stages.capture import comparison, comparison_exact, recurrences
from agentcompile_core.stages.capture.chunk_sizes import derived, fresh_variant, telling
from agentcompile_core.stages.capture.comparison import difference
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles

CATALOG = load_catalog(only=())
X = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)


class SwappedStore(Store):
    """A store whose captures were changed: valid text, another operator."""

    def text(self, kind: str, key: str) -> str | None:
        found = super().text(kind, key)
        return found and found.replace("aten.relu.default", "aten.tanh.default")


def compiled(module: nn.Module, store: Store) -> api.CompiledModel:
    return api.compile(module, device="cpu", store=store, catalog=CATALOG, example_inputs=(X,))


def test_a_changed_capture_in_the_store_is_found_said_and_replaced() -> None:
    store = SwappedStore(None)
    compiled(nn.ReLU(), store)
    made = compiled(nn.ReLU(), store)
    assert torch.equal(made(X), X.relu())
    assert any("made anew" in note for note in made.notes) and "aten.relu" in serial.dumps(made.graphs)
    assert any("made anew" in failure.message for failure in made.context.failures)


def test_what_export_gets_wrong_runs_on_the_framework() -> None:
    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh() if torch.compiler.is_compiling() else x.relu()

    store = Store(None)
    made = compiled(Other(), store)
    assert torch.equal(made(X), X.relu())
    assert "compute something else" in made.graphs.eager_reason and any("runs on the framework" in note for note in made.notes)
    assert "text-capture" not in store.describe() and len(made.context.failures) == 1


def changed(graphs: GraphSet, name: str, old: str, new: str) -> GraphSet:
    """The graphs with one of them read from changed text."""
    def swap(graph: Graph) -> Graph:
        text = serial.dumps(graph)
        assert graph.name != name or old in text
        return serial.loads(text.replace(old, new), Graph) if graph.name == name else graph

    return evolve(graphs, graphs=tuple(map(swap, graphs.graphs)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny("llama", SIZES)


@pytest.fixture(scope="module")
def graphs(model: nn.Module) -> GraphSet:
    return capture_language_model(model, "llama", WORKLOAD)


@pytest.mark.parametrize("name", ["decode", "prefill_8", "prefill_8_fresh"])
@pytest.mark.parametrize(("old", "new"), [
    ("aten.silu.default", "aten.tanh.default"), ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")])
def test_a_change_in_any_graph_of_a_model_is_found(model: nn.Module, graphs: GraphSet, name: str, old: str, new: str) -> None:
    loaded = LoadedModel(module=model, name="llama")
    assert difference(graphs, loaded) == ""
    assert difference(changed(graphs, name, old, new), loaded)


@pytest.fixture(scope="module")
def sizes(model: nn.Module) -> GraphSet:
    return capture_language_model(model, "llama", evolve(WORKLOAD, prefill_chunks=(4, 6, 8, 12)))


@pytest.mark.parametrize("name", [f"prefill_{size}{suffix}" for size in (4, 6, 8, 12) for suffix in ("", "_fresh")])
def test_a_change_of_one_size_is_found_and_sizes_that_follow_from_others_are_not_run(name: str, model: nn.Module, sizes: GraphSet) -> None:
    loaded, size = LoadedModel(module=model, name="llama"), int(name.split("_")[1])
    assert telling(sizes) == (4, 12) and difference(sizes, loaded) == ""
    other = changed(sizes, name, "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert size in telling(other) and difference(other, loaded)


def with_number(graph: Graph, node: int, index: int, number: object) -> Graph:
    """``graph`` with another number, or numbers, as an argument of one node."""
    args = list(graph.nodes[node].args)
    args[index] = number
    return evolve(graph, nodes=(*graph.nodes[:node], evolve(graph.nodes[node], args=tuple(args)), *graph.nodes[node + 1:]))


def on_another_line(sizes: GraphSet) -> Iterator[GraphSet]:
    """The sizes with each kind of number that follows the size grown twice as fast in all of them but the smallest, one at a time."""
    chunks = {graph.name: graph for graph in sizes.graphs}
    first, last, seen = chunks["prefill_4"], chunks["prefill_12"], set()
    for at, (low, high) in enumerate(zip(first.nodes, last.nodes, strict=True)):
        for index, (small, large) in enumerate(zip(low.args, high.args, strict=True)):
            if small == large or (low.op, index) in seen:
                continue
            seen.add((low.op, index))
            more = tuple(b + (b != a) * 8 for a, b in zip(small, large, strict=True)) if isinstance(large, tuple) else large + 8
            line = {size: derived(first, with_number(last, at, index, more), size) for size in (6, 8)}
            line[12] = with_number(last, at, index, more)
            made = {graph.name: graph for one in line.values() for graph in (one, fresh_variant(one))}
            yield evolve(sizes, graphs=tuple(made.get(graph.name, graph) for graph in sizes.graphs))


def test_what_is_wrong_on_a_line_of_sizes_is_seen_where_two_of_them_are_run(model: nn.Module, sizes: GraphSet,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, others = LoadedModel(module=model, name="llama"), list(on_another_line(sizes))
    assert len(others) > 2 and {telling(other) for other in others} == {(4, 12)}
    found = [bool(difference(other, loaded)) for other in others]
    monkeypatch.setattr(comparison, "telling", lambda graphs, between: (4, 6, 8, 12))
    assert found == [bool(difference(other, loaded)) for other in others] and any(found)


@pytest.mark.parametrize("slope", [-1, 1])
def test_a_window_on_a_line_of_sizes_is_seen(slope: int) -> None:
    """It is wrong at the largest size by most, where it may be the first that it is wrong for."""
    model = tiny("mistral", {**SIZES, "sliding_window": 20})
    right = capture_language_model(model, "mistral", evolve(WORKLOAD, max_context=64, prefill_chunks=(4, 6, 8, 12)))

    def moved(graph: Graph) -> Graph:
        window = 20 + slope * 2 * (graph.tokens - 4)
        nodes = tuple(with_argument(node, "window", window) if node.op == ATTENTION else node for node in graph.nodes)
        return evolve(graph, nodes=nodes) if graph.tokens > 1 else graph

    wrong, loaded = evolve(right, graphs=tuple(map(moved, right.graphs))), LoadedModel(module=model, name="mistral")
    assert wrong != right and telling(wrong) == telling(right) == (4, 12)
    assert not difference(right, loaded) and bool(difference(wrong, loaded)) == (slope < 0)


@pytest.mark.parametrize("missing", ["prefill_4", "prefill_12", "prefill_6_fresh"])
def test_sizes_follow_from_whole_graphs_alone(missing: str, sizes: GraphSet) -> None:
    found = telling(evolve(sizes, graphs=tuple(graph for graph in sizes.graphs if graph.name != missing)))
    assert found == ((4, 6, 12) if missing == "prefill_6_fresh" else (4, 6, 8, 12))


def test_whole_chunks_are_all_run(sizes: GraphSet) -> None:
    assert telling(evolve(sizes, whole_chunks=True)) == (4, 6, 8, 12)


def test_a_graph_that_cannot_run_is_different(model: nn.Module, graphs: GraphSet) -> None:
    loaded = LoadedModel(module=model, name="m")
    assert "could not be compared" in difference(changed(graphs, "decode", "aten.silu.default", "os.system"), loaded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_compared_widened(dtype: torch.dtype) -> None:
    model = tiny("qwen3", SIZES, dtype)
    workload = evolve(WORKLOAD, dtype=serial.structure(str(dtype).removeprefix("torch."), type(WORKLOAD.dtype)))
    graphs, loaded = capture_language_model(model, "qwen3", workload), LoadedModel(module=model, name="m")
    assert graphs.graphs and difference(graphs, loaded) == ""
    assert next(model.parameters()).dtype is dtype
    model.model.layers[1].self_attn.scaling *= 1.002  # far below what half precision resolves
    assert difference(graphs, loaded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_that_halves_computed_and_a_cast_made_float32_err_as_halves(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba's: in float32, but no nearer than their half precision; what else they might be is told by the widened copy alone."""
    model = tiny("mamba", {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, dtype)
    workload = evolve(WORKLOAD, dtype=serial.structure(str(dtype).removeprefix("torch."), type(WORKLOAD.dtype)))
    for matrix in (parameter for parameter in model.parameters() if parameter.dim() > 1):
        matrix.data.div_(8.0)  # layers that are not decided by one number each
    with monkeypatch.context() as patch:
        patch.setattr(recurrences, "_OURS", {})
        graphs, loaded = capture_language_model(model, "mamba", workload), LoadedModel(module=model, name="m")
    with torch.no_grad():
        assert model(torch.tensor([[1, 2]])).logits.dtype is torch.float32
    assert graphs.graphs and difference(graphs, loaded) == ""
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "_widened", lambda module: None)
        assert difference(graphs, loaded) == "", "float64 tells honest roundings from wrong ones where there is no memory for a copy"
        patch.setattr(comparison_exact, "difference", raising)
        assert difference(graphs, loaded), "nothing tells them"
    model.backbone.layers[1].norm.variance_epsilon += 2e-3  # far below what half precision resolves
    assert difference(graphs, loaded)
    monkeypatch.setattr(comparison, "_widened", lambda module: None)
    assert "in float64 its result is off by" in difference(graphs, loaded)


def raising(*_: object) -> str:
    raise torch.OutOfMemoryError("80 GiB")


def test_nothing_is_left_behind(model: nn.Module, graphs: GraphSet) -> None:
    model.train()
    random, weights = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    try:
        assert difference(graphs, LoadedModel(module=model, name="m")) == ""
        assert model.training and model.model.layers[0].training
    finally:
        model.eval()
    assert torch.equal(random, torch.get_rng_state()) and all(map(torch.equal, weights, model.parameters()))


def test_a_short_context_is_compared_too(model: nn.Module) -> None:
    workload = Workload(dtype=WORKLOAD.dtype, max_context=2, prefill_chunks=(2,))
    graphs = capture_language_model(model, "llama", workload)
    loaded: Any = LoadedModel(module=model, name="m")
    assert difference(graphs, loaded) == "" and difference(changed(graphs, "decode", "aten.silu.default", "aten.tanh.default"), loaded)


def test_a_bundle_with_other_graphs_is_refused(tmp_path: Path) -> None:
    made = compiled(nn.ReLU(), Store(None))
    folder = made.save(tmp_path / "bundle")
    import hashlib
    import json

    text = (folder / "graphs.json").read_text().replace("aten.relu.default", "aten.tanh.default")
    (folder / "graphs.json").write_text(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    next(e for e in manifest["files"] if e["path"] == "graphs.json")["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert bundle_reader.read(folder)
    for trusting, said in ((False, r"are not what is captured of ReLU here: the node relu of its graph forward is another one; compile"),
                           (True, r"compute something else than ReLU.*compile ReLU again")):
        with pytest.raises(api.UsageError, match=said):
            api.load(folder, nn.ReLU(), device="cpu", catalog=CATALOG, example_inputs=(X,), trust_graphs=trusting)


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 1.0001, 1.01), ("float16", 1.01, 1.05), ("bfloat16", 1.1, 1.3)])
def test_a_program_beyond_the_budget_is_found(dtype: str, least: float, most: float) -> None:
    """Also where the result is float32: a state or logits that are computed from narrower numbers err as those."""
    from agentcompile_core.installation import program_check

    _, graph = doubles.fake_match(4)
    first, *others = graph.values
    narrow = evolve(graph, values=(evolve(first, spec=evolve(first.spec, dtype=DType(dtype))), *others))
    for kind in (torch.float32, getattr(torch, dtype)):
        wanted = torch.ones(4, dtype=kind)
        assert program_check._beyond(wanted * most, wanted, program_check._bound(narrow))
        assert not program_check._beyond(wanted * least, wanted, program_check._bound(narrow))
