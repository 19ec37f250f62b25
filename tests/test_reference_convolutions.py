"""Budgets of short convolutions: honest sums in any order are inside, what is left out is not."""

import math

import pytest
import torch
from agentcompile_rules_transformers.testing import Draft
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.convolution import causal_convolution
from agentcompile_core.ops.operator_names import CONVOLUTION
from agentcompile_core.ops.reference import Bounded, compare, oracle
from agentcompile_core.ops.reference.second_opinion import disagreement
from agentcompile_core.ops.work import flops_of
from agentcompile_core.plugin_api import DType, Graph

Values = dict[str, torch.Tensor]
SETTINGS = settings(max_examples=10, derandomize=True, database=None, deadline=None)
TYPES = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}


@frozen(kw_only=True)
class Columns:
    """A convolution of ``channels`` over ``tokens`` columns with weights of ``width``; ``of_x`` is the type of columns and state."""

    channels: int
    tokens: int
    width: int
    of_x: DType
    of_weight: DType
    bias: bool
    silu: bool

    def drawn(self, seed: int) -> Values:
        """Normal numbers."""
        generator = torch.Generator().manual_seed(seed)
        wide = {"state": (1, self.channels, self.width), "x": (1, self.channels, self.tokens), "weight": (self.channels, self.width)}
        wide |= {"bias": (self.channels,)} if self.bias else {}
        return {name: torch.randn(*shape, generator=generator).to(TYPES[self.of_weight if name in ("weight", "bias") else self.of_x])
                for name, shape in wide.items()}

    def expected(self, values: Values) -> tuple[Bounded, ...]:
        """The reference of both results."""
        graph = self.graph(values)
        found = oracle(graph, values)
        assert disagreement(graph, values, found) == ""
        return tuple(found[name] for name in graph.outputs)

    def graph(self, values: Values) -> Graph:
        """The call alone."""
        draft, kinds = Draft(), {kind: dtype for dtype, kind in TYPES.items()}
        args = [draft.given(name, tuple(values[name].shape), kinds[values[name].dtype]) if name in values else None
                for name in ("state", "x", "weight", "bias")]
        shapes = (1, self.channels, self.tokens), (1, self.channels, self.width)
        return draft.graph(*draft.call(CONVOLUTION, (*args, None, self.silu), *shapes, dtype=self.of_x))

    def framework(self, values: Values) -> tuple[torch.Tensor, torch.Tensor]:
        """The operator itself."""
        return causal_convolution(values["state"], values["x"], values["weight"], values.get("bias"), None, self.silu)


def uses(found: tuple[torch.Tensor, ...], expected: tuple[Bounded, ...]) -> tuple[float, ...]:
    """How much of their budgets results use."""
    compared = [compare(one, bound) for one, bound in zip(found, expected, strict=True)]
    return tuple(math.inf if not one.ok and one.budget_use <= 1 else one.budget_use for one in compared)


def fused(values: Values, silu: bool) -> torch.Tensor:
    """The convolution in float32 without a rounding before silu, the last product first."""
    columns = torch.cat((values["state"], values["x"]), -1)[0, :, 1:].float()
    total = values["bias"].float()[:, None] if "bias" in values else 0.0
    for k in reversed(range(values["weight"].shape[1])):
        total = total + values["weight"][:, k, None].float() * columns[:, k : k + values["x"].shape[-1]]
    return (torch.nn.functional.silu(total) if silu else total)[None].to(values["x"].dtype)


COLUMNS = st.builds(Columns, channels=st.sampled_from((1, 8, 96, 768)), tokens=st.sampled_from((1, 3, 17)), width=st.integers(2, 5),
                    of_x=st.sampled_from(tuple(TYPES)), of_weight=st.sampled_from(tuple(TYPES)), bias=st.booleans(), silu=st.booleans())


@settings(SETTINGS, max_examples=100)
@given(one=COLUMNS, seed=st.integers(0, 10**6))
def test_convolutions_in_any_order_are_inside(one: Columns, seed: int) -> None:
    values = one.drawn(seed)
    expected = one.expected(values)
    assert max(uses(one.framework(values), expected)) <= 1
    assert uses(one.framework(values), expected)[1] == 0 and not bool(expected[1].error.any())
    assert uses((fused(values, one.silu),), expected[:1])[0] <= 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_is_left_out_of_a_convolution_shows(dtype: DType, silu: bool, tokens: int) -> None:
    one = Columns(channels=512, tokens=tokens, width=4, of_x=dtype, of_weight=dtype, bias=True, silu=silu)
    honest = []
    for seed in range(8):
        values = one.drawn(seed)
        out, last = one.expected(values)
        honest.append(uses(one.framework(values), (out, last))[0])
        wrong = [fused(values, not silu)]
        for changed in ({"weight": values["weight"].flip(-1)}, {"bias": torch.zeros_like(values["bias"])},
                        {"weight": torch.cat((torch.zeros_like(values["weight"][:, :1]), values["weight"][:, 1:]), -1)},
                        {"state": values["state"].roll(1, -1)}):
            wrong.append(fused(values | changed, silu))
        if dtype is DType.F32:
            wrong += [fused(values | {name: values[name].bfloat16().float()}, silu) for name in ("x", "weight", "state")]
        assert not any(compare(found, out).ok for found in wrong)
        for found in (values["state"], last.value.to(TYPES[dtype]).roll(1, -1), last.value.to(TYPES[dtype]) * 1.01):
            assert not compare(found, last).ok
    assert max(honest) > 0.05


def test_arithmetic_is_counted() -> None:
    one = Columns(channels=8, tokens=3, width=4, of_x=DType.BF16, of_weight=DType.BF16, bias=True, silu=True)
    graph = one.graph(one.drawn(0))
    assert flops_of(graph.nodes, graph) == 2 * 4 * 8 * 3
