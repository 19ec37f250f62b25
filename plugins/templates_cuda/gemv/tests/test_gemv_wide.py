"""Inputs and residuals in float32 beside narrower weights: rounded, normed and weighted on the way, on both paths."""

import math

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import wide_linear_case
from agentcompile_templates_cuda_gemv import GemvFamily
from agentcompile_templates_cuda_gemv.direct_space import direct_schedule
from agentcompile_templates_cuda_gemv.ring_space import ring_schedule
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import Comparison, DType, Graph, Match, Role, Schedule, compare, oracle

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, LaunchOptions
from agentcompile_validator_emulation.testing import TORCH, Emulated, aligned

H200 = preset("h200")
FAMILY = GemvFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
PATHS = {
    "direct": direct_schedule(warps_per_row=1, rows=2, unroll=4, blocks_per_sm=2, warps=2),
    "ring": ring_schedule(rows=2, columns=512, stages=3, in_flight=2, blocks_per_sm=2, specialize_k=False, warps=2),
}
PATHS["tensor"] = Schedule({**dict(PATHS["ring"].items), "path": "tensor"})


def run(pair: tuple[Match, Graph], path: str, seed: int, order: LaunchOptions) -> Comparison:
    match, graph = pair
    assert FAMILY.accepts(match, H200) is True
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for operand in match.operands:
        values = torch.randn(operand.spec.shape, generator=generator)
        values = values * match.integer("k") ** -0.5 if operand.name == "weight" else values
        values = torch.full(operand.spec.shape, math.nan) if operand.role is Role.OUTPUT else values
        tensors[operand.name] = aligned(values, TORCH[operand.spec.dtype])
    values = {operand.values[0]: tensors[operand.name] for operand in match.operands if operand.role is not Role.OUTPUT}
    expected = oracle(graph, values)
    Emulated(FAMILY.lower(match, PATHS[path], H200), match, H200).run(tensors, order)
    return compare(tensors["out"], expected[graph.outputs[0]])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["rounded", "normed", "weighted"])
@FEW
@given(data=st.data())
def test_within_budget(form: str, path: str, data: st.DataObject) -> None:
    """Rows that fit into registers and longer ones, of whole vectors and, on the direct path, of any length."""
    k = data.draw(st.sampled_from((512, 1032, 4104) if path != "direct" else (8, 264, 1031, 4104)))
    pair = wide_linear_case(n=data.draw(st.integers(1, 20)), k=k, form=form, residual=data.draw(st.booleans()),
                            norm=data.draw(st.sampled_from(("rms", "rms_one_plus", "layer"))),
                            dtype=data.draw(st.sampled_from((DType.BF16, DType.F16))))
    assert pair[0].need("x").spec.dtype is DType.F32 and len(pair[0].nodes) == len(pair[1].nodes) == {
        "rounded": 2, "normed": 3, "weighted": 4}[form] + (pair[0].operand("aux0") is not None)
    done = run(pair, path, data.draw(st.integers(0, 99)), data.draw(st.sampled_from(SCHEDULES)))
    assert done.ok, done


def test_other_types_are_refused() -> None:
    match = wide_linear_case(n=4, k=64, form="rounded")[0]
    narrow = tuple(evolve(o, spec=evolve(o.spec, dtype=DType.F16)) if o.name == "x" else o for o in match.operands)
    refused = FAMILY.accepts(evolve(match, operands=narrow), H200)
    assert refused is not True and "operand x is float16 beside weights in bfloat16" in refused.reason

