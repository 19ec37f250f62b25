"""States of short convolutions and recurrences: declared, handed on through chunks of any length and steps, zero for every request."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve
from capture_models import TOKENS, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_capture_comparison import changed
from torch import nn

import agentcompile_core as ac
from agentcompile_core.cli import main
from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir import serial
from agentcompile_core.ir.graph import DType, Graph, GraphKind, GraphSet, Node, Symbol, Value, Workload, map_refs
from agentcompile_core.ops.aliasing import is_alias
from agentcompile_core.ops.operator_names import RECURRENCE
from agentcompile_core.ops.schema import with_argument
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.report.accounting import step_bytes
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session, plan_chunks
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages import analyze, plan
from agentcompile_core.stages.capture import language_model, recurrences
from agentcompile_core.stages.capture.comparison import difference
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.left_behind import as_it_was, undisturbed
from agentcompile_core.stages.capture.states import Held, StateSpec, check_states
from agentcompile_core.stages.capture.unsupported import Unsupported
from agentcompile_core.store import Store

CONTEXT, CHUNK, NEW = 24, 4, 3
SHORT: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
                         "max_position_embeddings": 64, "block_auto_adjust_ff_dim": False, **TOKENS}
MAMBA2: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "num_heads": 4, "head_dim": 8,
                          "n_groups": 1, "chunk_size": 4, **TOKENS}
MAMBA: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, **TOKENS}


def workload(dtype: DType = DType.F32) -> Workload:
    return Workload(dtype=dtype, max_context=CONTEXT, prefill_chunks=(CHUNK,))


def captured(model: nn.Module) -> GraphSet:
    graphs = capture_language_model(model, "tiny", workload())
    assert graphs.graphs, graphs.eager_reason
    return graphs


_recurrent: dict[tuple[str, bool], GraphSet] = {}


def captured_once(model: nn.Module, model_type: str) -> GraphSet:
    """The same for models of equal configurations: their graphs say nothing of what is in parameters."""
    key = model_type, bool(recurrences._OURS)
    if key not in _recurrent:
        _recurrent[key] = captured(model)
    return _recurrent[key]


def session(model: nn.Module, graphs: GraphSet) -> Session:
    assert graphs.kv is not None
    return Session(graphs, {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model, "cpu"), Executables(device="cpu"),
                   kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=PythonLoop())


def check_requests(model: nn.Module, graphs: GraphSet, lengths: list[int]) -> None:
    """Requests of one session, one after the other, give HuggingFace's tokens; so do the logits of the last prompt, fed one by one."""
    mine, generator = session(model, graphs), torch.Generator().manual_seed(sum(lengths))
    for length in lengths:
        prompt = torch.randint(3, 61, (1, length), generator=generator)
        wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        assert torch.equal(mine.generate(prompt, NEW), wanted), length
    with torch.no_grad():
        torch.testing.assert_close(mine.teacher_forced(prompt), model(prompt).logits[0], atol=1e-4, rtol=1e-4)


@settings(max_examples=2, derandomize=True, database=None, deadline=None)
@given(attends=st.lists(st.booleans(), min_size=1, max_size=2), width=st.integers(2, 5), biased=st.booleans(),
       lengths=st.lists(st.integers(1, CONTEXT - NEW), min_size=2, max_size=3))
def test_short_convolutions_give_hugging_faces_tokens(attends: list[bool], width: int, biased: bool, lengths: list[int]) -> None:
    """Any pattern of layers (one attends at least: transformers counts positions there), widths and prompts, the longest among them."""
    types = ["full_attention" if one else "conv" for one in attends] + (["conv"] if all(attends) else ["full_attention"])
    model = tiny("lfm2", {**SHORT, "num_hidden_layers": len(types), "layer_types": types, "conv_L_cache": width, "conv_bias": biased})
    graphs = captured(model)
    assert graphs.kv is not None and graphs.kv.layers == types.count("full_attention") and not graphs.whole_chunks
    assert {name: spec.shape for name, spec in graphs.states.items()} == {
        f"state.conv.{i}.0": (1, 16, width) for i, kind in enumerate(types) if kind == "conv"}
    check_requests(model, graphs, [*lengths, CONTEXT - NEW])


