"""Where a compiled module's tensors lie: the caller's are read where they are, results are the caller's alone, nothing is held."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from module_ways import WAYS, put
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import agentcompile_core as ac
from agentcompile_core.api import CompiledModel
from agentcompile_core.configuration import Config
from agentcompile_core.errors import UsageError
from agentcompile_core.store import Store

ROWS, WIDTH = 6, 32


class Mixed(nn.Module):
    """Kernels and framework operators, results of each, views of results, of inputs and of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made = torch.softmax(x * 2.0 + y, -1)
        sorted_ = torch.sort(y, dim=-1).values
        return made, made.view(-1), made[:, 3:9], sorted_, x, y.t(), self.scale, torch.relu(made + sorted_), made


@pytest.fixture(scope="module")
def module() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


@pytest.fixture(scope="module")
def made(module: Mixed, tmp_path_factory: pytest.TempPathFactory) -> CompiledModel:
    store = Store(tmp_path_factory.mktemp("memory"))
    made = ac.compile(module, example_inputs=(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)), run_on="emulation",
                      config=Config(device="cpu", budget_s=60.0, budget_plans=3), store=store)
    assert not made.graphs.eager_reason and any(s.source for s in made.session.program.segments)
    return made


@pytest.fixture(scope="module", params=WAYS)
def compiled(made: CompiledModel, module: Mixed, request: pytest.FixtureRequest) -> CompiledModel:
    put(made.session, module, request.param)
    return made


def offset(x: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16 bytes."""
    return torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every other": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "odd address": offset,
    "one row": lambda x: x[:1].expand(ROWS, WIDTH),
    "negative bit": lambda x: torch.complex(x, -x).conj().imag,
    "conjugate's real part": lambda x: torch.complex(x, x).conj().real,
    "parameter": lambda x: nn.Parameter(x),
    "needs gradients": lambda x: x.clone().requires_grad_(),
    "made for inference": lambda x: _inferred(x),
    "wide": lambda x: torch.cat([x, x], -1)[:, :WIDTH],
}


def _inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 1.0


@given(first=st.sampled_from(sorted(LAYOUTS)), second=st.sampled_from(sorted(LAYOUTS)), same=st.booleans(), seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_any_layout_gives_what_the_module_gives(module: Mixed, compiled: CompiledModel, first: str, second: str, same: bool,
                                                seed: int) -> None:
    torch.manual_seed(seed)
    x = LAYOUTS[first](torch.randn(ROWS, WIDTH))
    y = x if same else LAYOUTS[second](torch.randn(ROWS, WIDTH))
    before = x.clone(), y.clone()
    found = compiled(x, y)
    with torch.inference_mode():
        for one, other in zip(found, module(x, y), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


@given(seeds=st.lists(st.integers(0, 5), min_size=2, max_size=12))
@settings(max_examples=20, deadline=None)
def test_results_stay_what_they_were(module: Mixed, compiled: CompiledModel, seeds: list[int]) -> None:
    """Kept beside later calls, of which some have the inputs of earlier ones, in the same memory or elsewhere."""
    inputs = {seed: (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for seed in dict.fromkeys(seeds)}
    kept = [(seed, compiled(*inputs[seed])) for seed in seeds]
    for seed, found in kept:
        with torch.inference_mode():
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, module(*inputs[seed]), strict=True))


def test_results_are_nobody_elses(module: Mixed, compiled: CompiledModel) -> None:
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    before = [t.clone() for t in (x, y, module.scale)]
    first, again = compiled(x, y), compiled(x, y)
    with torch.inference_mode():
        for result in first:
            others = [t for t in first if t is not result]  # the module returns one of them twice
            values = [t.clone() for t in others]
            result.fill_(-7.0)
            assert all(torch.equal(a, b) for a, b in zip(others, values, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((x, y, module.scale), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(again, compiled(x, y), strict=True))


def test_nothing_of_a_call_is_held(compiled: CompiledModel) -> None:
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    found = compiled(x, y)
    alive = [weakref.ref(t) for t in (x, y, *found) if t is not compiled.loaded.module.scale]
    del x, y, found
    gc.collect()
    assert [ref() is None for ref in alive] == [True] * len(alive)


def test_inside_of_autocast_the_module_itself_runs(module: Mixed, compiled: CompiledModel) -> None:
    class Projected(nn.Linear):
        pass

    linear, x = Projected(WIDTH, 8).eval(), torch.randn(ROWS, WIDTH)
    made = ac.compile(linear, example_inputs=(x,), run_on="framework", device="cpu", store=Store(None))
    for one, inputs in ((made, (x,)), (compiled, (x, x + 1.0))):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), pytest.warns(UserWarning, match="the module itself runs"):
            found, wanted = one(*inputs), one.loaded.module(*inputs)
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs)
        assert any("the module itself runs" in note for note in one.notes)


class Copies(TorchDispatchMode):
    """Names of the operators that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("copy_", "clone", "_to_copy", "contiguous"):
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1) * 2.0


def test_kernels_read_and_write_the_callers_memory(tmp_path: Path) -> None:
    x = torch.randn(ROWS, WIDTH)
    made = ac.compile(Plain(), example_inputs=(x,), run_on="emulation", config=Config(device="cpu", budget_s=60.0, budget_plans=2),
                      store=Store(tmp_path))
    assert all(s.source for s in made.session.program.segments)
    with Copies() as copies:
        found = made(x)
    assert copies.found == [] and torch.allclose(found, Plain()(x), atol=1e-6)
    with Copies() as copies:
        made(LAYOUTS["every other"](x))
    assert len(copies.found) == 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1) * self.scale


def test_results_may_be_written_however_inputs_lie_and_a_backward_pass_that_needs_them_ends(tmp_path: Path) -> None:
    """They are without gradients: whoever asks for one, by a parameter or an input that requires it, is told so."""
    module, head, x = Scaled().requires_grad_(False), nn.Linear(WIDTH, 1), torch.randn(ROWS, WIDTH)
    made = ac.compile(module, example_inputs=(x,), run_on="emulation", config=Config(device="cpu", budget_s=60.0, budget_plans=2),
                      store=Store(tmp_path))
    assert all(s.source for s in made.session.program.segments)
    for layout in (one for name, one in LAYOUTS.items() if name not in ("parameter", "needs gradients", "made for inference")):
        found = made(layout(x))
        found += 1.0
        torch.testing.assert_close(found, module(layout(x)) + 1.0)
        head(made(layout(x))).sum().backward()  # what learns behind frozen layers does
        with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
            head(made(layout(x).detach().requires_grad_())).sum().backward()
        with torch.no_grad():
            made(layout(x)).mul_(2.0)
    module.requires_grad_(True)
    with pytest.raises((RuntimeError, UsageError)):
        head(made(x)).sum().backward()
