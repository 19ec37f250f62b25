"""An equal module runs the programs of a compiled one over its own parameters; any other module is refused before anything is installed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.store import Store


class Block(nn.Module):
    """Two products with a gain that Python knows, a mask, and a branch by an attribute."""

    def __init__(self, width: int = 8, inner: int = 12, gain: float = 2.0, bias: bool = True, sign: float = 1.0) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias), gain
        self.register_buffer("mask", torch.randint(0, 2, (inner,)).float() * sign)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.relu(self.up(x)) * self.mask)


def compiled(module: nn.Module, rows: int = 3, width: int = 8, **options: Any) -> Any:
    return ac.compile(module, example_inputs=(torch.randn(rows, width),), target="h200", store=Store(None),
                      **{"run_on": "framework", "origins": [], "validators": (), "budget_plans": 1, **options})


@settings(deadline=None, max_examples=6)
@given(st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_each_reads_its_own_weights_and_sees_them_changed(width: int, inner: int, bias: bool) -> None:
    first, second = (Block(width, inner, bias=bias).eval().requires_grad_(False) for _ in range(2))
    one = compiled(first, width=width)
    other = one.sibling(second)
    x = torch.randn(3, width)
    for _ in range(2):
        torch.testing.assert_close(other(x), second(x))
        torch.testing.assert_close(one(x), first(x))
        for parameter in second.parameters():
            parameter.mul_(0.5)
    assert other.loaded.module is second and other.compilation is one.compilation and one.loaded.module is first


@pytest.mark.slow
def test_kernels_are_shared_and_not_built_again() -> None:
    pytest.importorskip("agentcompile_validator_emulation")
    first, second = (nn.Linear(32, 16).eval().requires_grad_(False) for _ in range(2))
    one = compiled(first, rows=1, width=32, run_on="emulation", rounds=1, validators=("numerics",),
                   origins=("generated",))
    other, x = one.sibling(second), torch.randn(1, 32)
    assert any(segment.step for segment in other.session.program.segments), "the sibling runs the kernel too"
    torch.testing.assert_close(other(x), second(x))
    assert other.sibling(first).compilation is one.compilation


def hooked(module: nn.Module) -> nn.Module:
    module.up.register_forward_hook(lambda owner, inputs, result: result + 1.0)
    return module


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "width": lambda: Block(inner=13), "attribute": lambda: Block(gain=3.0), "no bias": lambda: Block(bias=False),
    "type": lambda: Block().double(), "hook": lambda: hooked(Block()), "class": lambda: nn.Linear(8, 8),
    "without data": lambda: Block().to("meta")}


@pytest.fixture(scope="module")
def block() -> Any:
    return compiled(Block().eval())


@pytest.mark.parametrize("other", OTHERS)
def test_another_module_is_refused_and_left_as_it_is(block: Any, other: str) -> None:
    one, module = block, OTHERS[other]().eval()
    places = [tensor.data_ptr() for tensor in module.parameters()]
    with pytest.raises(UsageError):
        one.sibling(module)
    assert [tensor.data_ptr() for tensor in module.parameters()] == places


def test_a_module_in_training_mode_that_does_something_else_then_is_refused() -> None:
    one = compiled(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval())
    with pytest.raises(UsageError, match="training mode"):
        one.sibling(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train())


def test_what_was_not_compiled_here_shares_nothing(tmp_path: Any) -> None:
    module = Block().eval()
    folder = compiled(module, run_on="nothing").save(tmp_path / "bundle")
    loaded = ac.load(folder, module, example_inputs=(torch.randn(3, 8),), store=Store(None), run_on="framework")
    with pytest.raises(UsageError, match="save its bundle"):
        loaded.sibling(Block().eval())
    with pytest.raises(UsageError, match="save its bundle"):
        compiled(module, run_on="nothing").sibling(Block().eval())