@pytest.fixture
def written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrences as models write them out, of which no operator is known."""
    monkeypatch.setattr(recurrences, "_OURS", {})


RECURRENT = pytest.mark.parametrize(("model_type", "options"), [("mamba2", MAMBA2), ("mamba", MAMBA)])


@RECURRENT
def test_recurrences_that_are_operators_take_padding(model_type: str, options: dict[str, Any]) -> None:
    """They are told how many rows are tokens. Mamba's forward forgets where a prompt goes on; without attention no layer has K."""
    model = tiny(model_type, options)
    graphs = captured_once(model, model_type)
    assert not graphs.whole_chunks and {g.name for g in graphs.graphs} == {"decode", "prefill_4", "prefill_4_fresh"}
    assert all(sum(node.op == RECURRENCE for node in g.nodes) == 1 for g in graphs.of_kind(GraphKind.PREFILL))
    assert not graphs.notes and graphs.kv is not None and graphs.kv.layers == 0
    assert difference(graphs, LoadedModel(module=model, name=model_type)) == ""
    check_requests(model, graphs, [1, CHUNK - 1, CHUNK, 2 * CHUNK + 3, CONTEXT - NEW])


@pytest.mark.parametrize("argument", ["valid", "state"])
@RECURRENT
def test_a_recurrence_that_is_not_told_of_padding_or_of_its_state_is_found(model_type: str, options: dict[str, Any], argument: str) -> None:
    model = slow(tiny(model_type, options))
    loaded, graphs = LoadedModel(module=model, name="m"), captured_once(model, model_type)
    for name in ("prefill_4", "prefill_4_fresh") if argument == "valid" else ("prefill_4",):
        other = tuple(evolve(g, nodes=tuple(with_argument(n, argument, None) if n.op == RECURRENCE else n for n in g.nodes))
                      if g.name == name else g for g in graphs.graphs)
        assert difference(evolve(graphs, graphs=other), loaded), name


@pytest.mark.usefixtures("written_out")
@RECURRENT
def test_recurrences_take_whole_chunks_or_single_tokens(model_type: str, options: dict[str, Any]) -> None:
    """Padding would change what is no operator."""
    model = tiny(model_type, options)
    graphs = captured_once(model, model_type)
    assert graphs.whole_chunks and {g.name for g in graphs.graphs} == {"decode", "prefill_4", "prefill_4_fresh"}
    assert not graphs.notes and graphs.kv is not None and graphs.kv.layers == 0
    assert difference(graphs, LoadedModel(module=model, name=model_type)) == ""
    check_requests(model, graphs, [1, CHUNK - 1, CHUNK, 2 * CHUNK + 3, CONTEXT - NEW])


@pytest.mark.usefixtures("written_out")
@pytest.mark.parametrize(("model_type", "options", "sizes"), [("mamba2", MAMBA2, {16, 40}), ("mamba", MAMBA, {8, 32})])
def test_small_chunks_of_recurrences_leave_few_tokens_to_the_steps(model_type: str, options: dict[str, Any], sizes: set[int]) -> None:
    """A loop over tokens stands in a graph once for each: those chunks are short, and a note says so."""
    model = tiny(model_type, options)
    graphs = capture_language_model(model, "m", Workload(dtype=DType.F32, max_context=64, prefill_chunks=(40, 1024)))
    assert {graph.tokens for graph in graphs.of_kind(GraphKind.PREFILL)} == sizes
    assert graphs.notes == (("prompts of mamba run 32 tokens at a time: a chunk of its graph grows with every token",)
                            if model_type == "mamba" else ())
    check_requests(model, graphs, [5, 33, 57])


