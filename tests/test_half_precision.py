"""Sums kept in half precision are refused by the fixed cases of a candidate, wherever they stand and however they are dealt out."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from agentcompile_rules_transformers import testing as made
from agentcompile_rules_transformers.kinds import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.dtypes import torch_dtype
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import oracle
from agentcompile_core.plugin_api import Case, DType, Graph, Match, compare
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.worker.execution import Execution
from agentcompile_core.worker.operands import graph_values, make_inputs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from mutants.narrow import narrowed
from mutants.subjects import BACKEND, load, subjects
from mutants.text import line_at

BY_NAME = {kind.name: kind for kind in KINDS}
NARROW = st.sampled_from([DType.F16, DType.BF16])


def lasting(match: Match, seed: int, emulated: bool = True) -> list[Case]:
    """The cases of a candidate that are there for its sums."""
    kind = BY_NAME[match.kind]
    return [case for case in cases_for(match, kind, f"seed {seed}", emulated=emulated) if case.family in kind.lasting_families(match)]


def refused(match: Match, graph: Graph, case: Case, compute: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> bool:
    """Whether the first output that ``compute`` makes of the inputs is refused; what the framework computes must not be."""
    tensors = make_inputs(match, BY_NAME[match.kind], case, "cpu")
    values, name = graph_values(match, graph, tensors), graph.outputs[0]
    expected = oracle(graph, values)[name]
    honest = compile_nodes(graph, device="cpu").run({n: t.clone() for n, t in values.items()})[name]
    assert compare(honest, expected).ok, f"{case.family} refuses what the framework computes"
    return not compare(compute(tensors).to(honest.dtype), expected).ok


def in_lanes(terms: torch.Tensor, lanes: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum of terms [n, ..] that are dealt out to accumulators of ``dtype`` by turns; theirs are added in float32."""
    missing = -len(terms) % lanes
    rounds = torch.cat((terms.float(), torch.zeros(missing, *terms.shape[1:]))).reshape(-1, lanes, *terms.shape[1:])
    sums = torch.zeros(rounds.shape[1:])
    for some in rounds:
        sums = (sums + some).to(dtype).float()
    return sums.sum(0)


