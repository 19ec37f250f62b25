"""Batches by steps of several rows: the tokens of single rows, whatever is beside them, or single rows themselves and the reason."""

from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve
from capture_models import CONTEXT, GPT, SIZES, WINDOWED, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import agentcompile_core.runtime.rows as rows_module
import agentcompile_core.runtime.rows_program as rows_program_module
from agentcompile_core import compile
from agentcompile_core.errors import UsageError
from agentcompile_core.ops.rows import NoRows, rows_graph
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.runtime.framework_session import EagerSession
from agentcompile_core.runtime.row_buffers import rows_of_operands
from agentcompile_core.store import Store

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", SIZES), "llama": ("llama", SIZES), "gemma2": ("gemma2", {**WINDOWED, "query_pre_attn_scalar": 8}),
    "llama4": ("llama4_text", {**SIZES, "num_local_experts": 2, "attention_chunk_size": 6, "intermediate_size_mlp": 48,
                               "no_rope_layers": [1, 0], "floor_scale": 4}),
    "gemma4": ("gemma4_text", {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16,
                               "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}),
    "granite": ("granite", SIZES), "gpt2": ("gpt2", GPT), "phi3": ("phi3", SIZES), "olmo2": ("olmo2", SIZES),
}

# Batches are a session's matter: no kernels are searched for, and nothing of the user's cache is read.
ALONE: dict[str, Any] = {"run_on": "framework", "validators": (), "origins": (), "store": Store(None)}


@cache
def compiled(name: str) -> Any:
    """A tiny model on the framework's operators, on the CPU."""
    return compile(tiny(*MODELS[name]), max_context=CONTEXT, **ALONE)


def generated(model: Any, prompts: list[list[int]], when: str, **options: Any) -> torch.Tensor:
    """What ``generate`` makes of a batch with steps of several rows always or never."""
    model.session.rows.when = when
    return model.generate(prompts, **options)


def seen(model: Any) -> int:
    """How many sizes of steps were made and are right."""
    return sum(step is not None for step in model.session.rows._made.values())


prompts_of_batches = st.lists(st.lists(st.integers(3, 127), min_size=1, max_size=12), min_size=2, max_size=9)


@settings(max_examples=12, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(MODELS)), prompts=prompts_of_batches, count=st.integers(1, 14), eos=st.integers(-1, 127))
def test_rows_of_a_batch_have_the_tokens_of_single_rows(name: str, prompts: list[list[int]], count: int, eos: int) -> None:
    model = compiled(name)
    options = {"max_new_tokens": count, "eos_token_id": None if eos < 0 else eos, "pad_token_id": 0}
    wanted = generated(model, prompts, "never", **options)
    assert torch.equal(generated(model, prompts, "always", **options), wanted)
    assert not model.session.rows.notes
    assert seen(model) or count == 1


@pytest.mark.parametrize("name", sorted(MODELS))
def test_eos_of_every_row_is_at_its_own_place(name: str) -> None:
    model = compiled(name)
    prompts = [[5, 6, 7], [9], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49], [100, 3]]
    free = generated(model, prompts, "never", max_new_tokens=10, eos_token_id=None)
    ends = sorted({int(free[0, -8]), int(free[2, -5])})
    options = {"max_new_tokens": 10, "eos_token_id": ends, "pad_token_id": 0}
    assert torch.equal(generated(model, prompts, "always", **options), generated(model, prompts, "never", **options))


def test_neighbours_and_order_say_nothing_about_a_row() -> None:
    model = compiled("qwen3")
    rows = [[5, 6, 7], [9, 8, 7], [40, 41, 42], [100, 3, 3]]
    together = generated(model, rows, "always", max_new_tokens=12, eos_token_id=None)
    turned = generated(model, rows[::-1], "always", max_new_tokens=12, eos_token_id=None)
    assert torch.equal(turned.flip(0), together)
    for first, row in enumerate(rows):
        beside = [row, *([[77, 78, 79]] * 3)]
        assert torch.equal(generated(model, beside, "always", max_new_tokens=12, eos_token_id=None)[0], together[first])


def test_a_batch_to_the_end_of_the_context_and_one_after_it() -> None:
    model = compiled("llama")
    long, short = [list(range(3, 23)), [9]], [[3], [4], [5]]
    for prompts, count in ((long, CONTEXT - 20), (short, 4), (long, 3)):
        options = {"max_new_tokens": count, "eos_token_id": None}
        assert torch.equal(generated(model, prompts, "always", **options), generated(model, prompts, "never", **options))


def test_left_padding_by_a_mask_is_no_part_of_a_row() -> None:
    model = compiled("granite")
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    found = generated(model, ids, "always", attention_mask=mask, max_new_tokens=6, eos_token_id=None)  # type: ignore[arg-type]
    for row, prompt in enumerate(([5, 6], [7, 8, 9, 10])):
        assert torch.equal(found[row, 4:], model.generate([prompt], max_new_tokens=6, eos_token_id=None)[0, len(prompt) :])