def slow(model: nn.Module) -> nn.Module:
    """What it remembers decays by a few per cent with each token: all of a short prompt matters."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(-5.0)
    return model


@pytest.mark.parametrize("part", ["conv", "recurrent"])
@pytest.mark.usefixtures("written_out")
def test_a_chunk_that_forgets_a_state_is_found(part: str) -> None:
    model = slow(tiny("mamba2", MAMBA2))
    graphs, forgot = captured_once(model, "mamba2"), f"state.{part}.0.0"
    assert difference(graphs, LoadedModel(module=model, name="m")) == ""
    zeros = next(g for g in graphs.graphs if g.name == "prefill_4").spec(forgot)
    made = Node(name="forgotten", op="aten.zeros.default", kind="zeros", outputs=("forgotten",), kwargs=(
        ("dtype", Symbol("dtype", zeros.dtype.value)), ("device", Symbol("device", "model"))), args=(zeros.shape,))

    def forgetful(graph: Graph) -> Graph:
        if graph.name != "prefill_4":
            return graph
        nodes = [node if forgot in node.mutates else evolve(node, args=tuple(map_refs(a, {forgot: "forgotten"}) for a in node.args))
                 for node in graph.nodes]
        return evolve(graph, nodes=(made, *nodes), values=(*graph.values, Value(name="forgotten", spec=zeros))).verify()

    wrong = evolve(graphs, graphs=tuple(forgetful(graph) for graph in graphs.graphs))
    assert "hand on" in difference(wrong, LoadedModel(module=model, name="m"))


@pytest.fixture(scope="module")
def sizes() -> tuple[nn.Module, GraphSet]:
    model = tiny("mamba2", MAMBA2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrences, "_OURS", {})
        graphs = capture_language_model(model, "m", Workload(dtype=DType.F32, max_context=64, prefill_chunks=(4, 12, 40)))
    assert difference(graphs, LoadedModel(module=model, name="m")) == ""
    return model, graphs


@pytest.mark.parametrize("name", ["decode", *(f"prefill_{size}{kind}" for size in (4, 12, 16, 40) for kind in ("", "_fresh"))])
def test_a_change_of_one_whole_chunk_is_found(name: str, sizes: tuple[nn.Module, GraphSet]) -> None:
    model, graphs = sizes
    assert name in {graph.name for graph in graphs.graphs}
    other = changed(graphs, name, "aten.silu.default", "aten.tanh.default")
    assert difference(other, LoadedModel(module=model, name="m"))


def test_chunks_of_a_recurrence_that_go_on_otherwise_leave_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model does with a state when a prompt goes on is tried, and not believed."""
    monkeypatch.setattr(language_model, "continue_states", lambda graph, held: graph)
    model = slow(tiny("mamba", MAMBA))
    mine = ac.compile(model, device="cpu", run_on="framework", store=Store(None), validators=(), origins=[], max_context=2 * CONTEXT)
    assert {graph.name for graph in mine.graphs.graphs} == {"decode"}
    assert any("one token at a time: chunks of them compute something else" in note for note in mine.notes)
    prompt = torch.tensor([[5, 17, 9, 3, 42, 8, 8] * 5])
    wanted = model.generate(prompt, max_new_tokens=2, eos_token_id=None)
    assert torch.equal(mine.generate(prompt, 2, eos_token_id=None), wanted)


@pytest.fixture(scope="module")
def lfm2() -> nn.Module:
    return tiny("lfm2", {**SHORT, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]})


@pytest.fixture(scope="module")
def graphs(lfm2: nn.Module) -> GraphSet:
    return captured(lfm2)


def _writer(graph: Graph) -> Node:
    return next(node for node in graph.nodes if "state.conv.0.0" in node.mutates)


def test_a_graph_that_hands_on_another_state_is_found(lfm2: nn.Module, graphs: GraphSet) -> None:
    loaded = LoadedModel(module=lfm2, name="lfm2")
    assert difference(graphs, loaded) == ""
    for name in ("decode", "prefill_4", "prefill_4_fresh"):
        forgetful = tuple(evolve(g, nodes=tuple(n for n in g.nodes if n != _writer(g))) if g.name == name else g for g in graphs.graphs)
        found = difference(evolve(graphs, graphs=forgetful), loaded)
        assert "off by" in found, (name, found)


def test_each_state_has_one_writer(graphs: GraphSet) -> None:
    held = Held(attending=(1,), states=(StateSpec(layer=0, part="conv", index=0, spec=graphs.states["state.conv.0.0"]),))
    for graph in graphs.graphs:
        assert check_states(graph, held) is graph
        writer = _writer(graph)
        without = evolve(graph, nodes=tuple(n for n in graph.nodes if n != writer))
        again = evolve(graph, nodes=(*graph.nodes, evolve(writer, name="again", outputs=())))
        for wrong, times in ((without, 0), (again, 2)):
            with pytest.raises(Unsupported, match=f"writes the conv state of layer 0 {times} times in a step"):
                check_states(wrong, held)


def test_states_are_stored_with_the_graphs_and_count_in_the_step(graphs: GraphSet) -> None:
    assert serial.loads(serial.dumps(graphs), GraphSet).states == graphs.states
    bare = evolve(graphs, graphs=tuple(evolve(g, values=tuple(v for v in g.values if v not in g.kept)) for g in graphs.graphs))
    assert step_bytes(graphs, 5) - step_bytes(bare, 5) == 2 * 4 * 16 * 3


