"""Pointwise operators: what the grammar says of each is what torch computes, and the error rules allow torch and little else."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.elementwise import ElementwiseRule
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_capture_normalize import forward_graph
from torch import Tensor, nn

from agentcompile_core.ir.expression import Expression, PointwiseKind
from agentcompile_core.ops.growth import cone, express, is_pointwise
from agentcompile_core.ops.reference import compare, oracle
from agentcompile_core.ops.reference.second_opinion import disagreement
from agentcompile_core.ops.region_view import RegionView
from agentcompile_core.stages.capture.normalize import normalize

K = PointwiseKind
FEW = settings(max_examples=4, derandomize=True, database=None, deadline=None, phases=(Phase.generate,))
MEANING: dict[PointwiseKind, Callable[..., Tensor]] = {
    K.ADD: torch.add, K.SUB: torch.sub, K.MUL: torch.mul, K.DIV: torch.div, K.NEG: torch.neg, K.SILU: F.silu, K.GELU: F.gelu,
    K.GELU_TANH: functools.partial(F.gelu, approximate="tanh"), K.RELU: torch.relu, K.SIGMOID: torch.sigmoid, K.TANH: torch.tanh,
    K.EXP: torch.exp, K.RSQRT: torch.rsqrt, K.ROUND: lambda x: x, K.ABS: torch.abs, K.SQRT: torch.sqrt, K.LOG: torch.log,
    K.LOG1P: torch.log1p, K.EXPM1: torch.expm1, K.ERF: torch.erf, K.SIN: torch.sin, K.COS: torch.cos, K.FLOOR: torch.floor,
    K.MIN: torch.minimum, K.MAX: torch.maximum, K.GREATER: lambda a, b: (a > b).double(), K.AT_LEAST: lambda a, b: (a >= b).double(),
    K.EQUAL: lambda a, b: (a == b).double(), K.WHERE: lambda c, a, b: torch.where(c != 0, a, b),
}
ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1), "clamp": lambda x: x.clamp(-0.5, 0.7), "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp(max=0.3), "hardtanh": F.hardtanh, "relu6": F.relu6, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid, "softplus": F.softplus, "softplus_beta": lambda x: F.softplus(x, 2.0, 20.0), "mish": F.mish, "elu": F.elu,
    "elu_alpha": lambda x: F.elu(x, 0.4), "selu": F.selu, "celu": lambda x: F.celu(x, 0.7), "logsigmoid": F.logsigmoid,
    "log": torch.log, "log1p": torch.log1p, "expm1": torch.expm1, "erf": torch.erf, "sin": torch.sin, "cos": torch.cos,
    "floor": torch.floor, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "inverse": lambda x: x**-1,
    "inverse_square": lambda x: x**-2, "cube": lambda x: x**3, "reciprocal": torch.reciprocal, "rsub": lambda x: 1 - x,
    "rsub_alpha": lambda x: torch.rsub(x, 2.0, alpha=0.5), "abs": torch.abs, "exp": torch.exp, "gelu": F.gelu, "silu": F.silu,
    "softshrink": lambda x: F.softshrink(x, 0.4), "hardshrink": F.hardshrink, "threshold": lambda x: F.threshold(x, 0.1, 20.0),
}
TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": torch.maximum, "minimum": torch.minimum, "min": torch.min, "max": torch.max, "add": lambda x, y: torch.add(x, y, alpha=0.3),
    "sub": lambda x, y: torch.sub(x, y, alpha=2), "div": torch.div, "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "smooth": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.7), "huber": lambda x, y: F.huber_loss(x, y, "none", 0.3),
    "scores": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
    "divergence": lambda x, y: F.kl_div(x, y, reduction="none"), "margin": lambda x, y: F.soft_margin_loss(x, y, reduction="none"),
}
FINITE = ("gelu",)  # some processors' vectors of it give NaN for infinity, where one element by itself gives infinity
IN_STEPS = ("erf",)  # outside of whole vectors processors compute it in the element type itself, which no device does
CHAINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda x, y: (x * y) * (1 - x), "signs": lambda x, y: torch.where(x > y, x * 2, y - 1),
    "at_most": lambda x, y: torch.where(x <= 0.5, x, 0.0) + y, "equal": lambda x, y: torch.where(x.floor() == y.floor(), x, y),
    "xielu": lambda x, y: torch.where(x > 0, 0.8 * x * x + 0.5 * x, (torch.expm1(torch.min(x, y)) - x) * 0.3 + 0.5 * x),
    "filled": lambda x, y: x.masked_fill(x > y, -3.0) * y,
    "softsign": lambda x, y: F.softsign(x) * y, "distance": lambda x, y: (x - y).abs() ** 2,
}


class Module(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(*given)


def meaning(expression: Expression, values: dict[str, Tensor]) -> Tensor:
    """What the expression computes, in float64."""
    results: list[Tensor] = []
    some = next(iter(values.values()))
    for op in expression.operations:
        read = [values[o] if isinstance(o, str) else results[o] if type(o) is int else torch.full_like(some, o) for o in op.operands]
        results.append(MEANING[op.kind](*read))
    return results[-1] if results else values[expression.arguments[0]]


def _drawn(count: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 0.5, 6.0, 20.5, -30.0, float("inf"), -float("inf"), float("nan")])
    return [torch.cat((torch.randn(80, generator=generator) * 3, special.roll(i))).to(dtype) for i in range(count)]


def apart(x: Tensor) -> Tensor:
    """The same elements, not side by side: the framework then takes them one by one, and may round otherwise."""
    return torch.stack((x, x), -1)[..., 0]


@pytest.mark.parametrize("name", [*ONE, *TWO])
@FEW
@given(dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)), seed=st.integers(0, 99))
def test_an_operator_is_what_the_grammar_says(name: str, dtype: torch.dtype, seed: int) -> None:
    function: Callable[..., Tensor] = {**ONE, **TWO}[name]
    inputs = _drawn(1 + (name in TWO), dtype, seed)
    inputs = [x.where(~x.isinf(), 4.0) for x in inputs] if name in FINITE else inputs
    graph = normalize(forward_graph(Module(function), *inputs))
    view = RegionView(graph=graph)
    (node,) = graph.nodes
    assert is_pointwise(view, node)
    values = {f"input.{i}": x for i, x in enumerate(inputs)}
    expression = express(view, node, {value: f"in{i}" for i, value in enumerate(node.inputs)})
    wide = {f"in{i}": values[value].double() for i, value in enumerate(node.inputs)}
    torch.testing.assert_close(meaning(expression, wide), function(*(x.double() for x in inputs)), rtol=1e-6, atol=1e-7, equal_nan=True)
    expected = oracle(graph, values)
    assert not disagreement(graph, values, expected)
    for given_to in (inputs, [apart(x) for x in inputs] if name not in IN_STEPS else inputs):
        assert compare(function(*given_to), expected[graph.outputs[0]]).ok


@pytest.mark.parametrize("name", CHAINS)
@FEW
@given(dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)), seed=st.integers(0, 99))
def test_a_result_with_all_that_it_is_made_from(name: str, dtype: torch.dtype, seed: int) -> None:
    inputs = _drawn(2, dtype, seed)
    graph = normalize(forward_graph(Module(CHAINS[name]), *inputs))
    view = RegionView(graph=graph)
    found = cone(view, graph.nodes[-1], limit=6, fits=lambda value: True)
    assert found is not None and set(found.nodes) == set(graph.node_by_name)
    values = {f"input.{i}": x for i, x in enumerate(inputs)}
    wide = {f"in{i}": values[value].double() for i, value in enumerate(found.external)}
    torch.testing.assert_close(meaning(found.expression, wide), CHAINS[name](*(x.double() for x in inputs)), rtol=1e-6, atol=1e-7,
                               equal_nan=True)
    expected = oracle(graph, values)
    assert not disagreement(graph, values, expected)
    assert compare(CHAINS[name](*inputs), expected[graph.outputs[0]]).ok


def test_branches_that_meet_again_may_read_more_on_the_way() -> None:
    """xIELU has five inputs, and its two branches in the middle of it eight."""
    def xielu(x: Tensor, up: Tensor, down: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
        above = F.softplus(up) * x * x + beta * x
        return torch.where(x > 0, above, (torch.expm1(torch.min(x, eps)) - x) * (beta + F.softplus(down)) + beta * x)

    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(3, 8, generator=generator), *(torch.rand(1, generator=generator) for _ in range(3)), torch.tensor(-1e-6)]
    graph = normalize(forward_graph(Module(xielu), *inputs))
    view = RegionView(graph=graph)
    found = cone(view, graph.nodes[-1], limit=6, fits=lambda value: True)
    assert found is not None and set(found.nodes) == set(graph.node_by_name) and len(found.external) == 5
    match = next(one for one in ElementwiseRule().find(graph, preset("h200")) if set(one.nodes) == set(found.nodes))
    assert sorted(match.text(f"broadcast{i}") for i in range(5)) == ["full", "scalar", "scalar", "scalar", "scalar"]
    wide = {f"in{i}": inputs[int(value.rpartition(".")[2])].double() for i, value in enumerate(found.external)}
    torch.testing.assert_close(meaning(found.expression, wide), xielu(*(one.double() for one in inputs)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["leaky_relu", "clamp", "hardswish", "elu", "softplus", "mish", "floor", "logsigmoid", "cube", "rsqrt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_a_little_wrong_is_refused(name: str, dtype: torch.dtype) -> None:
    """Four units in the last place more: what a wrong constant, a lost rounding or a shortened series looks like at the least."""
    (x,) = _drawn(1, dtype, 3)
    graph = normalize(forward_graph(Module(ONE[name]), x))
    right = ONE[name](x.double())
    wrong = (right * (1 + (16 if dtype is torch.float32 else 4) * torch.finfo(dtype).eps)).to(dtype)
    assert not compare(wrong, oracle(graph, {"input.0": x})[graph.outputs[0]]).ok


def test_a_choice_that_is_not_sure_may_go_either_way() -> None:
    """x + y is computed with an error, so where it lies next to the threshold both branches are right; elsewhere one is."""
    def step(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x * y > 1.0, x, -x)

    x, y = torch.tensor([3.0, 3.0, 5.0]), torch.tensor([1.0 / 3.0, 0.5, 0.125])
    graph = normalize(forward_graph(Module(step), x, y))
    (expected,) = oracle(graph, {"input.0": x, "input.1": y}).values()
    assert compare(torch.tensor([3.0, 3.0, -5.0]), expected).ok and compare(torch.tensor([-3.0, 3.0, -5.0]), expected).ok
    assert not compare(torch.tensor([3.0, -3.0, -5.0]), expected).ok and not compare(torch.tensor([3.0, 3.0, 5.0]), expected).ok


@pytest.mark.parametrize("function", [
    lambda x: F.softplus(x, 1.0, 2.0), lambda x: x**1.5, lambda x: x**0.5, lambda x: torch.clamp(x, min=x.mean()),
    lambda x: torch.div(x, 2, rounding_mode="floor"),
])
def test_calls_outside_the_grammar_are_left_to_the_framework(function: Callable[[Tensor], Tensor]) -> None:
    graph = normalize(forward_graph(Module(function), torch.randn(5)))
    assert not is_pointwise(RegionView(graph=graph), graph.nodes[-1])
