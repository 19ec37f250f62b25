"""What is in front of linear layers and read by others as well, on both paths: a norm, and a residual with the norm before it."""

import math
from pathlib import Path
from typing import Any

import agentcompile_cuda_kit
import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import linear_case, shared_norm_case, summed_case
from agentcompile_templates_cuda_gemv import GemvFamily
from agentcompile_templates_cuda_gemv.direct_space import direct_schedule
from agentcompile_templates_cuda_gemv.ring_space import ring_schedule
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Graph, Match, Operand, Role, Schedule, StepSource, TensorSpec, compare, oracle

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import TORCH, Emulated, aligned

H200 = preset("h200")
FAMILY = GemvFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
TYPES = (DType.BF16, DType.F16)
RING = {"columns": 512, "stages": 3, "in_flight": 2, "blocks_per_sm": 2, "specialize_k": False, "warps": 2}
PATHS = {
    "direct": direct_schedule(warps_per_row=1, rows=2, unroll=4, blocks_per_sm=2, warps=2),
    "ring": ring_schedule(rows=2, **RING),
    "dealt": Schedule({**dict(ring_schedule(rows=1, **RING).items), "static_groups": 1}),
    "tensor": Schedule({**dict(ring_schedule(rows=2, **RING).items), "path": "tensor"}),
}


def drawn(match: Match, seed: int) -> dict[str, torch.Tensor]:
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for operand in match.operands:
        values = torch.randn(operand.spec.shape, generator=generator)
        values = values * match.integer("k") ** -0.5 if operand.name == "weight" else values
        values = torch.full(operand.spec.shape, math.nan) if operand.role is Role.OUTPUT else values
        tensors[operand.name] = aligned(values, TORCH[operand.spec.dtype])
    return tensors


def is_right(match: Match, graph: Graph, source: StepSource, seed: int, order: LaunchOptions | None = None) -> bool:
    tensors = drawn(match, seed)
    read = {operand.values: tensors[operand.name] for operand in match.operands if operand.role is not Role.OUTPUT}
    given_: dict[str, Any] = {}
    for values, tensor in read.items():  # parts of concatenations lie behind each other
        rows = iter(tensor.split([graph.spec(value).shape[0] for value in values])) if len(values) > 1 else iter((tensor,))
        given_ |= {value: next(rows) for value in values}
    expected = oracle(graph, given_)
    Emulated(source, match, H200).run(tensors, *([] if order is None else [order]))
    parts = iter(tensors["out"].flatten().split([graph.spec(value).numel for value in match.need("out").values]))
    done = [compare(next(parts).reshape(graph.spec(value).shape), expected[value]) for value in match.need("out").values]
    beside = [o for o in match.operands if o.name in ("norm_out", "residual_out")]
    return all(one.ok for one in (*done, *(compare(tensors[o.name], expected[o.values[0]]) for o in beside)))


@pytest.mark.parametrize("path", PATHS)
@FEW
@given(data=st.data())
def test_both_results_are_within_budget(path: str, data: st.DataObject) -> None:
    """Rows that fit into registers and longer ones, of whole vectors and, on the direct path, of any length; one layer and siblings."""
    k = data.draw(st.sampled_from((8, 264, 1031, 4104) if path == "direct" else (512, 1032, 4104)))
    dtype = data.draw(st.sampled_from(TYPES if path == "tensor" else (*TYPES, DType.F32)))
    n = data.draw(st.sampled_from((1, 7, 20, (8, 16, 8)) if path != "dealt" else (300, 613)))
    norm = data.draw(st.sampled_from(("rms", "rms_one_plus", "rms_once", "layer")))
    match, graph = shared_norm_case(n=n, k=k, norm=norm, bias=data.draw(st.booleans()), dtype=dtype)
    assert match.operand("norm_out") is not None and match.text("norm") in (norm, "rms")
    assert FAMILY.accepts(match, H200) is True
    source = FAMILY.lower(match, PATHS[path], H200)
    assert is_right(match, graph, source, data.draw(st.integers(0, 99)), data.draw(st.sampled_from(SCHEDULES)))


