"""The reference is never believed alone: the framework in float64 must agree, for every kind of match, or nothing passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_rules_transformers import testing as cases
from agentcompile_rules_transformers.kinds import KINDS
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from agentcompile_core.errors import Cause
from agentcompile_core.ir.expression import Expression, Operation, PointwiseKind
from agentcompile_core.ir.graph import DType, Graph
from agentcompile_core.ir.plan import Origin, Step
from agentcompile_core.ir.region import Match
from agentcompile_core.ir.verdict import Trial
from agentcompile_core.ops.reference import Bounded, oracle
from agentcompile_core.ops.reference.calls import Call
from agentcompile_core.ops.reference.rules import _RULES
from agentcompile_core.ops.reference.second_opinion import disagreement
from agentcompile_core.ops.schema import with_argument
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.worker import Job, execution
from agentcompile_core.worker.evaluate import Evaluation, WorkerState
from agentcompile_core.worker.operands import graph_values, make_inputs

OURS = torch.ops.agentcompile
TARGET = PRESETS["h200"]
BY_NAME = {kind.name: kind for kind in KINDS}
def in_chunks(size: int, match: Match, graph: Graph) -> tuple[Match, Graph]:
    """Attention of a match that sees its own chunk of positions alone, which no rule proposes."""
    return match, evolve(graph, nodes=tuple(with_argument(n, "chunk", size) if n.kind == "attention" else n for n in graph.nodes))


EVERY_KIND: dict[str, Callable[[DType], tuple[Match, Graph]]] = {
    "gather": lambda d: cases.gather_case(columns=24, vocabulary=10, dtype=d),
    "rms": lambda d: cases.norm_case(columns=40, rows=2, residual=True, dtype=d),
    "rms one plus": lambda d: cases.norm_case(columns=40, norm="rms_one_plus", dtype=d),
    "layer norm": lambda d: cases.norm_case(columns=40, norm="layer", dtype=d),
    "linear": lambda d: cases.linear_case(n=24, k=40, norm="rms", bias=True, activation="gelu", residual=True, dtype=d),
    "siblings": lambda d: cases.linear_case(n=(24, 8, 8), k=40, norm="layer", dtype=d),
    "gated": lambda d: cases.gated_case(n=24, k=40, norm="rms", dtype=d),
    "elementwise": lambda d: cases.elementwise_case(columns=40, rows=2, operators=("silu", "mul", "sub", "div", "tanh"), dtype=d),
    "rope": lambda d: cases.rope_case(heads=3, head_dim=16, rotary_dim=8, dtype=d),
    "rope table": lambda d: cases.rope_table_case(half=8, dtype=d),
    "attention": lambda d: cases.attention_case(heads=(4, 2), head_dim=16, capacity=48, dtype=d),
    "attention of pairs": lambda d: cases.attention_case(heads=(4, 2), head_dim=16, capacity=48, rope="pairs", dtype=d),
    "attention with all": lambda d: cases.attention_case(
        heads=(4, 2), head_dim=16, capacity=48, window=5, softcap=20.0, rope="rms", dtype=d),
    "attention with slopes": lambda d: cases.sloped_case(heads=(4, 2), head_dim=16, capacity=48, slopes=(0.5, 0.1, 0.02, 0.7), dtype=d),
    "attention in chunks": lambda d: in_chunks(7, *cases.sloped_case(heads=(4, 2), head_dim=16, capacity=48, slopes=(), dtype=d)),
    "argmax": lambda d: cases.argmax_case(n=50, advance=True, dtype=d),
    "softmax": lambda d: cases.softmax_case(shape=(2, 3, 40), scale=3.0, mask=(40,), wide=True, dtype=d),
    "sum of products": lambda d: cases.reduction_case(shape=(2, 3, 40), before=("mul",), dtype=d),
    "variance": lambda d: cases.reduction_case(shape=(2, 9, 5), op="aten.var.correction", dim=1, dtype=d),
    "product": lambda d: cases.reduction_case(shape=(3, 20), op="aten.prod.dim_int", dtype=d),
    "maximum and place": lambda d: cases.reduction_case(shape=(2, 3, 40), op="aten.max.dim", keepdim=True, dtype=d),
    "experts": lambda d: cases.experts_case(sizes=(6, 3, 24, 40), bias=True, dtype=d),
    "experts interleaved": lambda d: cases.experts_case(sizes=(5, 2, 9, 40), lies=("interleaved",), activation="gelu", dtype=d),
    "experts in columns": lambda d: cases.experts_case(sizes=(5, 2, 9, 40), lies=("columns", "interleaved"), bias=True, dtype=d),
    "experts summed": lambda d: cases.experts_case(sizes=(6, 3, 24, 40), down=True, bias=True, wide=True, dtype=d),
    "router": lambda d: cases.router_case(experts=20, slots=4, dtype=d),
    "router normalized": lambda d: cases.router_case(experts=20, slots=4, normalized=True, dtype=d),
    "router by scores": lambda d: cases.scored_router_case(experts=20, slots=4, bias=DType.F32, normalized="guarded", factor=2.5, dtype=d),
    "rope in heads": lambda d: cases.rope_heads_case(heads=3, rotary=8, rest=6, layout="apart", dtype=d),
    "router after": lambda d: cases.router_case(experts=20, slots=4, after=True, dtype=d),
    "log softmax": lambda d: cases.softmax_case(shape=(2, 9, 5), axis=1, log=True, dtype=d),
}


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_framework_confirms_the_reference_of_every_kind(kind: str, dtype: DType) -> None:
    match, graph = EVERY_KIND[kind](dtype)
    for case in cases_for(match, BY_NAME[match.kind], "second opinion", emulated=True):
        values = graph_values(match, graph, make_inputs(match, BY_NAME[match.kind], case, "cpu"))
        before = {name: tensor.clone() for name, tensor in values.items()}
        assert disagreement(graph, values, oracle(graph, values)) == "", case
        assert all(torch.equal(values[name].nan_to_num(), tensor.nan_to_num()) for name, tensor in before.items())


def disturbed(bound: Bounded, factor: float) -> Bounded:
    if bound.value.is_floating_point():
        return Bounded(bound.value * factor, bound.error, bound.choices)
    return Bounded(bound.value + 1, bound.error, None)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_reference_that_is_off_by_a_millionth_is_seen(kind: str) -> None:
    match, graph = EVERY_KIND[kind](DType.F32)
    kind_of = BY_NAME[match.kind]
    values = graph_values(match, graph, make_inputs(match, kind_of, cases_for(match, kind_of, "off", emulated=True)[0], "cpu"))
    expected = oracle(graph, values)
    for name in expected:
        wrong = {**expected, name: disturbed(expected[name], 1.0 + 1e-6)}
        assert disagreement(graph, values, wrong).startswith(f"{name}: element "), name


@pytest.mark.parametrize(("put", "seen"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")])
def test_what_is_not_finite_must_be_so_in_the_same_places(put: float, seen: str) -> None:
    _, graph = cases.elementwise_case(columns=8, operators=("mul",), dtype=DType.F32)
    values = {"in0": torch.ones(1, 1, 8), "in1": torch.ones(1, 1, 8)}
    values["in0"][0, 0, 3] = put
    expected = oracle(graph, values)
    assert disagreement(graph, values, expected) == ""
    (name,) = graph.outputs
    for other in (0.0, float("nan"), float("inf"), -float("inf")):
        if str(other) != seen:
            value = expected[name].value.clone()
            value[0, 0, 3] = other
            assert "element 3 is" in disagreement(graph, values, {name: Bounded(value, expected[name].error)})


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_numbers_at_the_ends_of_the_range_give_both_the_same(kind: str) -> None:
    match, graph = EVERY_KIND[kind](DType.F16)
    kind_of = BY_NAME[match.kind]
    values = graph_values(match, graph, make_inputs(match, kind_of, cases_for(match, kind_of, "ends", emulated=True)[0], "cpu"))
    puts = [65504.0, -65504.0, float("nan")]
    if match.kind != "attention":  # a row without any finite score has no softmax: NaN by formula, zero by torch's
        puts += [float("inf"), -float("inf")]
    for name in [name for name, tensor in values.items() if tensor.is_floating_point()]:
        for put in puts:
            changed = values | {name: values[name].clone()}
            changed[name].view(-1)[0] = put
            assert disagreement(graph, changed, oracle(graph, changed)) == "", (name, put)


# ---- validation

def as_addition(match: Match) -> Match:
    return evolve(match, epilogue=Expression(arguments=("in0", "in1"), operations=(Operation(PointwiseKind.ADD, ("in0", "in1")),)))


def misread(call: Call) -> tuple[Bounded, ...]:
    return (Bounded(call["self"].value + call["other"].value, torch.full_like(call["self"].value, 1e-5)),)


@pytest.fixture(scope="module")
def session() -> WorkerState:
    return WorkerState(load_catalog(only=("emulation", "numerics", "elementwise", "transformers_rules"), strict=True))


def judged(session: WorkerState, monkeypatch: pytest.MonkeyPatch) -> Evaluation:
    """A kernel that computes a + b for a node a - b, judged by a reference that reads it as a + b too."""
    monkeypatch.setitem(_RULES, "aten.sub.Tensor", misread)
    match, graph = cases.elementwise_case(columns=64, operators=("sub",), dtype=DType.F32)
    match = as_addition(match)
    family = session.catalog.template_families["elementwise/elementwise"]
    schedule = family.space(match, TARGET).points[0]
    source = family.lower(match, schedule, TARGET)
    step = Step(match_id=match.id, implementation="elementwise/elementwise", origin=Origin.GENERATED, schedule=schedule)
    few = cases_for(match, BY_NAME[match.kind], "shared", emulated=True)[:2]
    trial = Trial(match=match, graph=graph, source=source, target=TARGET, cases=few)
    job = Job(trial=trial, step=step, backend="emulation")
    session.oracles = execution.Oracles()
    kernel: Any = session.build(job)
    return session.evaluate(job, kernel, lambda phase: None)


def test_a_kernel_that_shares_a_misreading_with_the_reference_is_refused(session: WorkerState, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(session, monkeypatch)
    assert found.failure is Cause.CONTRACT
    assert found.message.startswith("the reference and the framework disagree on elementwise:")
    assert found.measurement is None and not any(v.passed for v in found.verdicts)


def test_without_the_second_opinion_that_kernel_would_have_passed(session: WorkerState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "disagreement", lambda *_: "")
    found = judged(session, monkeypatch)
    assert found.failure is None and all(v.passed for v in found.verdicts), found.message


def test_the_framework_is_asked_once_for_each_graph_and_case() -> None:
    asked: list[int] = []
    oracles = execution.Oracles()
    match, _ = cases.elementwise_case(columns=8, operators=("add",))
    one, other = cases_for(match, BY_NAME[match.kind], "once", emulated=True)[:2]
    for key in (("g", one), ("g", other), ("g", one), ("h", one), ("h", one)):
        oracles.opinion(key, lambda: asked.append(1) or "")  # type: ignore[func-returns-value]
    assert len(asked) == 3


# ---- our operators, which the second opinion runs too, against the formulas of others

seeds = st.integers(0, 10_000)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@given(seed=seeds, columns=st.integers(1, 40), eps=st.sampled_from([1e-6, 1e-5, 0.3]))
def test_rms_norm_is_what_torch_and_transformers_compute(seed: int, columns: int, eps: float) -> None:
    x, weight = draw(seed, 3, columns), draw(seed + 1, columns)
    assert torch.allclose(OURS.rms_norm(x, weight, eps), F.rms_norm(x, (columns,), weight, eps), rtol=1e-12, atol=1e-12)
    one_plus = F.rms_norm(x, (columns,), 1 + weight, eps)
    assert torch.allclose(OURS.rms_norm(x, weight, eps, True), one_plus, rtol=1e-12, atol=1e-12)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for cls, flag in ((LlamaRMSNorm, False), (GemmaRMSNorm, True)):
            norm = cls(columns, eps=eps).to(dtype)
            norm.weight.data.copy_(weight)
            assert torch.equal(OURS.rms_norm(x.to(dtype), norm.weight.data, eps, flag), norm(x.to(dtype)).data)


@given(seed=seeds, heads=st.integers(1, 4), count=st.integers(1, 5), half=st.integers(1, 8), rest=st.integers(0, 5))
def test_rope_is_what_transformers_computes(seed: int, heads: int, count: int, half: int, rest: int) -> None:
    q, k = draw(seed, 1, heads, count, 2 * half + rest), draw(seed + 1, 1, 1, count, 2 * half + rest)
    angles = draw(seed + 2, 1, count, half).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    want = apply_rotary_pos_emb(q[..., : 2 * half], k[..., : 2 * half], cos, sin)
    for x, turned in zip((q, k), want, strict=True):
        assert torch.equal(OURS.rope(x, cos, sin), torch.cat((turned, x[..., 2 * half :]), -1))


@given(seed=seeds, half=st.integers(1, 16), first=st.integers(0, 100_000), count=st.integers(1, 4), scaling=st.sampled_from([1.0, 1.2]))
def test_the_rotary_table_is_what_transformers_computes(seed: int, half: int, first: int, count: int, scaling: float) -> None:
    positions = torch.arange(first, first + count)[None]
    frequencies = draw(seed, half).abs()
    angles = torch.outer(positions[0].double(), frequencies).repeat(1, 2)[None]
    cos, sin = OURS.rotary_embedding(positions, frequencies, scaling, torch.float64)
    assert torch.equal(cos, angles.cos() * scaling) and torch.equal(sin, angles.sin() * scaling)
    table = LlamaRotaryEmbedding(LlamaConfig(hidden_size=4 * half, num_attention_heads=2, head_dim=2 * half))
    table.attention_scaling = scaling
    theirs = table(torch.ones(1, dtype=torch.bfloat16), positions)
    ours = OURS.rotary_embedding(positions, table.inv_freq, scaling, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def explicit_attention(q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, scale: float, window: int, softcap: float,
                       sinks: Tensor | None, slopes: list[float] | None) -> Tensor:
    """Softmax over everything that each row may see: q [H, T, D], keys and values [H, S, D], rows [T]; the result is [T, H, D]."""
    scores = torch.einsum("htd,hsd->hts", q, keys) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    columns = torch.arange(keys.shape[1])
    for head, slope in enumerate(slopes or ()):
        scores[head] -= slope * (rows[:, None] - columns[None]).double()
    seen = (columns[None] <= rows[:, None]) & ((columns[None] > rows[:, None] - window) if window else torch.tensor(True))
    weights = scores.exp() * seen
    total = weights.sum(-1, keepdim=True) + (sinks.exp()[:, None, None] if sinks is not None else 0.0)
    return torch.einsum("hts,hsd->thd", weights / total, values)


@given(seed=seeds, kv_heads=st.integers(1, 3), group=st.integers(1, 3), count=st.integers(1, 4), first=st.integers(0, 8),
       window=st.sampled_from([0, 1, 3, 20]), softcap=st.sampled_from([0.0, 3.0]), with_sinks=st.booleans(), fresh=st.booleans(),
       sloping=st.booleans())
@settings(max_examples=60)
def test_attention_is_an_explicit_softmax(seed: int, kv_heads: int, group: int, count: int, first: int, window: int, softcap: float,
                                          with_sinks: bool, fresh: bool, sloping: bool) -> None:
    dim, capacity, heads, first = 6, 16, kv_heads * group, 0 if fresh else first
    q, k, v = draw(seed, 1, heads, count, dim), draw(seed + 1, 1, kv_heads, count, dim), draw(seed + 2, 1, kv_heads, count, dim)
    caches = [draw(seed + i, 1, capacity, kv_heads, dim) for i in (3, 4)]
    sinks = draw(seed + 5, heads) if with_sinks else None
    slopes = draw(seed + 6, heads).tolist() if sloping else None
    appended = [torch.cat((cache[0, :first].transpose(0, 1), new[0]), 1) for cache, new in zip(caches, (k, v), strict=True)]
    full = [rows.repeat_interleave(group, 0) for rows in appended]
    for cache in caches:
        cache[:, first:] = float("nan")
    got = OURS.attention(q, k, v, *caches, torch.tensor([first]), 0.4, window, softcap, sinks, fresh, slopes)
    want = explicit_attention(q[0], *full, torch.arange(count) + first, 0.4, window, softcap, sinks, slopes)
    assert torch.allclose(got[0], want, rtol=1e-11, atol=1e-12)
    for cache, new in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[:, first : first + count], new.transpose(1, 2)) and bool(cache[:, first + count :].isnan().all())


@given(logits=st.lists(st.sampled_from([-2.0, 0.0, 1.0, 7.0, 7.5, float("-inf"), float("inf")]), min_size=1, max_size=30))
def test_argmax_is_the_first_maximum(logits: list[float]) -> None:
    assert OURS.argmax(torch.tensor(logits, dtype=torch.float64).view(1, 1, -1)).tolist() == [logits.index(max(logits))]


@given(token=st.integers(0, 99), position=st.integers(0, 12), start=st.integers(0, 5), length=st.integers(1, 5))
def test_the_decode_state_moves_as_written(token: int, position: int, start: int, length: int) -> None:
    for begin in (False, True):
        ids, at, history = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([position]), torch.full((14,), -1)
        wanted = start + length if begin else position + 1
        if begin:
            OURS.start_decode(torch.tensor([token]), ids, at, history, torch.tensor([start]), torch.tensor([length]))
        else:
            OURS.advance(torch.tensor([token]), ids, at, history)
        assert (ids.item(), at.item(), history[wanted].item()) == (token, wanted, token)
        assert int((history != -1).sum()) == 1