@given(dtype=NARROW, heads=st.sampled_from([(2, 1), (4, 2)]), per_lane=st.integers(3, 24), seed=st.integers(0, 99), shuffled=st.booleans())
@settings(max_examples=8, derandomize=True, database=None, deadline=None)
def test_values_that_are_weighed_and_added_in_half_precision_are_refused(
        dtype: DType, heads: tuple[int, int], per_lane: int, seed: int, shuffled: bool) -> None:
    match, graph = made.attention_case(heads=heads, head_dim=64, capacity=160, dtype=dtype)
    case = next(one for one in lasting(match, seed) if one.family == "swamped")
    count, group = case.position + 1, heads[0] // heads[1]

    def compute(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = torch.cat((tensors["v_cache"][0, : case.position], tensors["v"].reshape(1, heads[1], 64))).float()
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) if shuffled else torch.arange(count)
        return (in_lanes(rows[order], -(-count // per_lane), torch_dtype(dtype)) / count).repeat_interleave(group, 0)

    assert case.position == 159 and refused(match, graph, case, compute)


@given(dtype=NARROW, per_lane=st.integers(4, 64), seed=st.integers(0, 99))
@settings(max_examples=8, derandomize=True, database=None, deadline=None)
def test_products_that_are_added_in_half_precision_are_refused(dtype: DType, per_lane: int, seed: int) -> None:
    match, graph = made.linear_case(n=48, k=528, dtype=dtype)
    case = next(one for one in lasting(match, seed) if one.family == "swamped")

    def compute(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        products = tensors["weight"].float() * tensors["x"].reshape(1, -1).float()
        return in_lanes(products.T, -(-528 // per_lane), torch_dtype(dtype)).reshape(1, 1, -1)

    assert refused(match, graph, case, compute)


@given(lanes=st.sampled_from([8, 16, 32, 64]), seed=st.integers(0, 99))
@settings(max_examples=8, derandomize=True, database=None, deadline=None)
def test_products_of_bf16_that_are_added_in_fp16_are_refused(lanes: int, seed: int) -> None:
    """By lanes that load vectors of eight in turns, four of them or more each."""
    match, graph = made.linear_case(n=48, k=2048, dtype=DType.BF16)
    case = next(one for one in lasting(match, seed) if one.family == "swamped_half")

    def compute(tensors: dict[str, torch.Tensor], narrow: bool = True) -> torch.Tensor:
        products = (tensors["weight"].float() * tensors["x"].reshape(1, -1).float()).reshape(48, -1, lanes, 8)
        sums = torch.zeros(48, lanes)
        for term in products.transpose(2, 3).flatten(1, 2).unbind(1):
            sums = (sums + term).half().float() if narrow else sums + term
        return sums.sum(1).reshape(1, 1, -1)

    assert refused(match, graph, case, compute)
    assert not refused(match, graph, case, lambda tensors: compute(tensors, narrow=False))


@given(columns=st.sampled_from([1024, 2048]), per_lane=st.integers(16, 64), seed=st.integers(0, 99), norm=st.sampled_from(["rms", "layer"]))
@settings(max_examples=8, derandomize=True, database=None, deadline=None)
def test_rows_that_are_summed_in_half_precision_are_refused(columns: int, per_lane: int, seed: int, norm: str) -> None:
    match, graph = made.norm_case(columns=columns, norm=norm, dtype=DType.BF16)
    case = lasting(match, seed)[-1]
    assert case.family == ("swamped" if norm == "rms" else "swamped_mean")

    def compute(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        x, lanes = tensors["x"].reshape(-1).float(), columns // per_lane
        mean = in_lanes(x, lanes, torch.bfloat16) / columns if norm == "layer" else 0.0
        power = in_lanes((x - mean) ** 2, lanes, torch.float32 if norm == "layer" else torch.bfloat16) / columns
        normal = (x - mean) * torch.rsqrt(power + 1e-6)
        if norm == "layer":
            return (normal * tensors["weight"].float() + tensors["bias"].float()).reshape(1, 1, -1)
        return (tensors["weight"].float() * normal.bfloat16().float()).reshape(1, 1, -1)

    assert refused(match, graph, case, compute)


def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: str) -> torch.Tensor:
    """A row [1, k] as kernels normalize it, in the type of ``x``."""
    wide, scale = x.float(), weight.float()
    centred = wide - wide.mean(-1, keepdim=True) if norm == "layer" else wide
    normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
    if norm == "rms":
        return weight * normal.to(x.dtype)
    return (normal * (1 + scale if norm == "rms_one_plus" else scale) + (0.0 if bias is None else bias.float())).to(x.dtype)


@given(dtype=NARROW, norm=st.sampled_from(["rms", "rms_one_plus", "rms_once", "layer"]), k=st.integers(32, 512).map(lambda n: 8 * n),
       seed=st.integers(0, 9999))
@settings(max_examples=40, derandomize=True, database=None, deadline=None)
def test_a_normed_row_that_is_rounded_as_the_framework_does_is_never_refused(dtype: DType, norm: str, k: int, seed: int) -> None:
    """Where all elements of a size were rounded to one side, honest kernels were refused: the norm of Gemma 2 and Qwen3 before Q, K, V."""
    match, graph = made.linear_case(n=256, k=k, norm=norm, dtype=dtype)
    for case in lasting(match, seed, False):
        assert not refused(match, graph, case, lambda t: normed(t["x"].reshape(1, k), t["norm_weight"], t.get("norm_bias"), norm).float()
                           @ t["weight"].float().T)


def test_they_are_tried_with_the_history_full_and_leave_the_other_cases_alone() -> None:
    match, _ = made.attention_case(heads=(2, 1), head_dim=16, capacity=4096)
    found = cases_for(match, BY_NAME["attention"], "s")
    assert [(case.family, case.position) for case in found if case.family in ("swamped", "uneven")] == [("swamped", 4095), ("uneven", 4095)]
    wide, _ = made.attention_case(heads=(2, 1), head_dim=16, capacity=4096, dtype=DType.F32)
    assert lasting(wide, 0) == [], "a sum in float32 errs to one side too: half precision shows in every other case there"


PLACES = [  # subject, type, the accumulator; 18b94be6f084 of docs/mutants.md is the first
    ("lanes_split", "fp16", "weighted[g][e] = __half2float"),
    ("lanes_split", "fp16", "sum[g] = __half2float(__float2half_rn(sum[g] + (scores"),
    ("tensor_split_bf16", "fp16", "kept : weighted[j][w]"), ("gemv_rows", "fp16", "sums[number] = __half2float"),
    ("norm_block", "bf16", "squares = __bfloat162float"), ("ring_nine_warps", "fp16", "sums[number] = __half2float"),
]


@pytest.mark.parametrize(("subject", "kind", "line"), PLACES)
def test_kernels_with_such_a_sum_are_refused_whatever_the_seed(subject: str, kind: str, line: str) -> None:
    one, backend = subjects()[subject], load().find("agentcompile_backends", BACKEND)
    changed = [(file, text) for file, whole in one.files().items() for found in narrowed(whole) if found.type == kind
               for text in [found.edit.apply(whole)] if line in line_at(text, found.edit.start)]
    source = one.mutated(*changed[0])
    run = Execution(one.job(source).trial, backend, backend.load(backend.build(source, one.target)), kind=BY_NAME[one.match.kind])
    for seed in range(2):
        assert any(not right(run, case) for case in lasting(one.match, seed)), f"seed {seed}"


def right(run: Execution, case: Case) -> bool:
    result = run.run(case, float("nan"))
    expected = run.expected(case, result.inputs)
    return all(compare(tensor, expected[name]).ok for name, tensor in run.values(result.outputs).items())
