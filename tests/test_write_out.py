"""Operators that are written out: the same numbers from others, which rules know; and error rules of losses, which torch passes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference import DTYPES, Build
from torch import Tensor, nn

from agentcompile_core.errors import AgentCompileError
from agentcompile_core.ir.graph import DType, Graph, Workload
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import compare, oracle
from agentcompile_core.ops.reference.second_opinion import disagreement
from agentcompile_core.stages.capture.modules import capture_module, load_module

DRAWS = settings(max_examples=5, derandomize=True, database=None, deadline=None)
X, Y, Z = (torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
IMAGE = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(3))
WRITTEN = {  # what is called, on what, and the operators that stand in the graph instead
    "mse": (F.mse_loss, (X, Y), "mse_loss mean"), "huber, summed": (lambda x, y: F.huber_loss(x, y, "sum", 0.7), (X, Y), "huber_loss sum"),
    "smooth l1": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.3), (X, Y), "smooth_l1_loss mean"), "l1": (F.l1_loss, (X, Y), "l1_loss mean"),
    "divergence": (lambda x, y: F.kl_div(x, y.softmax(1), reduction="batchmean"), (X, Y), "softmax kl_div sum div"),
    "divergence of logarithms": (lambda x, y: F.kl_div(x, y, log_target=True, reduction="sum"), (X, Y), "kl_div sum"),
    "binary": (F.binary_cross_entropy, (X.sigmoid(), Y.sigmoid()), "binary_cross_entropy mean"),
    "binary of scores": (F.binary_cross_entropy_with_logits, (X, Y.sigmoid()), "binary_cross_entropy_with_logits mean"),
    "margin": (F.soft_margin_loss, (X, Y.sign()), "soft_margin_loss mean"),
    "triplet": (F.triplet_margin_loss, (X, Y, Z),
                "sub add linalg_vector_norm sub add linalg_vector_norm add sub clamp_min mean"),
    "distance": (lambda x, y: F.pairwise_distance(x, y, p=1.0, keepdim=True), (X, Y), "sub add linalg_vector_norm"),
    "cosine": (lambda x, y: F.cosine_similarity(x, y, dim=0), (X, Y),
               "mul sum linalg_vector_norm clamp_min linalg_vector_norm clamp_min mul div"),
    "pool of everything": (lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,), "mean"),
    "pool into parts": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), (IMAGE,), "avg_pool2d"),
    "dot": (torch.dot, (X[0], Y[0]), "mul sum"), "outer": (torch.outer, (X[0], Y[1]), "unsqueeze mul"),
    "rms norm": (lambda x: F.rms_norm(x, (16,)), (X.bfloat16(),), "rms_norm"),
    "normalized": (lambda x: F.normalize(x, dim=0), (X,), "linalg_vector_norm clamp_min div"),
}
KEPT = {
    "weighted": (lambda x, y: F.binary_cross_entropy(x, y, weight=y, reduction="none"), (X.sigmoid(), Y.sigmoid()), "binary_cross_entropy"),
    "swapped": (lambda x, y, z: F.triplet_margin_loss(x, y, z, swap=True), (X, Y, Z), "triplet_margin_loss"),
    "cubes": (lambda x, y: F.pairwise_distance(x, y, p=3.0), (X, Y), "pairwise_distance"),
    "windows that meet": (lambda x: F.adaptive_avg_pool2d(x, 5), (IMAGE,), "adaptive_avg_pool2d"),
    "dot in half precision": (torch.dot, (X[0].half(), Y[0].half()), "dot"),
    "half precision": (F.cosine_similarity, (X.half(), Y.half()), "cosine_similarity"),
}


class Called(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(*given)  # type: ignore[operator]


def captured(function: object, given: tuple[Tensor, ...]) -> Graph:
    loaded = load_module(Called(function), given, dtype=None, device="cpu")
    (graph,) = capture_module(loaded, Workload(dtype=DType.F32, max_context=1)).graphs
    return graph


@pytest.mark.parametrize("name", (*WRITTEN, *KEPT))
def test_what_is_written_out_computes_the_same(name: str) -> None:
    function, inputs, operators = {**WRITTEN, **KEPT}[name]
    graph = captured(function, inputs)
    names = [node.op.split(".")[1] for node in graph.nodes]
    assert names == operators.split()
    found = compile_nodes(graph, device=torch.device("cpu")).run(dict(zip(graph.inputs, inputs, strict=True)))
    torch.testing.assert_close(found[graph.outputs[0]], function(*inputs), rtol=2e-6, atol=1e-6)


LOSSES = {
    "mse_loss": (), "l1_loss": (), "smooth_l1_loss": (0.5,), "huber_loss": (0.5,), "soft_margin_loss": (),
    "binary_cross_entropy": (), "binary_cross_entropy_with_logits": (), "kl_div": (),
}


@pytest.mark.parametrize("name", LOSSES)
@DRAWS
@given(dtype=st.sampled_from(list(DTYPES.values())), seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 1.0, 9.0]), ends=st.booleans())
def test_torchs_losses_pass_and_what_is_off_does_not(name: str, dtype: torch.dtype, seed: int, scale: float, ends: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(5, 40, generator=generator) * scale for _ in range(2))
    x = x.sigmoid() if name == "binary_cross_entropy" else x
    target = target.sigmoid() if "binary" in name or name == "kl_div" else target
    if ends:  # logarithms of nothing, kinks
        x[0, :8], target[0, :8] = torch.tensor([0.0, 1.0] * 4), torch.tensor([0.0, 0.0, 1.0, 1.0] * 2)
    x[1, 3] = float("nan") if name != "binary_cross_entropy" else x[1, 3]
    b, weights = Build(), (None,) * (1 + name.endswith("logits")) if "binary" in name else ()
    given_ = (b.given("x", x.to(dtype)), b.given("target", target.to(dtype)))
    found = b.call(f"aten.{name}.default", *given_, *weights, 0, *LOSSES[name])
    graph = b.graph(found)
    expected = oracle(graph, b.tensors)
    assert disagreement(graph, b.tensors, expected) == ""
    for value, bound in expected.items():
        check = compare(b.results[value], bound)
        assert check.ok, check
        assert not compare((bound.value * 1.06 + (bound.value == 0) * 0.1).to(dtype), bound).ok


def test_losses_with_weights_of_their_own_have_no_error_rule() -> None:
    b = Build()
    x, weight = b.given("x", X.sigmoid()), b.given("weight", Y.abs())
    found = b.call("aten.binary_cross_entropy.default", x, x, weight, 0)
    with pytest.raises(AgentCompileError, match="binary_cross_entropy"):
        oracle(b.graph(found), b.tensors)