@pytest.mark.parametrize("path", PATHS)
@FEW
@given(data=st.data())
def test_a_residual_and_the_norm_before_it(path: str, data: st.DataObject) -> None:
    """Gemma's layers, which norm the sum again, and OLMo 2's, which do not."""
    k = data.draw(st.sampled_from((8, 264, 1031, 4104) if path == "direct" else (512, 1032, 4104)))
    norm = data.draw(st.sampled_from(("none", "rms", "rms_one_plus", "layer")))
    post = data.draw(st.sampled_from(("rms", "rms_one_plus", "rms_once", "rms_bare")))
    n = data.draw(st.sampled_from((1, 20, (8, 16, 8)) if path != "dealt" else (300, 613)))
    match, graph = summed_case(n=n, k=k, post=post, norm=norm, shared=data.draw(st.booleans()), swapped=data.draw(st.booleans()),
                               dtype=data.draw(st.sampled_from(TYPES if path == "tensor" else (*TYPES, DType.F32))))
    assert match.operand("residual") is not None and match.text("norm") in (norm, "rms") and FAMILY.accepts(match, H200) is True
    source = FAMILY.lower(match, PATHS[path], H200)
    assert is_right(match, graph, source, data.draw(st.integers(0, 99)), data.draw(st.sampled_from(SCHEDULES)))


INCLUDE, ROW = Path(agentcompile_cuda_kit.__file__).parent / "include", "agentcompile/row.cuh"
WRONG_SUMS = {
    "the residual is left out": ("scales[lane], 0.0f) + others[lane]", "scales[lane], 0.0f)"),
    "the norm is not rounded": ("normalize<Kind, T>(values[lane], row, scales[lane], 0.0f) + others", "values[lane] + others"),
    "nobody writes the sum": ("if (out != nullptr) made.store", "if (false) made.store"),
    "every block writes the sum": ("blockIdx.x == 0 ? operands.residual_out : nullptr", "operands.residual_out"),
    "another eps": ("before.eps, scratch", "before.eps + 0.5f, scratch"),
    "the sum is not what is normed": ("if (index < vectors) row[held] = before.sum(", "if (index < vectors) before.sum("),
    "the weight is left out": ("if (weight != nullptr && index < vectors)", "if (false)"),
}


@pytest.mark.parametrize("path", ["direct", "ring", "tensor"])
@pytest.mark.parametrize("what", sorted(WRONG_SUMS))
def test_a_wrong_sum_is_seen(what: str, path: str) -> None:
    text, wrong = WRONG_SUMS[what]
    match, graph = summed_case(n=40, k=512, norm="rms")
    source = FAMILY.lower(match, PATHS[path], H200)
    library = (INCLUDE / ROW).read_text(encoding="utf-8")
    headers = (*source.headers, (ROW, library))
    changed = evolve(source, code=source.code.replace(text, wrong), headers=tuple((name, t.replace(text, wrong)) for name, t in headers))
    assert changed != evolve(source, headers=headers) and is_right(match, graph, source, 3)
    try:
        assert not is_right(match, graph, changed, 3)
    except EmulationError:
        return


WRONG = {
    "nobody writes it": ("if (blockIdx.x != 0) return;", "return;"),
    "every block writes it": ("if (blockIdx.x != 0) return;", ""),  # all write the same: a race is what is wrong
    "the first thread alone writes": ("index < vectors; index += Threads", "index < 1; index += Threads"),
    "the row behind is written": ("operands.norm_out + index", "operands.norm_out + 1 + index"),
}


@pytest.mark.parametrize("path", ["direct", "ring", "tensor"])
@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str, path: str) -> None:
    text, wrong = WRONG[what]
    match, graph = shared_norm_case(n=40, k=512)
    source = FAMILY.lower(match, PATHS[path], H200)
    changed = evolve(source, headers=tuple((name, part.replace(text, wrong)) for name, part in source.headers))
    assert changed != source and is_right(match, graph, source, 3)
    try:
        assert not is_right(match, graph, changed, 3)
    except EmulationError:
        return


def test_without_a_norm_nothing_is_written() -> None:
    match = linear_case(n=4, k=64)[0]
    more = Operand(name="norm_out", role=Role.OUTPUT, access=match.need("out").access, values=("y",),
                   spec=TensorSpec(shape=(1, 1, 64), dtype=DType.F16))
    refused = FAMILY.accepts(evolve(match, operands=(*match.operands, more)), H200)
    assert refused is not True and "norm_out is written where there is a norm" in refused.reason
