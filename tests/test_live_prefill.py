"""Prompts of any length through chunks that attend over what is cached: the module's logits and tokens, and pieces of the right kind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from agentcompile_runtime_cudagraph import CudaGraphRuntime
from attrs import evolve
from capture_models import GPT, SIZES, TOKENS, WINDOWED, greedy, tiny, without
from prompt_devices import GATED, RMS, ROPE, SUM, OverAll, Placing, WithLibrary
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, GraphKind, GraphSet, Workload
from agentcompile_core.ops import live_attention
from agentcompile_core.ops.operators import AttentionCall
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.live import NAME
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture import language_model
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.testing.doubles import ReplayingBackend

CONTEXT, SMALL, LARGE = 30, 4, 8
LENGTHS = (1, SMALL - 1, SMALL, SMALL + 1, LARGE, LARGE + 1, 2 * LARGE, 3 * LARGE + 2, CONTEXT - 1)
WORKLOAD = Workload(dtype=DType.F32, max_context=CONTEXT, prefill_chunks=(SMALL, LARGE))
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,  # groups of heads
    "llama": {**SIZES, "num_key_value_heads": 1},
    "mistral": WINDOWED,
    "gemma2": {**WINDOWED, "attn_logit_softcapping": 3.0},
    "gpt_oss": {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},  # sinks
    "llama4_text": {**SIZES, "num_local_experts": 2, "attention_chunk_size": 6, "intermediate_size_mlp": 48,
                    "no_rope_layers": [1, 0], "floor_scale": 4},  # chunks of positions
    "gemma4_text": {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16, "attention_k_eq_v": True,
                    "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},  # heads of two kinds
    "gpt2": GPT,
    "bloom": {"vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS},  # slopes
    "deepseek_v3": {**without("num_key_value_heads", "head_dim"), "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                    "v_head_dim": 12, "kv_lora_rank": 16, "q_lora_rank": 16, "first_k_dense_replace": 2},  # V of another width
}
_made: dict[str, tuple[nn.Module, GraphSet]] = {}


def captured(name: str) -> tuple[nn.Module, GraphSet]:
    if name not in _made:
        model = tiny(name, MODELS[name])
        graphs = capture_language_model(model, name, WORKLOAD)
        assert graphs.graphs, graphs.eager_reason
        _made[name] = model, graphs
    return _made[name]


WAYS: dict[str, Callable[[], Executables]] = {
    "loop": lambda: Executables(device="cpu"),
    "captured": lambda: Executables(device="cpu", backend=ReplayingBackend()),
    "library": lambda: Executables(device="cpu", backend=WithLibrary()),
    "placing": lambda: Executables(device="cpu", backend=Placing()),
    "over_all": lambda: Executables(device="cpu", backend=OverAll()),
    "capacity": lambda: Executables(device="cpu", backend=ReplayingBackend(), prefill="capacity"),
}


def session(name: str, way: str) -> Session:
    model, graphs = captured(name)
    assert graphs.kv is not None
    return Session(graphs, {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model, "cpu"), WAYS[way](),
                   kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=PythonLoop() if way == "loop" else CudaGraphRuntime())


def prompt_of(length: int) -> Tensor:
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length))


@cache
def logits_behind(name: str, length: int) -> Tensor:
    """The module's own, which are the same in every way."""
    model, _ = captured(name)
    with torch.inference_mode():
        return model(prompt_of(length), use_cache=False).logits[0, -1]


