"""The kernels compute what the framework's operators do, in every variant, and write nothing beside it; planted defects are refused."""

import itertools
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.testing import elementwise_case, norm_case, rope_case
from agentcompile_runtime_triton import TritonActivation, TritonNorm, TritonRope
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from agentcompile_core.ops import operators
from agentcompile_core.plugin_api import DType, Expression, Implementation, Match, Operation, Origin, PointwiseKind, Schedule
from agentcompile_core.testing.implementation_conformance import ImplementationConformance

TARGET = ImplementationConformance.target
TYPES = (DType.F16, DType.F32)  # bfloat16 on the device only: the interpreter cuts off what it narrows to it
KIND = PointwiseKind
FUNCTIONS = {KIND.SILU: F.silu, KIND.GELU: F.gelu, KIND.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"), KIND.RELU: F.relu,
             KIND.SIGMOID: torch.sigmoid}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of the interpreter, at infinities
some = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def drawn(match: Match, seed: int, device: str) -> dict[str, Tensor]:
    """Operands; results hold NaN, and all lie in the middle of more memory that is looked at afterwards."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for operand in match.operands:
        dtype = getattr(torch, operand.spec.dtype.value)
        whole = torch.full((operand.spec.numel + 64,), float("nan"), dtype=dtype, device=device)
        tensor = whole[32:-32].view(operand.spec.shape)
        if "out" not in operand.name:
            tensor.copy_(torch.randn(operand.spec.shape, generator=generator).to(device, dtype))
        made[operand.name] = tensor
    return made


def ran(implementation: Any, match: Match, seed: int, device: str, schedule: Schedule | None = None) -> dict[str, Tensor]:
    """The operands behind a run; nothing beside them was written, and nothing that is read has changed."""
    schedule = schedule or implementation.space(match, TARGET).points[0]
    operands = drawn(match, seed, device)
    before = {name: tensor.clone() for name, tensor in operands.items() if "out" not in name}
    implementation.bind(match, schedule, TARGET)(**operands)
    for name, tensor in operands.items():
        whole = tensor._base
        assert whole is not None and whole[:32].isnan().all() and whole[-32:].isnan().all(), f"something beside {name} was written"
        assert name not in before or torch.equal(before[name], tensor)
    return operands


def close(found: Tensor, wanted: Tensor, roundings: float = 1.0) -> None:
    """Within some units in the last place of the type, and of what float32 errs."""
    eps = max(torch.finfo(found.dtype).eps, 2e-6)
    torch.testing.assert_close(found.double(), wanted.double().view_as(found), rtol=roundings * eps, atol=roundings * eps)


def check_norm(case: dict[str, Any], seed: int, device: str) -> None:
    match, _ = norm_case(**case)
    for schedule in TritonNorm().space(match, TARGET).points:
        found = ran(TritonNorm(), match, seed, device, schedule)
        x = found["x"] + found["residual"] if "residual" in found else found["x"]
        if "residual_out" in found:
            assert torch.equal(found["residual_out"], x), "the sum is the framework's own, bit for bit"
        norm = match.text("norm")
        wanted = operators.rms_norm(x, found.get("weight"), match.number("norm_eps"), norm == "rms_one_plus", norm == "rms_once")
        close(found["out"], wanted, 2.0)


@pytest.mark.usefixtures("interpreted")
@some
@given(columns=st.integers(1, 200), rows=st.integers(1, 4), norm=st.sampled_from(["rms", "rms_bare", "rms_once", "rms_one_plus"]),
       residual=st.booleans(), dtype=st.sampled_from(TYPES), seed=st.integers(0, 99))
def test_norms(columns: int, rows: int, norm: str, residual: bool, dtype: DType, seed: int) -> None:
    check_norm({"columns": columns, "rows": rows, "norm": norm, "residual": residual, "dtype": dtype}, seed, "cpu")


def check_rope(case: dict[str, Any], seed: int, device: str) -> None:
    match, _ = rope_case(**case)
    for schedule in TritonRope().space(match, TARGET).points:
        found = ran(TritonRope(), match, seed, device, schedule)
        wide = (found[name].double() for name in ("x", "cos", "sin"))
        close(found["out"], operators.rope(*wide, match.text("style") == "interleaved"), 2.0)


@pytest.mark.usefixtures("interpreted")
@some
@given(heads=st.integers(1, 6), pairs=st.integers(1, 20), rest=st.integers(0, 9), interleaved=st.booleans(), dtype=st.sampled_from(TYPES),
       seed=st.integers(0, 99))
def test_rotations(heads: int, pairs: int, rest: int, interleaved: bool, dtype: DType, seed: int) -> None:
    case = {"heads": heads, "head_dim": 2 * pairs + rest, "rotary_dim": 2 * pairs, "interleaved": interleaved, "dtype": dtype}
    check_rope(case, seed, "cpu")


def product(kind: PointwiseKind, *, turned: bool, rounded: bool, count: int, dtype: DType) -> Match:
    """``kind`` of in0 (``turned``: of in1) times the other input, ``rounded`` before."""
    match, _ = elementwise_case(columns=count, dtype=dtype)
    x, other = ("in1", "in0") if turned else ("in0", "in1")
    steps = [Operation(kind, (x,)), *([Operation(KIND.ROUND, (0,))] if rounded else [])]
    steps.append(Operation(KIND.MUL, (other, len(steps) - 1) if turned else (len(steps) - 1, other)))
    return evolve(match, epilogue=Expression(arguments=("in0", "in1"), operations=tuple(steps)))


def check_product(match: Match, seed: int, device: str) -> None:
    assert match.epilogue is not None
    kind, *rest = (operation.kind for operation in match.epilogue.operations)
    turned = match.epilogue.operations[0].operands == ("in1",)
    for schedule in TritonActivation().space(match, TARGET).points:
        found = ran(TritonActivation(), match, seed, device, schedule)
        x, other = (found[name] for name in (("in1", "in0") if turned else ("in0", "in1")))
        active = FUNCTIONS[kind](x.float())
        active = active.to(x.dtype).float() if KIND.ROUND in rest else active
        close(found["out"], active * other.float(), 2.0)


@pytest.mark.usefixtures("interpreted")
@some
@given(kind=st.sampled_from(list(FUNCTIONS)), turned=st.booleans(), rounded=st.booleans(), count=st.integers(1, 1500),
       dtype=st.sampled_from(TYPES), seed=st.integers(0, 99))
def test_activations_times_another_input(kind: PointwiseKind, turned: bool, rounded: bool, count: int, dtype: DType, seed: int) -> None:
    match = product(kind, turned=turned, rounded=rounded, count=count, dtype=dtype)
    assert isinstance(TritonActivation().accepts(match, TARGET), bool)
    check_product(match, seed, "cpu")


def check_specials(kind: PointwiseKind, device: str) -> None:
    match = evolve(elementwise_case(columns=8, operators=("relu",), dtype=DType.F32)[0],
                   epilogue=Expression(arguments=("in0",), operations=(Operation(kind, ("in0",)),)))
    x = torch.tensor([float("nan"), float("inf"), -0.0, 0.0, -100.0, 100.0, -3.0e38, 3.0e38], device=device).view(1, 1, 8)
    out = torch.empty_like(x)
    TritonActivation().bind(match, Schedule({"block": 256}), TARGET)(in0=x, out=out)
    wanted = FUNCTIONS[kind](x.double()).float()  # torch's own vectors on a processor have NaN for gelu of infinity
    torch.testing.assert_close(out, wanted, equal_nan=True, rtol=1e-5, atol=1e-30)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_ends_of_the_range_and_what_is_no_number(kind: PointwiseKind) -> None:
    check_specials(kind, "cpu")


class Wrong(Implementation):
    """An implementation that binds the kernel of another match."""

    version, origin, capturable = 1, Origin.HANDWRITTEN, True

    def __init__(self, right: Implementation, changes: dict[str, Any]) -> None:
        self.right, self.changes, self.name = right, changes, right.name

    def accepts(self, match: Match, target: Any) -> Any:
        return self.right.accepts(match, target)

    def space(self, match: Match, target: Any) -> Any:
        return self.right.space(match, target)

    def bind(self, match: Match, schedule: Schedule, target: Any) -> Any:
        return self.right.bind(evolve(match, attributes=tuple({**dict(match.attributes), **self.changes}.items())), schedule, target)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("implementation", "changes", "case"), [
    (TritonNorm(), {"norm_eps": 1e-2}, norm_case(columns=72)), (TritonNorm(), {"norm": "rms_one_plus"}, norm_case(columns=72)),
    (TritonNorm(), {"columns": 71}, norm_case(columns=72)), (TritonNorm(), {"rows": 1}, norm_case(columns=40, rows=2, residual=True)),
    (TritonRope(), {"style": "interleaved"}, rope_case(heads=2, head_dim=16)),
    (TritonRope(), {"heads": 1}, rope_case(heads=2, head_dim=16)),
    (TritonRope(), {"x_step": 0}, rope_case(heads=2, head_dim=16)), (TritonActivation(), {"count": 299}, elementwise_case(columns=300)),
])
def test_planted_defects_are_refused(implementation: Any, changes: dict[str, Any], case: Any) -> None:
    class Kit(ImplementationConformance):
        pass

    Kit.implementation, Kit.cases = Wrong(implementation, changes), (case,)
    with pytest.raises(AssertionError):
        Kit().test_results_on_the_cpu()


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
@pytest.mark.parametrize("seed", [1, 7])
def test_compiled_kernels_compute_the_same(dtype: DType, seed: int) -> None:
    for columns, rows, norm, residual in ((2560, 1, "rms", True), (128, 40, "rms", False), (4096, 2, "rms_one_plus", True),
                                          (2047, 3, "rms_once", False), (16384, 1, "rms_bare", True), (1, 1, "rms", False)):
        check_norm({"columns": columns, "rows": rows, "norm": norm, "residual": residual, "dtype": dtype}, seed, "cuda")
    for heads, head_dim, rotary_dim, interleaved in ((32, 128, 128, False), (8, 80, 32, False), (3, 26, 26, True), (7, 20, 6, True)):
        case = {"heads": heads, "head_dim": head_dim, "rotary_dim": rotary_dim, "interleaved": interleaved, "dtype": dtype}
        check_rope(case, seed, "cuda")
    for kind, turned, rounded, count in itertools.product(FUNCTIONS, (False, True), (False, True), (9728, 301)):
        check_product(product(kind, turned=turned, rounded=rounded, count=count, dtype=dtype), seed, "cuda")
    for kind in FUNCTIONS:
        check_specials(kind, "cuda")


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("compiled")
def test_a_captured_graph_holds_all_three() -> None:
    cases = ((TritonNorm(), norm_case(columns=2560, residual=True)[0]), (TritonRope(), rope_case(heads=32, head_dim=128)[0]),
             (TritonActivation(), elementwise_case(columns=9728)[0]))
    for implementation, match in cases:
        run = implementation.bind(match, implementation.space(match, TARGET).points[0], TARGET)
        operands = drawn(match, 3, "cuda")
        run(**operands)
        wanted = operands["out"].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(**operands)
        operands["out"].fill_(float("nan"))
        graph.replay()
        assert torch.equal(operands["out"], wanted)