def test_a_bundle_serves_a_model_with_states(lfm2: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = torch.tensor([[5, 17, 9, 3, 42, 8, 8]])
    wanted = lfm2.generate(prompt, max_new_tokens=5, eos_token_id=None)
    mine = ac.compile(lfm2, device="cpu", run_on="framework", store=Store(None), validators=(), origins=[], max_context=CONTEXT)
    assert mine.graphs.states and torch.equal(mine.generate(prompt, 5, eos_token_id=None), wanted)
    mine.save(tmp_path / "bundle")
    loaded = ac.load(tmp_path / "bundle", lfm2, device="cpu")
    for _ in range(2):
        assert torch.equal(loaded.generate(prompt, 5, eos_token_id=None), wanted)
    assert main(["explain", str(tmp_path / "bundle")]) == 0
    assert "states: 1 of fixed size, 192 bytes in all" in capsys.readouterr().out


def test_attributes_that_a_trace_leaves_behind_are_named_and_taken_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weight, table = model[0].weight, torch.ones(2)
    model[0].state, model[0].table = None, table
    with pytest.raises(ZeroDivisionError), as_it_was(model) as left:
        model[0].state, model[0].table, model[1].new = torch.zeros(1), torch.zeros(2), torch.zeros(1)
        raise ZeroDivisionError
    assert left == ["0.state", "0.table", "1.new"]
    assert model[0].state is None and model[0].table is table and not hasattr(model[1], "new") and model[0].weight is weight


def test_parts_that_a_forward_replaces_are_put_back() -> None:
    """BigBird exchanges its attention where a prompt is short; so does a trace of it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = model
    with undisturbed(model):
        model[0], model[1].more = nn.Linear(3, 3), nn.ReLU()
    assert list(model) == [first, second] and not list(second.children())
    big = tiny("big_bird", {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                            "max_position_embeddings": 64, "is_decoder": True, **TOKENS, "pad_token_id": 0})
    parts = {path: id(part) for path, part in big.named_modules()}
    capture_language_model(big, "big_bird", workload())
    assert {path: id(part) for path, part in big.named_modules()} == parts and big.bert.attention_type == "block_sparse"


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(st.integers(1, 400), st.lists(st.integers(2, 60), max_size=3, unique=True), st.integers(0, 70), st.booleans())
def test_chunks_of_a_state_visit_every_position_once(prompt: int, sizes: list[int], slack: int, padded: bool) -> None:
    chunks, at = plan_chunks(prompt, sizes, prompt + slack, padded=padded, again=False), 0
    for chunk in chunks:
        assert chunk.start == at and 0 < chunk.length <= chunk.tokens and chunk.start + chunk.tokens <= prompt + slack
        assert chunk.tokens == 1 or (chunk.tokens in sizes and (padded or chunk.length == chunk.tokens))
        at += chunk.length
    assert at == prompt
    assert not padded or sum(c.tokens == 1 for c in chunks) < min(sizes, default=prompt + 1)


def test_lfm2_1_2b_is_planned_with_everything_behind_a_generated_kernel() -> None:
    """Its published shape in bfloat16, three of its layers (two convolutions, one attends)."""
    folder = Path(__file__).parents[1] / "benchmarks" / "configs" / "lfm2-1.2b"
    config = transformers.AutoConfig.from_pretrained(folder, num_hidden_layers=3, full_attn_idxs=[2])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found = capture_language_model(model.eval(), "lfm2", evolve(workload(DType.BF16), max_context=4096))
    graph = found.of_kind(GraphKind.DECODE)[0]
    ctx = Context(catalog=load_catalog(strict=True), target=PRESETS["h200"], config=Config(), store=Store(None))
    plans = plan.run(analyze.run(found, ctx), ctx)
    ours, moved = set(), 0
    for one in plans:
        matches = [one.region.match_by_id[name] for name in one.space.covers[0].matches]
        moved += sum(m.bytes_moved for m in matches) * len(one.region.instances)
        ours |= {dict(i.nodes)[name] for i in one.region.instances for m in matches for name in m.nodes}
    left = {node.op.split(".")[1] for node in graph.nodes if node.name not in ours and not is_alias(graph, node)}
    assert not left and list(found.states) == ["state.conv.0.0", "state.conv.1.0"]
    assert moved > 0.99 * step_bytes(found, 0)