def check(name: str, mine: Session, length: int) -> None:
    """The logits behind a prompt are the module's, and so is the token that they say."""
    wanted = logits_behind(name, length)
    with torch.inference_mode():
        found = mine.prefill(prompt_of(length)).output(0)[0, -1]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.std()))
    assert int(mine.ids) == int(wanted.argmax()) and int(mine.position) == length


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories in several parts, and rows in several blocks, at these sizes too."""
    monkeypatch.setattr(live_attention, "LARGE", LARGE)
    monkeypatch.setattr(live_attention, "SCORES", 1)
    monkeypatch.setattr(live_attention, "PLAIN_SCORES", 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_any_length_give_the_modules_logits(name: str, way: str) -> None:
    mine = session(name, way)
    if way != "loop":
        mine.prepare()
    for length in (*LENGTHS, *reversed(LENGTHS)):  # each behind a longer one too: nothing of that is seen
        check(name, mine, length)


@pytest.mark.parametrize("way", ["library", "over_all"])
def test_rows_that_nothing_serves_are_attended_at_any_length(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, blocks, opened = session("mistral", way), live_attention._by_blocks, list[bool]()
    seen: list[bool] = []

    @contextmanager
    def any_length() -> Iterator[None]:
        opened.append(True)
        yield
        opened.pop()

    monkeypatch.setattr(type(mine.backend), "any_length", lambda self: any_length())
    monkeypatch.setattr(live_attention, "_by_blocks", lambda *given: (seen.append(bool(opened)), blocks(*given)))
    for length in LENGTHS:
        check("mistral", mine, length)
    assert len(seen) > 2 and all(seen) and not opened


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "llama4_text", "gemma4_text"])
def test_tokens_behind_long_prompts_are_huggingfaces(name: str) -> None:
    model, _ = captured(name)
    for way in WAYS:
        mine = session(name, way)
        for length in (LARGE + 1, 3 * LARGE):
            assert mine.generate(prompt_of(length), 4)[0, length:].tolist() == greedy(model, prompt_of(length), 4)[0]


@pytest.mark.parametrize("told", ["start", "last_row"])
@pytest.mark.parametrize("off", [-1, 1, 0], ids=["one-row-too-few", "one-row-too-many", "right"])
@pytest.mark.parametrize("way", ["captured", "library", "placing", "over_all"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "bloom"])
def test_a_length_that_is_one_row_off_is_found(name: str, way: str, off: int, told: str) -> None:
    mine = session(name, way)
    mine.prepare()
    live = mine._live
    assert live is not None

    class Off:
        """What the session tells reaches the programs, one number of it off by a row."""

        def __setattr__(self, one: str, number: int) -> None:
            setattr(live, one, max(0, number + off) if one == told else number)

    mine._live = Off()  # type: ignore[assignment]
    with nullcontext() if off == 0 else pytest.raises(AssertionError):
        for length in LENGTHS[:-2]:
            check(name, mine, length)


@pytest.mark.parametrize("way", ["captured", "library", "over_all"])
@pytest.mark.parametrize("fault", ["first", "last", "behind"])
def test_a_history_that_lacks_a_row_or_has_one_more_is_found(way: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = live_attention._cached

    def wrong(call: AttentionCall, first: int, last: int) -> tuple[Tensor, Tensor]:
        keys, values = right(call, first, last)
        if fault == "behind":
            keys, values = right(call, min(first + 1, last - 1), last)
        elif keys.shape[2] > LARGE or way == "captured":
            kept = slice(1, None) if fault == "first" else slice(0, -1)
            keys, values = keys.clone(), values.clone()
            gone = 0 if kept.start else -1
            keys[:, :, gone], values[:, :, gone] = 0.0, 0.0
        return keys, values

    mine = session("qwen3", way)
    monkeypatch.setattr(live_attention, "_cached", wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        for length in LENGTHS:
            check("qwen3", mine, length)


@pytest.mark.parametrize("name", MODELS)
def test_only_attention_of_later_chunks_is_outside_of_graphs(name: str) -> None:
    mine, whole = session(name, "captured"), session(name, "capacity")
    layers = captured(name)[1].kv.layers  # type: ignore[union-attr]
    for graph in captured(name)[1].graphs:
        chunk, later = graph.kind is GraphKind.PREFILL, graph.kind is GraphKind.PREFILL and not graph.name.endswith("_fresh")
        bound = mine.bound(graph.name)
        wanted = [True, *[False, True] * layers] if later else [True] * (1 + chunk)
        assert [piece.capturable for piece in bound.pieces()] == wanted
        closing = 2 if later else int(chunk)  # attention of the last layer, and all behind it
        assert [piece.closing for piece in bound.pieces()] == [False] * (len(wanted) - closing) + [True] * closing
        assert bound.uncapturable == ((NAME,) * layers if later else ())
        assert [piece.capturable for piece in whole.bound(graph.name).pieces()] == [True]


class Counting(OverAll):
    """It notes how many rows are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def attend_cached(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, **scores: Any) -> bool:
        self.rows.append(q.shape[2])
        return super().attend_cached(q, k, v, out, **scores)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("length, chunk", [(2 * LARGE, LARGE), (2 * LARGE - 1, LARGE), (LARGE + 2, SMALL)])
def test_behind_the_first_chunk_the_last_layer_attends_with_one_row(name: str, length: int, chunk: int,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "counting", lambda: Executables(device="cpu", backend=Counting()))
    mine = session(name, "counting")
    check(name, mine, length)
    backend, layers = mine.backend, mine.graphs.kv.layers  # type: ignore[union-attr]
    assert isinstance(backend, Counting)
    backend.rows.clear()
    check(name, mine, length)
    assert backend.rows[-layers:] == [chunk] * (layers - 1) + [1]


def test_what_nothing_reads_any_more_is_dropped() -> None:
    """Between pieces memory is used again, as within one: of a program that ran only results and what runs from Python stay."""
    mine = session("qwen3", "library")
    for length in LENGTHS:
        check("qwen3", mine, length)
    for graph in captured("qwen3")[1].of_kind(GraphKind.PREFILL):
        # As the last chunk: one that others follow leaves what the rest of its program would read.
        check("qwen3", mine, graph.tokens + (0 if graph.name.endswith("_fresh") else LARGE))
        attended = {n.outputs[0] for n in graph.nodes if n.kind == "attention"}
        made = {o for n in graph.nodes for o in n.outputs} - set(graph.outputs)
        kept = {name for name in made & mine.bound(graph.name).environment.keys() if name not in attended}
        views = {n.outputs[0] for n in graph.nodes if n.kind == "view"}
        assert kept <= views, "an intermediate stays alive behind its last reader"


