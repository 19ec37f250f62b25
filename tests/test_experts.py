"""Mixtures of experts: the operator against a plain formula, the three ways to compute it, its error budget, and what counts as read."""

from pathlib import Path

import pytest
import torch
import transformers
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_rules_transformers.testing import Draft
from capture_models import SIZES, WORKLOAD, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import AgentCompileError
from agentcompile_core.ir.graph import DType, Graph, GraphKind, Workload
from agentcompile_core.ops import experts as ops
from agentcompile_core.ops.aliasing import is_alias
from agentcompile_core.ops.reference import compare, oracle
from agentcompile_core.ops.reference.second_opinion import disagreement
from agentcompile_core.ops.traffic import bytes_of
from agentcompile_core.ops.work import flops_of
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.report.accounting import step_bytes
from agentcompile_core.stages import analyze, plan
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.store import Store

OURS = torch.ops.agentcompile.expert_linear.default
SETTINGS = settings(max_examples=40, derandomize=True, database=None, deadline=None)
SHAPES = {"tokens": st.integers(1, 5), "slots": st.integers(1, 4), "experts": st.integers(1, 9), "shared": st.booleans(),
          "biased": st.booleans(), "transposed": st.booleans(), "seed": st.integers(0, 2**31)}


def drawn(tokens: int, slots: int, experts: int, shared: bool, biased: bool, transposed: bool, seed: int,
          dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    g, n, k = torch.Generator().manual_seed(seed), 6, 10
    x = torch.randn(tokens, 1 if shared else slots, k, generator=g).to(dtype)
    weight = torch.randn(experts + slots, *((k, n) if transposed else (n, k)), generator=g).to(dtype)
    experts += slots
    chosen = torch.stack([torch.randperm(experts, generator=g)[:slots] for _ in range(tokens)])
    return x, weight, chosen, torch.randn(experts, n, generator=g).to(dtype) if biased else None, transposed


def formula(x: Tensor, weight: Tensor, chosen: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    out = torch.einsum("tsk,tsnk->tsn", x.expand(*chosen.shape, -1), (weight.mT if transposed else weight)[chosen])
    return out if bias is None else out + bias[chosen]


@SETTINGS
@given(**SHAPES)
def test_every_way_to_compute_it_is_the_formula(**given: int) -> None:
    x, weight, chosen, bias, transposed = arguments = drawn(**given)  # type: ignore[arg-type]
    want = formula(*arguments)
    matrices = weight.mT if transposed else weight
    added = 0 if bias is None else bias[chosen]
    for found in (OURS(*arguments), ops._gathered(x, matrices, chosen) + added, ops._all_experts(x, matrices, chosen) + added):
        torch.testing.assert_close(found, want)
    bare = ops.shape_only(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
    assert bare.shape == want.shape and bare.is_contiguous() and bare.dtype is want.dtype


def test_experts_that_were_not_chosen_are_not_read() -> None:
    x, weight, _, bias, _ = drawn(2, 2, 8, True, True, False, 1)
    chosen = torch.tensor([[0, 3], [3, 5]])
    dirty = torch.where(torch.isin(torch.arange(len(weight)), chosen)[:, None, None], weight, torch.nan)
    assert torch.equal(OURS(x, dirty, chosen, bias), OURS(x, weight, chosen, bias))


@pytest.mark.parametrize("wrong", ["inner", "rows", "bias", "type"])
def test_operands_that_do_not_fit_are_refused_without_values(wrong: str) -> None:
    x, weight, chosen, bias, _ = (a.to("meta") if isinstance(a, Tensor) else a for a in drawn(2, 3, 4, False, True, False, 1))
    changed = {"inner": (x[..., 1:], weight, chosen, bias), "rows": (x[:, :2], weight, chosen, bias),
               "bias": (x, weight, chosen, bias[:, 1:]), "type": (x.float(), weight, chosen, bias)}[wrong]
    with pytest.raises(RuntimeError):
        OURS(*changed)


def block(dtype: DType, experts: int = 6, slots: int = 3, bias: bool = False, transposed: bool = False) -> Graph:
    """x -> gate and up of the chosen experts -> silu(gate) * up -> down, weighted and summed."""
    draft, h, i = Draft(), 24, 16
    x, chosen = draft.given("x", (1, 1, h), dtype), draft.given("chosen", (1, slots), DType.I64)
    weights = draft.given("scale", (1, slots, 1), dtype)

    def linear(name: str, given: object, n: int, k: int) -> object:
        shape = (experts, k, n) if transposed else (experts, n, k)
        matrix = draft.weight(name, *shape, dtype=dtype)
        added = draft.weight(f"{name}.bias", experts, n, dtype=dtype) if bias else None
        return draft.one("agentcompile.expert_linear.default", (given, matrix, chosen, added, transposed), (1, slots, n), dtype)

    both = linear("gate_up", x, 2 * i, h)
    gate, up = draft.call("aten.chunk.default", (both, 2, -1), (1, slots, i), (1, slots, i), dtype=dtype, kind="view")
    product = draft.one("aten.mul.Tensor", (draft.one("aten.silu.default", (gate,), (1, slots, i), dtype), up), (1, slots, i), dtype)
    weighted = draft.one("aten.mul.Tensor", (linear("down", product, h, i), weights), (1, slots, h), dtype)
    return draft.graph(draft.one("aten.sum.dim_IntList", (weighted, (1,)), (1, h), dtype))


def values_of(graph: Graph, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = {}
    for value in graph.values:
        if value.name not in graph.producer:
            shape, dtype = value.spec.shape, getattr(torch, value.spec.dtype.value)
            drawn_ = torch.randint(0, 6, shape, generator=g) if dtype is torch.int64 else torch.randn(shape, generator=g)
            made[value.name] = drawn_.to(dtype)
    return made


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@settings(SETTINGS, max_examples=10)
@given(seed=st.integers(0, 2**31), bias=st.booleans(), transposed=st.booleans())
def test_the_framework_passes_and_agrees_with_the_reference(dtype: DType, seed: int, bias: bool, transposed: bool) -> None:
    from agentcompile_core.ops.interpreter import compile_nodes

    graph = block(dtype, bias=bias, transposed=transposed)
    values = values_of(graph, seed)
    expected = oracle(graph, values)
    (name, bound), = expected.items()
    found = compile_nodes(graph, device="cpu").run(values)[name]
    check = compare(found, bound)
    assert check.ok, check.detail
    assert disagreement(graph, values, expected) == ""
    swapped = {**values, "chosen": (values["chosen"] + 1) % 6}
    assert not compare(compile_nodes(graph, device="cpu").run(swapped)[name], bound).ok


def test_computed_weights_have_no_error_rule() -> None:
    draft = Draft()
    weight = draft.weight("w", 4, 6, 8, dtype=DType.F16)
    squares = draft.one("aten.mul.Tensor", (weight, weight), (4, 6, 8), DType.F16)
    arguments = (draft.given("x", (1, 1, 8), DType.F16), squares, draft.given("chosen", (1, 2), DType.I64))
    graph = draft.graph(draft.one("agentcompile.expert_linear.default", arguments, (1, 2, 6), DType.F16))
    with pytest.raises(AgentCompileError, match="computed weights"):
        oracle(graph, values_of(graph, 1) | {"chosen": torch.zeros(1, 2, dtype=torch.int64)})


def test_only_chosen_experts_count() -> None:
    graph = block(DType.F16, experts=6, slots=3, bias=True)
    first = next(node for node in graph.nodes if node.kind == "expert_linear")
    assert bytes_of(first, graph) == 2 * 24 + 8 * 3 + 3 * 2 * (32 * 24 + 32) + 2 * 3 * 32
    assert flops_of([first], graph) == 3 * 32 * (2 * 24 + 1)
    few = block(DType.F16, experts=2, slots=3)
    assert bytes_of(few.nodes[0], few) == 2 * 24 + 8 * 3 + 2 * 2 * 32 * 24 + 2 * 3 * 32, "three slots cannot read more than both experts"


def test_a_step_counts_what_one_token_reads() -> None:
    sizes = {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    graphs = capture_language_model(tiny("qwen3_moe", sizes), "qwen3_moe", WORKLOAD)
    decode = graphs.of_kind(GraphKind.DECODE)[0]
    everything = sum(value.spec.nbytes for value in decode.values if "layers" in value.source and "experts" in value.source)
    assert everything == 4 * 2 * 8 * 3 * 16 * 32
    dense = step_bytes(capture_language_model(tiny("qwen3_moe", {**sizes, "num_experts_per_tok": 8}), "qwen3_moe", WORKLOAD), 10)
    assert dense - step_bytes(graphs, 10) == everything * 6 // 8


def test_capture_gives_the_experts_back_their_own_implementation() -> None:
    model = tiny("mixtral", {**SIZES, "num_local_experts": 4})
    before = model.config._experts_implementation
    capture_language_model(model, "mixtral", WORKLOAD)
    assert model.config._experts_implementation == before != "agentcompile"


@pytest.mark.parametrize(("model_type", "sizes"), [
    ("mixtral", {"num_local_experts": 4}), ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
])
def test_prompts_of_many_rows_are_the_modules(model_type: str, sizes: dict[str, object]) -> None:
    """The experts of one layer, by our function and by each of transformers' own."""
    from agentcompile_core.stages.capture.experts import semantic_experts

    model = tiny(model_type, {**SIZES, **sizes})
    experts = next(part for part in model.modules() if type(part).__name__.endswith("Experts"))
    g = torch.Generator().manual_seed(3)
    x = torch.randn(11, 32, generator=g)
    scores, chosen = F.softmax(torch.randn(11, 4, generator=g), -1).topk(2)
    with semantic_experts(model):
        ours = experts(x, chosen, scores)
    for implementation in ("eager", "batched_mm"):
        experts.config._experts_implementation = implementation
        torch.testing.assert_close(ours, experts(x, chosen, scores))


def test_a_full_size_mixture_is_planned_without_weights_and_counts_active_bytes() -> None:
    """Qwen3-30B-A3B in bfloat16, one of its layers: every node behind a generated kernel, 8 of 128 experts in the floors."""
    folder = Path(__file__).parents[1] / "benchmarks" / "configs" / "qwen3-30b-a3b"
    config = transformers.AutoConfig.from_pretrained(folder, num_hidden_layers=1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    graphs = capture_language_model(model.eval(), "qwen3_moe", Workload(dtype=DType.BF16, max_context=4096, prefill_chunks=(16,)))
    ctx = Context(catalog=load_catalog(strict=True), target=PRESETS["h200"], config=Config(), store=Store(None))
    layer = next(found for found in plan.run(analyze.run(graphs, ctx), ctx) if found.region.name == "layer")
    matches = [layer.region.match_by_id[name] for name in layer.space.covers[0].matches]
    left = {n.name for n in layer.region.graph.nodes if not is_alias(layer.region.graph, n)} - {name for m in matches for name in m.nodes}
    assert left == set() and [m.kind for m in matches].count("expert_linear") == 2 and "router" not in [m.kind for m in matches]
    gate, down = (m for m in matches if m.kind == "expert_linear")
    assert gate.flag("routed") and not down.flag("routed")
    read = 2 * 8 * 3 * 768 * 2048
    assert read < gate.bytes_moved + down.bytes_moved < 1.01 * read
    step = step_bytes(graphs, 0)
    dense = sum(v.spec.nbytes for v in graphs.of_kind(GraphKind.DECODE)[0].values if v.source.endswith("proj") and "experts" in v.source)
    assert dense == 16 * read and step < read + 2 * (2048 * 151936 + 2048 * 4096 * 2 + 2 * 2048 * 512 + 128 * 2048) + (1 << 20)


@pytest.mark.parametrize(("model_type", "sizes"), [
    ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}), ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
])
def test_router_and_experts_of_a_layer_are_two_kernels(model_type: str, sizes: dict[str, object]) -> None:
    graphs = capture_language_model(tiny(model_type, {**SIZES, **sizes, "num_hidden_layers": 1}), model_type, WORKLOAD)
    ctx = Context(catalog=load_catalog(strict=True), target=PRESETS["h200"], config=Config(), store=Store(None))
    plans = plan.run(analyze.run(graphs, ctx), ctx)
    kinds = [found.region.match_by_id[name].kind for found in plans for name in found.space.covers[0].matches]
    assert (kinds.count("router"), kinds.count("expert_linear")) == (0, 2)
    offered = {match.kind for found in plans for match in found.region.matches}
    assert "router" in offered, "where the layer with its router is not right, or slower"