def test_caches_of_rows_leave_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compile(tiny(*MODELS["llama"]), max_context=CONTEXT, **ALONE)
    each = sum(tensor.nbytes for tensor in (*model.session.kv.keys, *model.session.kv.values))
    wanted = generated(model, [[3], [4]], "never", max_new_tokens=3, eos_token_id=None)
    for free, made in ((4 * each - 2, 0), (4 * each, 1)):
        monkeypatch.setattr(rows_module, "free_bytes", lambda device, free=free: free - each * len(model.session.rows._caches))
        model.session.rows._made.clear()
        assert torch.equal(generated(model, [[3], [4]], "always", max_new_tokens=3, eos_token_id=None), wanted)
        assert seen(model) == made == len(model.session.rows._caches) // 2
    assert "memory did not suffice" in model.session.rows.notes[0] and len(model.session.rows.notes) == 1


def test_a_step_is_made_when_batches_have_asked_for_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their size; not for a single token, where no step runs."""
    model = compile(tiny(*MODELS["llama"]), max_context=CONTEXT, **ALONE)
    monkeypatch.setattr(rows_module.Rows, "_may", lambda self: True)
    monkeypatch.setattr(rows_module, "WORTH", 12)
    made = []
    for prompts, count in (([[3], [4]], 5), ([[3], [4], [5]], 11), ([[3], [4]], 6), ([[3], [4]], 1), ([[3], [4]], 2)):
        model.generate(prompts, max_new_tokens=count, eos_token_id=None)
        made.append(sorted(size for size, _ in model.session.rows._made))
    assert made == [[], [], [], [], [2]]
    assert generated(model, [[3], [4]], "always", max_new_tokens=1, eos_token_id=None).shape == (2, 2)


def test_on_a_processor_single_rows_are_the_default() -> None:
    model = compile(tiny(*MODELS["llama"]), max_context=CONTEXT, **ALONE)
    model.generate([[3], [4]], max_new_tokens=3, eos_token_id=None)
    assert model.session.rows._made == {}


@pytest.mark.parametrize("where", ["position", "cache", "norms"])
def test_a_step_that_is_not_right_is_refused_and_the_tokens_stay(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def broken(graph: Any, rows: int, apart: Any = ()) -> Any:
        """Row 1 reads the position of row 0, its cache, or the norms of all rows are wrong."""
        found = rows_graph(graph, rows, apart)
        first, second = found.names[0], found.names[1]
        position = next(v.name for v in graph.values if v.source == "session.position")
        cached = next(v.name for v in graph.values if v.source == "kv.key.0")
        name = position if where == "position" else cached
        if where == "norms":
            nodes = [evolve(n, args=tuple(0.5 if a == 1e-6 else a for a in n.args)) if n.op.startswith("agentcompile.rms_norm") else n
                     for n in found.graph.nodes]
        else:
            def of_first(argument: Any) -> Any:
                return evolve(argument, value=first[name]) if getattr(argument, "value", "") == second[name] else argument

            nodes = [evolve(n, args=tuple(map(of_first, n.args)), mutates=tuple(first[name] if m == second[name] else m for m in n.mutates))
                     for n in found.graph.nodes]
        return evolve(found, graph=evolve(found.graph, nodes=tuple(nodes)))

    monkeypatch.setattr(rows_program_module, "rows_graph", broken)
    model = compile(tiny(*MODELS["qwen3"]), max_context=CONTEXT, **ALONE)
    prompts = [[5, 6, 7], [9], [40, 41]]
    wanted = generated(model, prompts, "never", max_new_tokens=5, eos_token_id=None)
    assert torch.equal(generated(model, prompts, "always", max_new_tokens=5, eos_token_id=None), wanted)
    assert not seen(model)
    assert "is not right" in model.session.rows.notes[0]


def test_states_of_fixed_size_keep_the_loop_and_say_so() -> None:
    options = {**{k: v for k, v in SIZES.items() if k != "head_dim"}, "layer_types": ["conv", "full_attention"], "block_dim": 32,
               "block_ff_dim": 48, "conv_L_cache": 3, "block_multiple_of": 8}
    model = compile(tiny("lfm2", options), max_context=CONTEXT, **ALONE)
    assert model.graphs.states
    wanted = generated(model, [[5, 6], [7]], "never", max_new_tokens=4, eos_token_id=None)
    assert torch.equal(generated(model, [[5, 6], [7]], "always", max_new_tokens=4, eos_token_id=None), wanted)
    assert "states of fixed size" in model.session.rows.notes[0]


def test_products_norms_and_sums_are_made_once_for_all_rows() -> None:
    for name in ("qwen3", "llama", "gemma2", "granite", "phi3", "olmo2", "gpt2"):
        graph = compiled(name).session._programs["decode"].graph
        found = rows_graph(graph, 4)
        copied = {node.op for node in found.graph.nodes if ".row" in node.name}
        assert copied == {"agentcompile.attention.default", "aten.slice.Tensor"}
        linear = [sum(node.op == "aten.linear.default" for node in one.nodes) for one in (graph, found.graph)]
        assert linear[0] == linear[1]


@settings(max_examples=40, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 10**6), share=st.sampled_from((0.05, 0.3, 0.9)))
def test_whichever_nodes_are_copied_rows_have_the_tokens_of_single_ones(name: str, seed: int, share: float) -> None:
    """A copied view of rows that were made together raised, since their elements lie apart."""
    model, prompts = compiled(name), [[5, 6, 7], [9], [40, 41, 42]]
    graph = model.session._programs["decode"].graph
    random = Random(seed)
    copied = {node.name for node in graph.nodes if random.random() < share and not set(node.outputs) & set(graph.outputs)}
    wanted = generated(model, prompts, "never", max_new_tokens=4, eos_token_id=None)
    rows = model.session.rows
    kept, rows._made = rows._made, {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows_program_module, "rows_graph", lambda graph, count, apart: rows_graph(graph, count, {*apart, *copied}))
            assert torch.equal(generated(model, prompts, "always", max_new_tokens=4, eos_token_id=None), wanted)
            assert seen(model) and not rows.notes
    finally:
        rows._made, rows.notes = kept, ()


def test_a_graph_that_writes_what_is_no_cache_has_none() -> None:
    graph = compiled("qwen3").session._programs["decode"].graph
    add = next(node for node in graph.nodes if node.op == "aten.add.Tensor")
    written = evolve(add, mutates=(add.inputs[0],))
    with pytest.raises(NoRows, match="in place"):
        rows_graph(evolve(graph, nodes=tuple(written if node is add else node for node in graph.nodes)), 2)


class Products(TorchDispatchMode):
    """Counts matrix products, and copies."""

    count = copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func) in ("aten.linear.default", "aten.mm.default", "aten.mm.out", "aten.addmm.default", "aten.addmm.out")
        self.copies += str(func) in ("aten.copy_.default", "aten.cat.default")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_selected_steps_of_attention_run_once_per_row(dtype: torch.dtype, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch for all rows of a layer where the backend has such, else one by one."""
    kinds = type(load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation"))
    runs, prepare = list[int](), kinds.prepare_runs

    def prepare_runs(self: Any, source: Any, arguments: Any) -> Any:
        runs.append(len(arguments[0]))
        return prepare(self, source, arguments) if together else None

    monkeypatch.setattr(kinds, "prepare_runs", prepare_runs)
    module = tiny("qwen3", {**SIZES, "hidden_size": 64, "head_dim": 256 // dtype.itemsize}, dtype)  # rows where kernels can read vectors
    model = compile(module, max_context=CONTEXT, run_on="emulation", budget_s=40)
    attending = [s for s in model.session._programs["decode"].segments if s.step is not None and "attention" in s.name]
    prompts = [[5, 6, 7], [9], [40, 41]]
    wanted = generated(model, prompts, "never", max_new_tokens=4, eos_token_id=None)
    assert torch.equal(generated(model, prompts, "always", max_new_tokens=4, eos_token_id=None), wanted)
    segments = model.session.rows._made[4, "decode"].bound.program.segments
    assert set(runs) == ({4} if together else {4, 3, 2}) and runs.count(4) == len(attending)
    assert len(attending) == 2 and sum(s.step is not None for s in segments) == 4 * len(attending)
    graph = model.session.rows._made[4, "decode"].bound.graph
    taken = rows_of_operands(graph, segments)
    assert {"rows.position"} < {graph.by_name[one.whole].source for one in taken.values()}
    read = [value for s in segments for name, values in s.operands for value in values if name in ("q", "k", "v")]
    assert set(read) <= set(taken)  # where the products left them
    with torch.inference_mode(), Products() as products:
        model.session.rows._made[4, "decode"].run()
    assert products.count == 2 * 4 + 1  # of a layer Q, K and V as one, gate and up as one, and two more; the head
    assert products.copies == 2  # the tables of the rotation: products write where attention reads, attention where the next one reads


def test_a_session_that_captured_nothing_takes_the_same_words() -> None:
    session = EagerSession(torch.nn.Linear(1, 1), compiled("qwen3").graphs, "cpu")
    session.rows.when = "never"
    assert session.rows.when == "never" and session.rows.seconds == {} and "nothing of this model was captured" in session.rows.notes[0]
    with pytest.raises(UsageError, match=r"session\.rows\.when = 'sometimes'"):
        session.rows.when = "sometimes"
