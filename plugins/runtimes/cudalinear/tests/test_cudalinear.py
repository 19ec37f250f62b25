"""Calls with one token run the step, everything else nn.Linear; copies, tied weights, gradients and traces see a plain layer."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from agentcompile_runtime_cudalinear import CUDALinear, replace_linears
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune

from agentcompile_core.plugin_api import UsageError


class Counted:
    """A step that does what the layer does, in memory of its own, and counts."""

    def __init__(self, linear: nn.Linear) -> None:
        self.calls = 0
        self._weight, self._bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (row,) = inputs
        assert row.shape == (1, 1, self._weight.shape[1]) and not row.requires_grad
        self.calls += 1
        return (nn.functional.linear(row, self._weight, self._bias),)


def layer(dtype: torch.dtype = torch.float32, bias: bool = True, learns: bool = False) -> tuple[nn.Linear, CUDALinear, Counted]:
    linear = nn.Linear(6, 5, bias=bias, dtype=dtype).requires_grad_(learns)
    for tensor in linear.parameters():  # small integers: a sum of them is the same in any order, in any element type
        tensor.data.copy_(torch.randint(-8, 9, tensor.shape))
    step = Counted(linear)
    return linear, CUDALinear(linear, step), step


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=3), st.booleans(), st.sampled_from([torch.float32, torch.float16]), st.booleans(),
       st.booleans())
def test_a_call_with_one_token_runs_the_step_and_no_other(shape: list[int], bias: bool, dtype: torch.dtype, turned: bool,
                                                          learns: bool) -> None:
    linear, mine, step = layer(dtype, bias, learns)
    x = torch.randint(-8, 9, (*shape, 12 if turned else 6)).to(dtype)
    x = x[..., ::2] if turned else x
    with torch.no_grad() if learns else torch.enable_grad():
        assert torch.equal(mine(x), linear(x))
    assert step.calls == (x.numel() == 6)


def test_what_needs_a_gradient_gets_it() -> None:
    for learns, asks in ((True, False), (False, True)):
        _, mine, step = layer(learns=learns)
        x = torch.randn(1, 6, requires_grad=asks)
        mine(x).sum().backward()
        assert step.calls == 0 and (mine.weight.grad is not None) == learns and (x.grad is not None) == asks


def test_weights_changed_in_place_are_seen_and_others_put_in_their_place_too() -> None:
    linear, mine, step = layer()
    x = torch.randn(1, 6)
    with torch.no_grad():
        linear.weight.mul_(2.0)
        torch.testing.assert_close(mine(x), linear(x))
        assert step.calls == 1
        for change in (lambda: setattr(mine, "weight", nn.Parameter(torch.randn(5, 6))), lambda: mine.double(),
                       lambda: setattr(mine, "bias", None)):
            change()
            plain = nn.functional.linear(x.to(mine.weight.dtype), mine.weight, mine.bias)
            torch.testing.assert_close(mine(x.to(mine.weight.dtype)), plain)
    assert step.calls == 1


def test_parameters_that_lie_otherwise_in_the_same_memory_and_those_that_are_gone_are_seen() -> None:
    for change in (lambda mine: setattr(mine.weight, "data", mine.weight.data[:3]),
                   lambda mine: setattr(mine.weight, "data", mine.weight.data.view(-1)[:18].view(6, 3).t()),
                   lambda mine: prune.l1_unstructured(mine, "weight", 0.5)):
        _, mine, step = layer(bias=False)
        x = torch.randn(1, 1, 6)
        change(mine)
        with torch.no_grad():
            torch.testing.assert_close(mine(x), nn.functional.linear(x, mine.weight))
        assert step.calls == 0


def test_another_element_type_fails_as_ever_and_autocast_casts_as_ever() -> None:
    linear, mine, step = layer()
    x = torch.randn(1, 6)
    for module in (linear, mine):
        with pytest.raises(RuntimeError):
            module(x.half())
        with pytest.raises(RuntimeError):
            module(x[:, :5])
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x).dtype is torch.bfloat16
    assert step.calls == 0


def test_a_trace_and_a_copy_hold_a_plain_layer() -> None:
    linear, mine, step = layer()
    x = torch.randn(1, 6)
    exported = torch.export.export(nn.Sequential(mine), (x,))
    torch.testing.assert_close(exported.module()(x), linear(x))
    traced = torch.jit.trace(nn.Sequential(mine), (x,), check_trace=False)
    made = make_fx(mine)(x)
    torch.testing.assert_close((traced(2 * x), made(2 * x)), (linear(2 * x), linear(2 * x)))
    assert step.calls == 0
    stored = io.BytesIO()
    torch.save(mine, stored)
    stored.seek(0)
    for other in (copy.deepcopy(mine), torch.load(stored, weights_only=False)):
        assert type(other) is nn.Linear and other.weight is not mine.weight and other.training == mine.training
        torch.testing.assert_close(other(x), linear(x))
    assert step.calls == 0 and mine.weight is linear.weight and set(mine.state_dict()) == {"weight", "bias"}


class Net(nn.Module):
    """Three layers of one shape, one of them in two places; others that are not to be touched."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(32, 32, bias=False), nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        self.again = self.first
        self.hooked, self.wide = nn.Linear(32, 32), nn.Linear(32, 32, dtype=torch.float64)
        self.hooked.register_forward_hook(lambda module, inputs, result: result + 1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hooked(self.again(self.first(x)))
        for block in self.blocks:
            x = x + block(x)
        return self.wide(x.double()).float()


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    pytest.importorskip("agentcompile_validator_emulation")
    return {"run_on": "emulation", "target": "h200", "budget_plans": 1, "rounds": 1, "validators": ("numerics",), "budget_s": 120.0}


@pytest.mark.slow
def test_layers_of_a_model_come_and_go(options: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net().eval().requires_grad_(False)
    x, before, modules = torch.randn(1, 32), dict(net.state_dict()), dict(net.named_modules(remove_duplicate=False))
    rows, wanted = torch.randn(3, 32), net(x)
    wanted_rows = net(rows)
    with replace_linears(net, **options) as replaced:
        assert set(replaced.layers) == {"first", "again", "blocks.0", "blocks.1"} and set(replaced.layers.values()) == {"gemv/gemv"}
        assert set(replaced.left) == {"hooked", "wide"} and "hooks" in replaced.left["hooked"] and "float64" in replaced.left["wide"]
        assert isinstance(net.first, CUDALinear) and net.again is net.first
        torch.testing.assert_close(net(x), wanted)
        torch.testing.assert_close(net(rows), wanted_rows)
        assert dict(net.state_dict()).keys() == before.keys()
        assert replace_linears(net, **options).layers == {}, "what is replaced already is not replaced again"
    assert dict(net.named_modules(remove_duplicate=False)) == modules
    torch.testing.assert_close(net(x), wanted)


def test_options_that_cannot_be_are_said_and_change_nothing() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    before: Callable[..., Any] = net[0]
    with pytest.raises(UsageError, match="budget"):
        replace_linears(net, budget="much")
    assert net[0] is before


@pytest.mark.slow
def test_layers_of_one_shape_are_compiled_once_and_each_reads_its_own_weights(options: dict[str, Any],
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    import agentcompile_runtime_cudalinear.replacing as replacing

    compiled: list[nn.Linear] = []

    def compile_module(linear: nn.Linear, **given: Any) -> Any:
        compiled.append(linear)
        return replacing_compile(linear, **given)

    replacing_compile = replacing.compile_module
    monkeypatch.setattr(replacing, "compile_module", compile_module)
    net = nn.Sequential(*(nn.Linear(32, 32, bias=index != 2) for index in range(5)), nn.Linear(32, 16)).eval().requires_grad_(False)
    x = torch.randn(1, 32)
    wanted = [layer(x) for layer in net]
    with replace_linears(net, **options) as replaced:
        assert len(replaced.layers) == 6 and not replaced.left
        assert len(compiled) == 3, "one of each shape, with a bias and without one"
        for layer, result in zip(net, wanted, strict=True):
            assert isinstance(layer, CUDALinear)
            torch.testing.assert_close(layer(x), result)
        with torch.no_grad():
            net[1].weight.mul_(2.0)
            torch.testing.assert_close(net[1](x), nn.functional.linear(x, net[1].weight, net[1].bias))
            torch.testing.assert_close(net[3](x), wanted[3])
        last = nn.Linear(32, 4)
        last(net[0](x)).sum().backward()
        assert last.weight.grad is not None, "what a replaced layer gives may be kept for a gradient behind it"