def test_bodies_of_the_device_are_called_in_chunks_and_nowhere_else() -> None:
    backend = WithLibrary()
    model, graphs = captured("qwen3")
    assert graphs.kv is not None
    mine = Session(graphs, {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model, "cpu"),
                   Executables(device="cpu", backend=backend), kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=PythonLoop())
    mine.generate(prompt_of(LARGE), 4)
    assert backend.merged == 0
    layers = graphs.kv.layers
    assert backend.calls == {(RMS,): 4 * layers + 1, GATED: layers, (ROPE,): 2 * layers}
    with torch.inference_mode():
        mine.prefill(prompt_of(3 * LARGE))  # a history of one chunk, then of two
    assert backend.merged == 2 * (layers - 1) * 2, "the last layer does not attend where another chunk follows, else with one row at once"


@pytest.mark.parametrize("name", MODELS)
def test_chunks_that_others_follow_run_nothing_that_only_the_last_one_needs(name: str) -> None:
    mine = session(name, "captured")
    ran: list[str] = []
    names = [graph.name for graph in captured(name)[1].of_kind(GraphKind.PREFILL)]
    for graph_name in names:
        step = mine.step(graph_name)

        def opening(graph_name: str = graph_name, whole: Any = step) -> None:
            ran.append(f"{graph_name} opening")
            whole.opening()

        def run(graph_name: str = graph_name, whole: Any = step) -> None:
            ran.append(graph_name)
            whole()

        run.opening = opening  # type: ignore[attr-defined]
        mine._steps[graph_name] = run
    for length in LENGTHS:
        ran.clear()
        check(name, mine, length)
        chunks = [one for one in ran if one]
        assert all(one.endswith(" opening") for one in chunks[:-1])
        assert not chunks or not chunks[-1].endswith(" opening")


HEADS = {  # of queries, keys and values: whether they are normed and turned on their way
    "qwen3": ((True, True), (True, True), (False, False)), "llama": ((False, True), (False, True), (False, False)),
    "gemma2": ((False, True), (False, True), (False, False)), "gpt2": ((False, False),) * 3}


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_placed_in_one_go_with_what_comes_before(name: str) -> None:
    backend = Placing()
    model, graphs = captured(name)
    assert graphs.kv is not None
    mine = Session(graphs, {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model, "cpu"),
                   Executables(device="cpu", backend=backend), kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=PythonLoop())
    layers = graphs.kv.layers
    for length, chunks in ((LARGE, 1), (3 * LARGE, 3)):
        backend.placed.clear()
        backend.calls.clear()
        mine.prefill(prompt_of(length))
        assert backend.placed == {HEADS[name]: layers * chunks}
        assert (ROPE,) not in backend.calls
        norms = {"qwen3": 2 * layers, "llama": 2 * layers, "gemma2": 2 * layers, "gpt2": 0}[name]
        left_out = (chunks - 1) * min(norms, 2)  # behind the attention of the last layer, where other chunks follow
        assert backend.calls[SUM] == chunks * norms - left_out, "each sum is normed once, by what comes behind it or the last norm"


def one_layer(name: str) -> dict[str, Any]:
    """What is asked of each call of attention, one layer can answer, but where layers are of two kinds."""
    options = MODELS[name]
    several = name in ("gemma2", "gpt_oss", "llama4_text", "gemma4_text")
    return options if several else {key: 1 if key in ("num_hidden_layers", "n_layer", "first_k_dense_replace") else value
                                    for key, value in options.items()}


def test_large_chunks_are_not_for_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the results of all experts that it chose in memory."""
    monkeypatch.setattr(language_model, "MOST_WITH_EXPERTS", SMALL)
    for name, sizes in (("gpt_oss", {SMALL}), ("qwen3", {SMALL, LARGE})):
        graphs = capture_language_model(tiny(name, one_layer(name)), name, WORKLOAD)
        assert {g.tokens for g in graphs.of_kind(GraphKind.PREFILL)} == sizes


def test_the_largest_chunks_are_for_attention_by_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere all scores of a chunk may lie in memory: under soft caps, windows, sinks, slopes, widths that differ, in fp32."""
    monkeypatch.setattr(language_model, "MOST_WITH_SCORES", SMALL)
    half = {name: evolve(WORKLOAD, dtype=DType.F16) for name in MODELS}
    for name, workload in (*half.items(), ("qwen3", WORKLOAD)):
        dtype = torch.float16 if workload.dtype is DType.F16 else torch.float32
        graphs = capture_language_model(tiny(name, one_layer(name), dtype), name, workload)
        large = name in ("qwen3", "llama", "gpt2") and dtype is torch.float16
        assert {g.tokens for g in graphs.of_kind(GraphKind.PREFILL)} == ({SMALL, LARGE} if large else {SMALL}), name


def test_warm_ups_leave_no_trace() -> None:
    mine = session("qwen3", "placing")
    generator = torch.Generator().manual_seed(0)
    for tensor in mine.states.values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * 7)
    before = {name: tensor.clone() for name, tensor in mine.states.items()}
    mine.prepare()
    assert all(torch.equal(tensor, before[name]) for name, tensor in mine.states.items())
