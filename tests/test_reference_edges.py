"""The reference at the edges: infinities and NaN, overflow, spiky softmax, numbers that no float holds, what plugins declare."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from agentcompile_rules_transformers import testing as cases
from agentcompile_rules_transformers.kinds import KINDS
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import Bounded, compare, oracle
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.testing import doubles
from agentcompile_core.worker.buffers import Buffers
from agentcompile_core.worker.execution import Execution
from agentcompile_core.worker.operands import graph_values, make_inputs

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from test_reference import DTYPES, Build

INF, NAN = float("inf"), float("nan")
BY_NAME = {kind.name: kind for kind in KINDS}
DRAWS = settings(max_examples=5, derandomize=True, database=None, deadline=None)


def against(value: float, error: float, out: float, dtype: torch.dtype = torch.float16) -> bool:
    return compare(torch.tensor([out], dtype=dtype), Bounded(torch.tensor([value]).double(), torch.tensor([error]).double())).ok


@pytest.mark.parametrize(("value", "error", "right", "wrong"), [
    (INF, 0.0, [INF], [-INF, NAN, 65504.0, 0.0]), (-INF, 0.0, [-INF], [INF, NAN, -65504.0]), (INF, INF, [INF], [-INF, NAN, 1.0]),
    (NAN, 0.0, [NAN], [INF, 0.0]), (NAN, INF, [NAN], [INF, 0.0]), (70000.0, 40.0, [INF], [-INF, NAN, 65504.0]),
    (-70000.0, 40.0, [-INF], [INF, NAN]), (65504.0, 0.0, [65504.0], [INF, NAN, 65472.0]), (65510.0, 35.0, [65504.0, INF], [-INF]),
    (1.0, 0.01, [1.0, 1.005], [INF, NAN, 1.1]), (1.0, INF, [1.0, INF, -INF, NAN, 5.0], []),
])
def test_infinities_have_signs_and_nan_is_nan(value: float, error: float, right: list[float], wrong: list[float]) -> None:
    assert all(against(value, error, out) for out in right)
    assert not any(against(value, error, out) for out in wrong)


FUNCTIONS = {
    "x + tanh(x)": lambda b, x: b.call("aten.add.Tensor", x, b.call("aten.tanh.default", x)),
    "square": lambda b, x: b.call("aten.square.default", x), "cube": lambda b, x: b.call("aten.pow.Tensor_Scalar", x, 3),
    "x * 0.3": lambda b, x: b.call("aten.mul.Tensor", x, 0.3), "x * 0.3 (scalar)": lambda b, x: b.call("aten.mul.Scalar", x, 0.3),
    "x + 0.3": lambda b, x: b.call("aten.add.Tensor", x, 0.3), "x / 3": lambda b, x: b.call("aten.div.Tensor", x, 3.0),
    "x - 0.7 x": lambda b, x: b.call("aten.sub.Tensor", x, x, alpha=0.7),
}


def new_gelu(b: Build, x):
    cubed = b.call("aten.mul.Tensor", b.call("aten.pow.Tensor_Scalar", x, 3.0), 0.044715)
    inner = b.call("aten.mul.Tensor", b.call("aten.add.Tensor", x, cubed), 0.7978845608028654)
    return b.call("aten.mul.Tensor", b.call("aten.mul.Tensor", x, 0.5), b.call("aten.add.Tensor", b.call("aten.tanh.default", inner), 1.0))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", [*FUNCTIONS, "NewGELU"])
@DRAWS
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 0.1, 1.0, 10.0, 300.0]))
def test_honest_functions_are_not_refused(name: str, dtype: torch.dtype, seed: int, scale: float) -> None:
    b = Build()
    x = b.given("x", (torch.randn(2000, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype))
    found = b.check((FUNCTIONS | {"NewGELU": new_gelu})[name](b, x))
    assert all(check.ok for check in found.values()), found


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_torch_meets_the_budget_of_a_spiky_softmax(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 256, generator=g)
    x = torch.where(torch.rand(300, 256, generator=g) < 0.02, x * 50, x).to(dtype)
    b = Build()
    check = next(iter(b.check(b.call("aten.softmax.int", b.given("x", x), -1)).values()))
    assert check.ok, check
    off = Bounded(*(t.clone() for t in vars_of(b)))
    assert not compare((off.value * 1.02).to(dtype), off).ok


@pytest.mark.parametrize("op", ["aten.softmax.int", "aten.log_softmax.int"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_masked_score_leaves_the_others_their_budget(op: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    mask = torch.where(torch.rand(64, generator=g) < 0.3, -torch.inf, 0.0).to(dtype)
    b = Build()
    scores = b.call("aten.div.Tensor", b.given("x", (torch.randn(20, 64, generator=g) * 3).to(dtype)), 3.0)
    out = b.call(op, b.call("aten.add.Tensor", scores, b.given("mask", mask)), -1)
    check = next(iter(b.check(out).values()))
    assert check.ok, check
    value, error = vars_of(b)
    live = value.isfinite()
    assert bool(error[live].isfinite().all())
    off = torch.where(live, value + 0.05 * value.abs(), value).to(dtype)
    assert not compare(off, Bounded(value, error)).ok


@pytest.mark.parametrize("columns", [512, 4096])
def test_torch_meets_the_budget_of_a_row_that_one_score_outweighs(columns: int) -> None:
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(4, columns, generator=g) / 8
        x[:, 0] = 4.0 + 2 * seed
        b = Build()
        assert all(check.ok for check in b.check(b.call("aten.softmax.int", b.given("x", x), -1)).values()), seed


def vars_of(b: Build) -> tuple[torch.Tensor, torch.Tensor]:
    name = b.nodes[-1].outputs[0]
    bound = oracle(b.graph(type("R", (), {"value": name})()), b.tensors)[name]
    return bound.value, bound.error


EVERY = {
    "rms": cases.norm_case(columns=40, rows=2, residual=True), "layer": cases.norm_case(columns=40, norm="layer"),
    "linear": cases.linear_case(n=24, k=40, norm="rms", bias=True, activation="gelu", residual=True),
    "gated": cases.gated_case(n=24, k=40, norm="rms"), "elementwise": cases.elementwise_case(columns=40, operators=("silu", "mul", "add")),
    "rope": cases.rope_case(heads=3, head_dim=16), "argmax": cases.argmax_case(n=300, advance=True),
    "attention": cases.attention_case(heads=(4, 2), head_dim=16, capacity=64, rope="rms"),
    "window": cases.attention_case(heads=(4, 2), head_dim=16, capacity=64, window=9, softcap=5.0),
}


@pytest.mark.parametrize("kind", EVERY)
def test_the_framework_passes_every_family_and_little_is_left_unjudged(kind: str) -> None:
    match, graph = EVERY[kind]
    for case in cases_for(match, BY_NAME[match.kind], "edges", emulated=True):
        values = graph_values(match, graph, make_inputs(match, BY_NAME[match.kind], case, "cpu"))
        expected = oracle(graph, values)
        own = {n: t.clone() for n, t in values.items()}
        results = {**own, **compile_nodes(graph, device="cpu").run(own)}
        for name, bound in expected.items():
            check = compare(results[name], bound)
            assert check.ok, f"{case}: {name}: {check.detail}"
            far = case.family in ("max_finite", "infinite", "all_minus_inf", "large_mean", "large_mean_below")
            if not far and bound.value.is_floating_point():
                assert bool((bound.error.isfinite() | ~bound.value.isfinite()).all()), f"{case}: {name} is not judged"


def test_what_a_source_declares_changes_no_budget() -> None:
    assert "reduction_depth" not in inspect.getsource(Execution)


def test_a_misaligned_case_misaligns() -> None:
    trial = doubles.fake_trial("honest")
    straight, crooked = (Buffers(trial, "cpu", misaligned=flag).addresses for flag in (False, True))
    floats = trial.match.operands
    assert floats and all(straight[o.name] % 256 == 0 for o in floats)
    for operand in floats:
        promised = 16 if operand.spec.nbytes % 16 == 0 or operand.role.value not in ("input", "output") else operand.spec.dtype.bytes
        assert crooked[operand.name] % (2 * promised) == promised


@pytest.mark.parametrize("count", [100, 101])
def test_each_ragged_operand_is_also_misaligned_alone(count: int) -> None:
    """A kernel that looks at the address of its result only would trap on an input that lies beside another one."""
    match, _ = doubles.fake_match(count)
    trial = evolve(doubles.fake_trial("honest"), match=match)
    cases = cases_for(match, doubles.FAKE_KIND, "seed")
    alone = [case.alone for case in cases if case.misaligned and not case.carrier]
    ragged = [o.name for o in match.operands if o.spec.nbytes % 16]
    assert alone == ["", *ragged] and len(ragged) == (3 if count % 4 else 0)
    for name in ragged:
        found = Buffers(trial, "cpu", misaligned=True, alone=name).addresses
        assert {other for other, address in found.items() if address % 16} == {name}
