"""Layer norms that multiply with 1 + weight (Nemotron's): one launch each, which reads the weight itself."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.norm import NormRule
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_half_precision import BY_NAME
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.configuration import Config
from agentcompile_core.ir.graph import DType, Graph, Workload
from agentcompile_core.report.accounting import accounting
from agentcompile_core.stages.capture.modules import capture_module, load_module
from agentcompile_core.store import Store
from agentcompile_core.testing.matching import matched

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_templates_cuda_norm import NormFamily
from emulated_cases import within_its_budget

H200 = preset("h200")
Sum = Callable[[Tensor], Tensor]
SUMS: dict[str, Sum] = {
    "w + 1": lambda w: w + 1, "1 + w": lambda w: 1 + w, "w + 1.0": lambda w: w + 1.0, "1.0 + w": lambda w: 1.0 + w,
    "add": lambda w: torch.add(1, w), "scalar": lambda w: torch.ops.aten.add.Scalar(w, 1),
}
OTHERS: dict[str, Sum] = {
    "two": lambda w: w + 2, "itself": lambda w: w + w, "twice": lambda w: torch.add(w, 1, alpha=2), "less": lambda w: w - 1,
    "no weight": lambda w: (w * 2) + 1, "a wider one": lambda w: w.float() + 1,
}


class OnePlus(nn.Module):
    """Layer norms as Nemotron's, of x and, where something is ``beside``, of y; with what is before or behind the first."""

    def __init__(self, sum_of: Sum, width: int, bias: bool, around: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(width) / 4) for _ in range(2)])
        self.bias = nn.Parameter(torch.randn(width)) if bias else None
        self.sum_of, self.around = sum_of, around

    def _norm(self, x: Tensor, which: int, given: Tensor | None = None) -> Tensor:
        weight = self.sum_of(self.weights[which]).to(x.dtype) if given is None else given
        return F.layer_norm(x, x.shape[-1:], weight, self.bias, 1e-5)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.around == "before":
            added = x + y
            return self._norm(added, 0), added
        if self.around == "beside":
            return self._norm(x, 0), self._norm(y, 1)
        if self.around in ("returned", "shared"):
            total = self.sum_of(self.weights[0])
            return self._norm(x, 0, total), total if self.around == "returned" else self._norm(y, 0, total)
        normal = self._norm(x, 0)
        return y + normal if self.around == "behind" else normal


def captured(module: nn.Module, dtype: torch.dtype, rows: int = 2, width: int = 24) -> Graph:
    x, y = (torch.randn(rows, width).to(dtype) for _ in range(2))
    loaded = load_module(module.to(dtype).eval(), (x, y), dtype=None, device="cpu")
    (graph,) = capture_module(loaded, Workload(dtype=DType.F32, max_context=1)).graphs
    return graph


@settings(max_examples=24, derandomize=True, database=None, deadline=None, phases=(Phase.generate,),
          suppress_health_check=list(HealthCheck))
@given(sum_of=st.sampled_from(sorted(SUMS)), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), bias=st.booleans(),
       around=st.sampled_from(["", "before", "behind", "beside"]), rows=st.integers(1, 3), width=st.sampled_from([24, 40, 333]),
       point=st.integers(0, 1))
def test_a_norm_with_one_plus_its_weight_is_one_kernel_within_its_budget(
    sum_of: str, dtype: torch.dtype, bias: bool, around: str, rows: int, width: int, point: int
) -> None:
    around = "" if bias and around == "beside" else around  # norms with a bias stay alone
    whole = captured(OnePlus(SUMS[sum_of], width, bias, around), dtype, rows, width)
    match, graph = matched(NormRule(), whole)
    assert len(graph.nodes) == len(whole.nodes) and match.text("norm") == "layer_one_plus"
    assert {operand.values for operand in match.operands if operand.role.value == "weight"} == {
        (value.name,) for value in whole.values if value.kind.value == "weight"}
    within_its_budget(NormFamily(), BY_NAME["norm"], match, graph, H200, point=point, seed=point)


@pytest.mark.parametrize("sum_of", OTHERS)
def test_another_sum_is_no_such_weight(sum_of: str) -> None:
    graph = captured(OnePlus(OTHERS[sum_of], 24, True, ""), torch.float16)
    assert [match for match in NormRule().find(graph, H200) if match.text("norm") == "layer_one_plus"] == []


@pytest.mark.parametrize("around", ["returned", "shared"])
def test_a_sum_that_others_read_stays_where_it_is(around: str) -> None:
    graph = captured(OnePlus(SUMS["w + 1"], 24, True, around), torch.float16)
    assert len([node for node in graph.nodes if node.op == "aten.add.Tensor"]) == 1
    assert list(NormRule().find(graph, H200)) == []


@pytest.fixture(scope="module")
def nemotron() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        from covered import models
        from covered.special import SPECIAL

        yield models.tiny("nemotron", SPECIAL.get("nemotron", {}))
    finally:
        sys.path[:] = before


def test_norms_of_nemotron_run_on_kernels_that_add_their_1(nemotron: Any) -> None:
    """Those of the layers, and the last one, whose sum belongs to the head: nothing else reads it."""
    mine = ac.compile(nemotron, max_context=48, target="h200", run_on="emulation", store=Store(None),
                      config=Config(validators=("numerics",), budget_plans=40, budget_s=60.0, rounds=1, origins=("generated",)))
    program = mine.compilation.programs["decode"]
    norms = [segment.match for segment in program.segments if segment.match is not None and segment.match.kind == "norm"]
    layers = nemotron.config.num_hidden_layers
    assert [match.text("norm") for match in norms].count("layer_one_plus") == 2 * layers + 1
    assert accounting(program)["framework_operators"] == {}
    prompt = torch.arange(3, 11).view(1, -1)
    wanted = nemotron.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(mine.generate(prompt, 8, eos_token_id=None), wanted)
