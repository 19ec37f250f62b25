"""An equal module runs the programs of a compiled one over its own parameters; any other module is refused before anything is installed."""

import gc
import weakref
from array import array
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.stages.capture.identity import Identity
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
def test_kernels_are_shared_and_not_built_again(tmp_path: Path) -> None:
    pytest.importorskip("agentcompile_validator_emulation")
    first, second = (nn.Linear(32, 16).eval().requires_grad_(False) for _ in range(2))
    one = compiled(first, rows=1, width=32, run_on="emulation", rounds=1, validators=("numerics",),
                   origins=("generated",))
    other, x = one.sibling(second), torch.randn(1, 32)
    assert any(segment.step for segment in other.session.program.segments), "the sibling runs the kernel too"
    torch.testing.assert_close(other(x), second(x))
    third = one.sibling(nn.Linear(32, 16).eval().requires_grad_(False))
    torch.testing.assert_close(third(x), third.loaded.module(x))
    assert third.save(tmp_path / "bundle").is_dir()


def hooked(module: nn.Module) -> nn.Module:
    module.up.register_forward_hook(lambda owner, inputs, result: result + 1.0)
    return module


class Clamp(nn.Module):
    """A limit that Python knows, of any type."""

    def __init__(self, limit: Any, trained: bool = False) -> None:
        super().__init__()
        self.l, self.limit = nn.Linear(8, 8).requires_grad_(trained), limit

    def forward(self, x: Tensor) -> Tensor:
        limit = self.limit[0] if isinstance(self.limit, array) else self.limit
        return self.l(x).clamp(max=float(limit)) * (2.0 if self.l.weight.requires_grad else 1.0)


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


@pytest.mark.parametrize("limits", [(Decimal(100), Decimal(1000)), (array("d", [1.0]), array("d", [2.0]))])
def test_modules_that_nobody_can_tell_apart_are_refused(limits: tuple[Any, Any], tmp_path: Path) -> None:
    one = compiled(Clamp(limits[0]).eval())
    with pytest.raises(UsageError, match="nobody can tell"):
        one.sibling(Clamp(limits[1]).eval())
    folder = one.save(tmp_path / "bundle")
    with pytest.raises(UsageError, match="nobody can tell"):
        ac.load(folder, Clamp(limits[1]).eval(), example_inputs=(torch.randn(3, 8),), store=Store(None), run_on="framework")


def test_what_steers_python_is_compared() -> None:
    one = compiled(Clamp(1.0, trained=True).eval())
    with pytest.raises(UsageError):
        one.sibling(Clamp(1.0, trained=False).eval())


def test_a_module_like_what_became_of_the_first_one_is_refused() -> None:
    one = compiled(Block().eval())
    one.loaded.module.gain = 3.0
    with pytest.raises(UsageError, match="attributes"):
        one.sibling(Block(gain=3.0).eval())


def test_graphs_are_compared_with_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where identity says nothing: a global that the code reads."""
    block = compiled(Block().eval())
    monkeypatch.setattr("agentcompile_core.stages.capture.identity.identity", lambda loaded: Identity(model="", capture=""))
    monkeypatch.setattr("agentcompile_core.stages.capture.describe.describe", lambda loaded, known: block.graphs.model)
    with pytest.raises(UsageError, match="off by"):
        block.sibling(Block(gain=3.0).eval())


def test_memory_that_a_program_reads_is_no_siblings(block: Any) -> None:
    second, third = Block().eval(), Block().eval()
    other = block.sibling(second)
    third.up.weight = second.up.weight
    apart = Block().eval()
    with torch.no_grad():
        apart.down.weight.set_(block.loaded.module.down.weight.detach())
    for module in (block.loaded.module, second, third, apart):
        for of in (block, other):
            with pytest.raises(UsageError, match="lies in memory"):
                of.sibling(module)
    assert isinstance(block.sibling(Block().eval()).session, type(block.session))


def test_sessions_that_are_gone_are_no_kin() -> None:
    one, module = compiled(Block().eval()), Block().eval()
    other = one.sibling(module)
    gone = weakref.ref(other.session)
    del other
    gc.collect()
    assert gone() is None
    assert one.sibling(module).loaded.module is module


@pytest.mark.parametrize("wrong", [None, "module", Block, nn.LazyLinear(8)])
def test_what_is_no_module_is_said(block: Any, wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"is no module|have no shape"):
        block.sibling(wrong)


def test_autocast_around_it_has_no_say(block: Any) -> None:
    module, x = Block().eval(), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        other = block.sibling(module)
    torch.testing.assert_close(other(x), module(x))


def test_what_was_not_compiled_here_shares_nothing(tmp_path: Any) -> None:
    module = Block().eval()
    folder = compiled(module, run_on="nothing").save(tmp_path / "bundle")
    loaded = ac.load(folder, module, example_inputs=(torch.randn(3, 8),), store=Store(None), run_on="framework")
    with pytest.raises(UsageError, match="save its bundle"):
        loaded.sibling(Block().eval())
    with pytest.raises(UsageError, match="save its bundle"):
        compiled(module, run_on="nothing").sibling(Block().eval())


def test_the_first_one_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core.stages.capture import identity as identities

    seen: list[nn.Module] = []

    def noting(loaded: Any) -> Identity:
        seen.append(loaded.module)
        return own(loaded)

    first, own = Block().eval(), identities.identity
    one = compiled(first)
    monkeypatch.setattr(identities, "identity", noting)
    others = [Block().eval() for _ in range(3)]
    for other in others:
        one.sibling(other)
    assert sum(module is first for module in seen) == 1 and all(any(module is other for module in seen) for other in others)
    first.gain = 3.0
    third = Block().eval()
    torch.testing.assert_close(one.sibling(third)(torch.ones(3, 8)), third(torch.ones(3, 8)))
