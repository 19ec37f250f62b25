"""How arguments lie, are named and repeat, the mode of a module, tensors it keeps: taken as they are, or refused in a sentence."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_capture_dependence import CATALOG, Of, compiled
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.framework_session import EagerModule
from agentcompile_core.runtime.module_session import ModuleSession
from agentcompile_core.store import Store

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
