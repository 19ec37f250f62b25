"""What plain modules leave to the framework when they are planned: nothing of those below but what is named."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.stages.capture.modules import capture_module, load_module

X, Y = (torch.randn(12, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
IMAGE, CLASSES = torch.randn(2, 4, 12, 12), torch.arange(12) % 5
CALLS = {  # the call, its inputs, the kinds of the kernels, the operators that are left
    "running sum": (lambda x: x.cumsum(0), (X,), "scan", ""),
    "running sum from the end": (lambda x: x.flip(1).cumsum(1).flip(1), (X,), "scan", ""),
    "running product of squares": (lambda x: (x * x).cumprod(1), (X,), "scan", ""),
    "exponentials": (lambda x: torch.logsumexp(x * 2.0, 1, keepdim=True).tanh(), (X,), "elementwise reduction", ""),
    "classes": (F.cross_entropy, (X, CLASSES), "cross_entropy", ""),
    "huber": (F.smooth_l1_loss, (X, Y), "reduction", ""),
    "binary": (F.binary_cross_entropy_with_logits, (X, Y.sigmoid()), "reduction", ""),
    "triplets": (F.triplet_margin_loss, (X, Y, X.flip(0)), "reduction", ""),
    "cosine": (F.cosine_similarity, (X, Y), "elementwise reduction", ""),
    "unit rows": (F.normalize, (X,), "elementwise reduction", ""),
    "pools": (lambda x: F.avg_pool2d(F.relu(F.max_pool2d(x, 3, 2, 1)), 2), (IMAGE,), "pool", ""),
    "pool of everything": (lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,), "reduction", ""),
    "norm of an image": (lambda x: F.layer_norm(x, (4, 12, 12)), (IMAGE,), "norm", ""),
    "norm in half precision": (lambda x, w: F.rms_norm(x, (64,), w), (X.half(), Y[0].half()), "", "rms_norm"),  # its weight is no parameter
    "places of a pool": (lambda x: F.max_pool2d(x, 2, return_indices=True), (IMAGE,), "", "max_pool2d_with_indices"),
    "weighted classes": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), (X, CLASSES), "", "cross_entropy_loss"),
}


class Called(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given)


@pytest.fixture(scope="module")
def planned() -> Iterator[Callable[[Any, tuple[Tensor, ...]], dict[str, Any]]]:
    """What plans of a module's one forward cover."""
    before = list(sys.path)
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    try:
        from covered import plans

        context = plans.context("cuda/h200")

        def of(module: nn.Module, given: tuple[Tensor, ...]) -> dict[str, Any]:
            loaded = load_module(module.eval(), given, dtype=None, device="cpu")
            return plans.planned(capture_module(loaded, Workload(dtype=DType.F32, max_context=1)), context)

        yield of
    finally:
        sys.path[:] = before


@pytest.mark.parametrize("name", CALLS)
def test_what_is_left_to_the_framework(name: str, planned: Any) -> None:
    function, inputs, kinds, left = CALLS[name]
    found = planned(Called(function), inputs)
    assert set(found["kernels"]) == set(kinds.split())
    assert {op.split(".")[1] for op in found["framework_operators"]} == set(left.split())


def test_an_rms_norm_with_its_own_weight_is_served_in_half_precision(planned: Any) -> None:
    for module in (nn.RMSNorm(64).half(), nn.RMSNorm(64, eps=1e-5).bfloat16()):
        found = planned(module, (X.to(module.weight.dtype),))
        assert found["kernels"] == {"norm": 1} and not found["framework_operators"]
