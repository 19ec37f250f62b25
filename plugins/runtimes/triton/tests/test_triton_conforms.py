"""All three implementations pass the kit for implementations, and say what their kernels do not compute."""

import os
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.testing import (
    channel_norm_case,
    elementwise_case,
    linear_case,
    norm_case,
    norms_beside_case,
    part_case,
    rope_case,
    rope_heads_case,
)
from agentcompile_runtime_triton import TritonActivation, TritonNorm, TritonRope, agentcompile_implementations, package
from attrs import evolve

from agentcompile_core.plugin_api import DType, Match, Origin, Reject
from agentcompile_core.testing.implementation_conformance import ImplementationConformance

F32, BF16 = DType.F32, DType.BF16
TARGET = ImplementationConformance.target
# Triton's interpreter cuts off what it narrows to bfloat16, where a GPU rounds to the nearest.
ROUNDS = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of the interpreter, at infinities


@pytest.mark.usefixtures("there")
class Kit(ImplementationConformance):
    """What runs kernels is skipped where they cannot run."""

    __test__ = False

    @pytest.mark.usefixtures("interpreted")
    def test_results_on_the_cpu(self) -> None:
        super().test_results_on_the_cpu()

    @pytest.mark.device
    @pytest.mark.usefixtures("compiled")
    def test_results_on_the_device(self) -> None:
        super().test_results_on_the_device()

    @pytest.mark.usefixtures("interpreted")
    def test_capturable_is_true_of_it(self) -> None:
        super().test_capturable_is_true_of_it()


class TestNorm(Kit):
    __test__ = True
    implementation = TritonNorm()
    cases = (norm_case(columns=72, rows=3), norm_case(columns=33, residual=True), norm_case(columns=48, norm="rms_one_plus", dtype=F32),
             norm_case(columns=40, rows=2, norm="rms_once", weights=F32), norm_case(columns=1, norm="rms_bare"),
             *([norm_case(columns=96, residual=True, dtype=BF16)] if ROUNDS else []))
    rejected = (norm_case(columns=64, norm="layer"), norm_case(columns=64, tail=("silu",)), norms_beside_case(columns=(64, 64)),
                channel_norm_case(shape=(1, 4, 8)), norm_case(columns=32768), linear_case(n=8, k=16, norm="rms"))


class TestRope(Kit):
    __test__ = True
    implementation = TritonRope()
    cases = (rope_case(heads=5, head_dim=24), rope_case(heads=3, head_dim=20, rotary_dim=8, dtype=F32),
             rope_case(heads=2, head_dim=16, interleaved=True), rope_heads_case(heads=3, rotary=8, rest=12, layout="half"),
             *([rope_case(heads=4, head_dim=128, dtype=BF16)] if ROUNDS else []))
    rejected = (rope_heads_case(heads=3, rotary=8, rest=12, shared=True), rope_heads_case(heads=2, rotary=8, rest=4, layout="apart"),
                norm_case(columns=64))


class TestActivation(Kit):
    __test__ = True
    implementation = TritonActivation()
    cases = (elementwise_case(columns=33, rows=2), elementwise_case(columns=300, dtype=F32),
             elementwise_case(columns=7, operators=("gelu",)), elementwise_case(columns=64, operators=("relu", "mul")),
             elementwise_case(columns=50, operators=("sigmoid", "mul")),
             *([elementwise_case(columns=1100, dtype=BF16)] if ROUNDS else []))
    rejected = (elementwise_case(columns=8, operators=("tanh", "mul")), elementwise_case(columns=8, operators=("mul", "silu")),
                elementwise_case(columns=8, operators=("silu", "mul", "mul")), elementwise_case(columns=8, operators=("silu", "add")),
                part_case(heads=2, width=4), norm_case(columns=64))


def test_all_are_written_by_hand_and_stay_inside_a_graph() -> None:
    offered = {one.name: one for one in agentcompile_implementations()}
    assert set(offered) == {"norm", "rope", "activation"}
    assert all(one.origin is Origin.HANDWRITTEN and one.capturable for one in offered.values())


ONE_OF_EACH = ((TritonNorm(), norm_case(columns=64)[0]), (TritonRope(), rope_case(heads=2, head_dim=16)[0]),
               (TritonActivation(), elementwise_case(columns=64)[0]))


@pytest.mark.parametrize(("implementation", "match"), ONE_OF_EACH)
def test_one_sentence_says_what_is_not_there(implementation: Any, match: Match, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: False)
    answer = implementation.accepts(match, TARGET)
    assert isinstance(answer, Reject) and "triton is not installed; install it" in answer.reason
    monkeypatch.setattr(package, "is_installed", lambda: True)
    monkeypatch.setattr(package, "has_device", lambda: False)
    answer = implementation.accepts(match, TARGET)
    assert isinstance(answer, Reject) and "torch sees none" in answer.reason


def changed(match: Match, **attributes: Any) -> Match:
    return evolve(match, attributes=tuple({**dict(match.attributes), **attributes}.items()))


def retyped(match: Match, name: str, dtype: DType) -> Match:
    return evolve(match, operands=tuple(evolve(o, spec=evolve(o.spec, dtype=dtype)) if o.name == name else o for o in match.operands))


NORM, ROPE, ACTIVATION = (match for _, match in ONE_OF_EACH)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(("implementation", "match", "said"), [
    (TritonNorm(), changed(NORM, groups=2), "one weight"), (TritonNorm(), changed(NORM, rows=2), "rows of 64"),
    (TritonNorm(), retyped(NORM, "weight", F32), "weight in float32"), (TritonNorm(), retyped(NORM, "x", DType.I64), "x in int64"),
    (TritonRope(), changed(ROPE, style="spiral"), "spiral"), (TritonRope(), changed(ROPE, rotary_dim=15), "must be even"),
    (TritonRope(), changed(ROPE, first=2), "inside the head"), (TritonRope(), changed(ROPE, x_step=17), "17 apart, in 32 of x"),
    (TritonRope(), changed(ROPE, heads=3), "3 heads of 16"), (TritonRope(), retyped(ROPE, "cos", F32), "cos in float32 and sin"),
    (TritonRope(), retyped(ROPE, "out", BF16), "out in bfloat16"),
    (TritonActivation(), changed(ACTIVATION, broadcast1="row"), "as large as"),
    (TritonActivation(), retyped(ACTIVATION, "in1", F32), "in1"),
    (TritonActivation(), evolve(ACTIVATION, epilogue=None), "alone or times another input"),
])
def test_what_a_kernel_would_read_or_compute_otherwise_is_refused(implementation: Any, match: Match, said: str) -> None:
    answer = implementation.accepts(match, TARGET)
    assert isinstance(answer, Reject) and said in answer.reason
