"""What a result depends on besides arguments and tensors is in no graph: such modules run themselves; compiling changes none."""

import datetime
import functools
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.api import CompiledModel
from agentcompile_core.errors import UsageError
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.runtime.framework_session import EagerModule
from agentcompile_core.runtime.module_session import ModuleSession
from agentcompile_core.store import Store

CATALOG = load_catalog(only=())
RARELY = 1000  # calls after which something else is computed: more than any check makes


def compiled(module: nn.Module, *example: Any, store: Store | None = None) -> CompiledModel:
    return ac.compile(module, example_inputs=example, device="cpu", store=store or Store(None), catalog=CATALOG)


class Of(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


def steps(count: int, x: Tensor) -> Tensor:
    return x * 2.0 if count < RARELY else x * 3.0


class InAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen, self.kept, self.total = 0, [], {"n": 0}, torch.zeros(())
        self.register_buffer("calls", torch.zeros(()))

    def counted(self) -> int:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return steps(self.counted(), x)


class Number(InAttribute):
    def counted(self) -> int:
        self.count += 1
        return self.count


class Grows(InAttribute):
    def counted(self) -> int:
        self.seen.append(1)
        return len(self.seen)


class Keyed(InAttribute):
    def counted(self) -> int:
        self.kept["n"] += 1
        return self.kept["n"]


class OfClass(InAttribute):
    calls_of_all = 0

    def counted(self) -> int:
        OfClass.calls_of_all += 1
        return OfClass.calls_of_all


class Summed(InAttribute):
    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(1)
        return torch.where(self.total < RARELY, x * 2.0, x * 3.0)


class Replaced(InAttribute):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return torch.where(self.calls < RARELY, x * 2.0, x * 3.0)


class Trained(InAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.weight += 1
        return torch.where(self.weight < RARELY, x * 2.0, x * 3.0)


class Drawing(InAttribute):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def counted(self) -> int:
        return 0 if self.generator.random() < 0.999 else RARELY


def nonlocal_count() -> Callable[[Tensor], Tensor]:
    count = 0

    def call(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return steps(count, x)

    return call


CALLS = 0
NUMBERS = itertools.count()
QUEUE: deque[int] = deque(maxlen=2)


def global_count(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return steps(CALLS, x)


def queued(x: Tensor) -> Tensor:
    QUEUE.append(sum(QUEUE) + 1)
    return steps(QUEUE[-1], x)


STATES: dict[str, Callable[[], nn.Module]] = {
    "number": Number, "list": Grows, "dict": Keyed, "class": OfClass, "tensor": Summed, "buffer": Replaced, "parameter": Trained,
    "closure": lambda: Of(nonlocal_count()), "global": lambda: Of(global_count), "queue": lambda: Of(queued),
    "iterator": lambda: Of(lambda x: steps(next(NUMBERS), x)),
    "generator of Python": lambda: Drawing(random.Random(0)), "generator of numpy": lambda: Drawing(numpy.random.default_rng(0)),
}


@pytest.mark.parametrize("name", STATES)
def test_what_a_call_leaves_for_the_next_runs_as_it_is(name: str) -> None:
    x, module = torch.randn(3), STATES[name]().eval()
    before = [p.clone() for p in module.parameters()]
    made = compiled(module, x)
    assert all(map(torch.equal, before, module.parameters()))
    assert isinstance(made.session, EagerModule) and any("runs on the framework" in note for note in made.notes)
    assert torch.equal(made(x), x * 2.0)


def test_compiling_leaves_no_trace() -> None:
    for make in (Number, Grows, Keyed, Summed, Replaced):
        module = make().eval()
        calls = module.calls
        compiled(module, torch.randn(3))
        assert (module.count, module.seen, module.kept, float(module.total), float(calls)) == (0, [], {"n": 0}, 0.0, 0.0)
        assert module.calls is calls and not calls.is_inference()
    x = torch.randn(3)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    compiled(Of(lambda x: x * random.random() + numpy.random.rand() + torch.rand(3)), x)
    assert before[:2] == (random.getstate(), numpy.random.get_state()[1].tolist()) and torch.equal(before[2], torch.get_rng_state())


def read(path: Path) -> float:
    return float(path.read_text())


OUTSIDE: dict[str, Callable[[Path], Callable[[Tensor], Tensor]]] = {
    "clock": lambda path: lambda x: x.clamp(max=1e3 if time.time() > 0 else 1e4),
    "date": lambda path: lambda x: x.clamp(max=1e3 if datetime.datetime.now().year < 3000 else 1e4),
    "random": lambda path: lambda x: x.clamp(max=1e3 + random.random()),
    "chosen": lambda path: lambda x: x.clamp(max=random.choice((1e3, 1e4))),
    "numpy": lambda path: lambda x: x.clamp(max=1e3 + numpy.random.rand()),
    "environment": lambda path: lambda x: x.clamp(max=float(os.environ.get("LIMIT_OF_A_TEST", "1e3"))),
    "file": lambda path: lambda x: x.clamp(max=read(path)),
    "whether a file is there": lambda path: lambda x: x.clamp(max=1e3 if os.path.exists(path) else 1e4),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_reads_from_outside_runs_as_it_is(name: str, tmp_path: Path) -> None:
    path = tmp_path / "limit"
    path.write_text("1e3")
    module, x = Of(OUTSIDE[name](path)), torch.tensor([1.0, 5e4])
    made = compiled(module, torch.randn(2))
    assert isinstance(made.session, EagerModule) and "runs on the framework" in made.notes[0]
    path.write_text("1e2")
    if name == "file":
        assert torch.equal(made(x), module(x))


@functools.lru_cache
def table(length: int) -> Tensor:
    return torch.ones(length)


class Lazy(nn.Module):
    """Keeps what it makes once and what it computed last: no later result depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, float] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scale = self.made.setdefault(len(x), 2.0)
        self.last = x * scale + table(3)
        return self.last


def test_what_is_made_once_or_only_kept_is_captured() -> None:
    """Also where the trace would be the first call of all: a table of its tensors would serve nobody."""
    table.cache_clear()
    module, x = Lazy().eval(), torch.randn(3)
    made = compiled(module, x)
    assert isinstance(made.session, ModuleSession), made.notes
    assert module.last is None and not module.made and torch.equal(made(x), module(x))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": lambda x: x.as_strided((2, 2), (1, 2)) * 2.0, "asked": lambda x: x * 2.0 if x.is_contiguous() else x * 3.0,
    "memory format": lambda x: x.view(torch.int32).as_strided((4,), (1,)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_reads_memory_as_it_lies_runs_as_it_is(name: str) -> None:
    module, x = Of(LAYOUTS[name]), torch.randn(4, 3).t()
    made = compiled(module, torch.randn(3, 4))
    assert isinstance(made.session, EagerModule) and torch.equal(made(x), module(x))


@settings(max_examples=12)
@given(st.permutations(range(3)), st.booleans(), st.sampled_from(["reshape", "add", "mean", "turned"]))
def test_examples_may_lie_in_any_way(axes: list[int], gaps: bool, what: str) -> None:
    def laid_out(x: Tensor) -> Tensor:
        made = x.permute(axes).contiguous()
        return (torch.stack([made, made], -1)[..., 0] if gaps else made).permute(sorted(range(3), key=axes.__getitem__))

    calls = {"reshape": lambda x: x.reshape(-1) * 2.0, "add": lambda x: x + x.flip(0), "mean": lambda x: x.mean(1),
             "turned": lambda x: x.permute(axes).contiguous().view(-1) * 2.0}
    module, x = Of(calls[what]), torch.randn(2, 3, 4)
    made = compiled(module, laid_out(torch.randn(2, 3, 4)))
    assert isinstance(made.session, ModuleSession), made.notes
    for one in (x, laid_out(x)):
        assert torch.allclose(made(one), module(one), atol=1e-6)


def test_the_order_of_a_dict_counts_where_it_counts() -> None:
    a, b = torch.randn(3), torch.randn(3)
    by_key, in_order = Of(lambda d: d["a"] - d["b"]), Of(lambda d: next(iter(d.values())) - list(d.values())[1])
    for module, session in ((by_key, ModuleSession), (in_order, EagerModule)):
        made = compiled(module, {"a": a, "b": b})
        assert type(made.session) is session
        for d in ({"a": a, "b": b}, {"b": b, "a": a}):
            assert torch.equal(made(d), module(d))


@settings(max_examples=10)
@given(st.lists(st.sampled_from(["x", "y", "weight", "row of x"]), min_size=2, max_size=3), st.booleans())
def test_examples_may_be_one_tensor_under_several_names(names: list[str], whole: bool) -> None:
    """Whole numbers, for which no random ones are tried."""
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.arange(12).view(3, 4) if whole else torch.randn(3, 4))

        def forward(self, *given: Tensor) -> Tensor:
            return self.weight * 100 + sum(10**i * one for i, one in enumerate(given))

    def draw() -> Tensor:
        return torch.randint(9, (3, 4)) if whole else torch.randn(3, 4)

    module, x = Sum(), draw()
    known = {"x": x, "y": draw(), "weight": module.weight, "row of x": x[:1]}
    made = compiled(module, *(known[name] for name in names))
    assert isinstance(made.session, ModuleSession), made.notes
    fresh = [draw()[: len(known[name])] for name in names]
    assert torch.allclose(made(*fresh), module(*fresh), atol=1e-4)


def test_zeros_of_both_signs_are_two_numbers() -> None:
    made = compiled(Of(lambda x, s: torch.copysign(x, torch.full_like(x, s))), torch.randn(3), 0.0)
    with pytest.raises(UsageError, match=r"is -0\.0; the module was compiled for 0\.0"):
        made(torch.randn(3), -0.0)


MODES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), True), "no dropout": (lambda: nn.Dropout(0.0), False),
    "batch norm": (lambda: nn.BatchNorm1d(4), True), "linear": (lambda: nn.Linear(4, 4), False),
    "rarely": (lambda: nn.Dropout(1e-6), True), "recurrent": (lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5), True),
}


@pytest.mark.parametrize("name", MODES)
def test_training_mode_is_never_taken_for_evaluation_mode(name: str, tmp_path: Path) -> None:
    make, matters = MODES[name]
    x, store = torch.randn(3, 4), Store(None)
    evaluated = make().eval()
    folder = compiled(evaluated, x, store=store).save(tmp_path / "bundle")  # a stored capture changes nothing
    module = make()
    made = compiled(module, x, store=store)
    assert module.training and ("call its eval() first" in made.graphs.eager_reason) == matters
    assert isinstance(made.session, EagerModule) == matters
    if matters:
        with pytest.raises(UsageError, match=r"call its eval\(\) first"):
            ac.load(folder, module, device="cpu", catalog=CATALOG, example_inputs=(x,))
        evaluated = module.eval()
        made = compiled(evaluated, x, store=store)
    assert isinstance(made.session, ModuleSession)
    found, wanted = made(x), module(x)
    assert torch.allclose(found[0] if isinstance(found, tuple) else found, wanted[0] if isinstance(wanted, tuple) else wanted, atol=1e-6)


@pytest.mark.parametrize("kept", [torch.arange(2.0)[::2], torch.arange(2)[::2].expand(3), torch.randn(3, 4).t(), torch.randn(2).conj(),
                                  torch.complex(torch.ones(3), torch.ones(3)).conj().imag, torch.empty(0, 2), torch.eye(3).to_sparse()],
                         ids=lambda kept: f"{tuple(kept.shape)} {kept.dtype} {kept.layout}")
@pytest.mark.parametrize("as_buffer", [True, False])
def test_a_module_may_keep_a_tensor_that_lies_in_any_way(kept: Tensor, as_buffer: bool) -> None:
    module, x = Of(lambda x: x * 2.0), torch.randn(3)
    module.register_buffer("kept", kept) if as_buffer else setattr(module, "kept", kept)
    assert torch.equal(compiled(module, x)(x), x * 2.0)


def test_tensors_without_numbers_in_a_row_are_refused_in_a_sentence() -> None:
    made = compiled(Of(lambda x: x * 2.0), torch.randn(3, 4))
    for tensor, words in ((torch.randn(3, 4).to_sparse(), "layout sparse_coo"), (torch.empty(3, 4, device="meta"), "cannot be copied"),
                          (torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]), "nested tensor")):
        with pytest.raises(UsageError, match=words):
            made(tensor)
    with pytest.raises(UsageError, match="has no shape yet; call the module once"):
        compiled(nn.LazyLinear(3), torch.randn(3, 4))


def test_a_module_that_needs_gradients_within_gets_them_and_keeps_ordinary_tensors() -> None:
    class Force(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                self.last = x.detach() * 2.0
                return torch.autograd.grad((x**3).sum(), x)[0]

    module, x = Force(), torch.randn(3)
    made = compiled(module, x)
    assert isinstance(made.session, EagerModule) and torch.allclose(made(x), 3 * x**2) and not module.last.is_inference()
