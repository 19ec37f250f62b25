"""The gemm family against fp64 on the CPU: every path, ragged shapes, both sides in any layout, batches, tails; and wrong kernels."""

import math
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import matmul_case
from agentcompile_templates_cuda_gemm import GemmFamily
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Graph, Match, Schedule, compare, oracle

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES
from agentcompile_validator_emulation.testing import TORCH, Emulated, aligned

H200 = preset("h200")
FAMILY = GemmFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def simt(rows: int, columns: int, depth: int, thread_rows: int, thread_columns: int, splits: int = 1) -> Schedule:
    return Schedule({"path": "simt", "rows": rows, "columns": columns, "depth": depth, "thread_rows": thread_rows,
                     "thread_columns": thread_columns, "splits": splits})


def draw(match: Match, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for operand in match.operands:
        values = torch.randn(operand.spec.shape, generator=generator)
        values = torch.full_like(values, math.nan) if operand.name == "out" else values
        tensors[operand.name] = aligned(values, TORCH[operand.spec.dtype])
    return tensors


def use(match: Match, graph: Graph, tensors: dict[str, torch.Tensor]) -> float:
    values = {o.values[0]: tensors[o.name] for o in match.operands if o.name != "out"}
    (expected,) = oracle(graph, values).values()
    found = compare(tensors["out"], expected)
    return found.budget_use


RAGGED, EVEN = (1, 7, 33, 65), (8, 16, 40, 72)
CASES = {  # the schedule, the type, and what one build serves: layouts, tails, and extents that allow vectors or do not
    "single elements": (simt(32, 64, 16, 4, 4), DType.F32, {"extents": RAGGED, "activation": "relu"}),
    "vectors along terms": (simt(64, 64, 16, 4, 4), DType.F16, {"extents": EVEN, "turned": "b", "bias": "n", "residual": True}),
    "vectors along lines, split": (simt(64, 64, 16, 4, 4, splits=2), DType.BF16, {"extents": EVEN, "turned": "a", "bias": "mn"}),
    "few rows, split": (simt(4, 128, 32, 1, 4, splits=2), DType.F16, {"extents": RAGGED, "turned": "ab", "weight": True}),
}


def product(data: st.DataObject, dtype: DType, said: dict[str, Any]) -> tuple[Match, Graph]:
    """Two matrices, each as it is or turned, in no, one or two batch axes of which b may have fewer."""
    sizes = {name: data.draw(st.sampled_from(said["extents"]), name) for name in "mnk"}
    m, n, k = sizes.values()
    turned, batch = said.get("turned", ""), data.draw(st.sampled_from(((), (3,), (2, 2))), "batch")
    weight = said.get("weight", False) or data.draw(st.booleans(), "one b for all")
    a, b = ((k, m) if "a" in turned else (m, k)), ((n, k) if "b" in turned else (k, n))
    return matmul_case(shapes=((*batch, *a), (*(() if weight else batch), *b)), turned=turned, weight=weight, dtype=dtype,
                       bias=tuple(sizes[name] for name in said.get("bias", "")), activation=said.get("activation", ""),
                       residual=said.get("residual", False))


@pytest.mark.parametrize("name", CASES)
@FEW
@given(data=st.data())
def test_within_budget(name: str, data: st.DataObject) -> None:
    point, dtype, said = CASES[name]
    match, graph = product(data, dtype, said)
    assert FAMILY.accepts(match, H200) is True
    tensors = draw(match, data.draw(st.integers(0, 99), "seed"))
    Emulated(FAMILY.lower(match, point, H200), match, H200).run(tensors, data.draw(st.sampled_from(SCHEDULES), "order"))
    assert use(match, graph, tensors) <= 1.0
