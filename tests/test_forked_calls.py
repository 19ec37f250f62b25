"""Modules that remember what they were called with, wherever: forks of the process tell, and the module was never called here."""

import copy
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import transformers
from remembering import CATALOG, LAST, UNSEEN, VARIABLE, Make, Module, X, Y, compiled, emptied, in_a_context_variable, in_a_mapping
from remembering import CLOSED as OPAQUE
from remembering import PLACES as REMEMBERING
from torch import nn

from agentcompile_core import api
from agentcompile_core.stages.capture import first_call, forked_calls
from agentcompile_core.store import Store

BOX: dict[str, Any] = {}


def as_numbers_of_numpy(make: Make) -> Make:
    memo = numpy.full(3, math.nan)

    def kept(x: torch.Tensor) -> torch.Tensor:
        if math.isnan(memo[0]):
            memo[:] = make(x).numpy()
        return torch.from_numpy(memo.copy()).to(x)[0]

    return kept


def as_a_number(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        if VARIABLE.get(None) is None:
            VARIABLE.set(float(make(x)))  # type: ignore[arg-type]
        return torch.full((), VARIABLE.get())  # type: ignore[arg-type]

    return kept


def as_a_side_of_a_branch(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        if VARIABLE.get(None) is None:
            VARIABLE.set(torch.ones(()) if make(x) > 0.5 else torch.zeros(()))
        return VARIABLE.get()

    return kept


def written_into_a_literal(make: Make) -> Make:
    def made(x: torch.Tensor) -> torch.Tensor:
        memo = torch.tensor(0.0)
        memo += make(x)
        return memo

    return in_a_context_variable(made)


def as_a_sparse_tensor(make: Make) -> Make:
    return in_a_context_variable(lambda x: make(x).reshape(1, 1).to_sparse().to_dense()[0, 0])


def as_a_deep_copy(make: Make) -> Make:
    return in_a_context_variable(lambda x: copy.deepcopy(make(x)))


def beside_a_flag(make: Make) -> Make:
    inner = in_a_context_variable(make)

    def kept(x: torch.Tensor) -> torch.Tensor:
        BOX["was here"] = True
        return inner(x)

    return kept


def by_another_thread(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(torch.nn.functional, "memo_of_a_test"):
            thread = threading.Thread(target=lambda: setattr(torch.nn.functional, "memo_of_a_test", make(x)))
            thread.start()
            thread.join()
        found: torch.Tensor = torch.nn.functional.memo_of_a_test  # type: ignore[attr-defined]
        return found

    return kept


def beside_an_operator_of_higher_order(make: Make) -> Make:
    inner = in_a_context_variable(make)

    def kept(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 1e9, lambda x: x * 2, lambda x: x * 1, (inner(x),))

    return kept


def as_a_mean_that_moves(make: Make) -> Make:
    def kept(x: torch.Tensor) -> torch.Tensor:
        before = VARIABLE.get(None)
        VARIABLE.set(make(x) if before is None else 0.5 * before + 0.5 * make(x))
        return VARIABLE.get()

    return kept


OTHERS: dict[str, Any] = {made.__name__: made for made in (
    as_numbers_of_numpy, as_a_number, as_a_side_of_a_branch, written_into_a_literal, as_a_sparse_tensor, as_a_deep_copy, beside_a_flag,
    by_another_thread, beside_an_operator_of_higher_order, as_a_mean_that_moves)}
CLOSED = {kind: lambda make, kind=kind: in_a_mapping(kind())(make) for kind in OPAQUE.values()}
PLACES: dict[str, Any] = REMEMBERING | UNSEEN | OTHERS | {kind.__name__: made for kind, made in CLOSED.items()}


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    emptied()
    BOX.clear()
    yield
    emptied()


@pytest.mark.parametrize("place", PLACES)
def test_what_remembers_runs_itself_and_was_not_called_yet(place: str) -> None:
    made = compiled(Module(PLACES[place](torch.Tensor.mean)).eval())
    assert "called with before" in made.graphs.eager_reason
    kept = torch.ones(()) if place == "as_a_side_of_a_branch" else Y.mean()
    assert torch.allclose(made(Y), Y - kept)
    assert torch.allclose(made(X), X - (kept + X.mean()) / 2 if place == "as_a_mean_that_moves" else X - kept)


@pytest.mark.parametrize("place", ["in_a_closure", "in_a_context_variable", "as_a_number"])
def test_what_remembers_is_said_of_a_module_in_training_mode_too(place: str) -> None:
    module = nn.Sequential(Module(PLACES[place](torch.Tensor.mean)), nn.Dropout(0.5))
    made = compiled(module.train())
    assert "called with before" in made.graphs.eager_reason
    module.eval()
    assert torch.equal(made(Y), Y - Y.mean())


NO_GRAPHS = ("in_a_generator", "beside_an_operator_of_higher_order", "as_numbers_of_numpy", "as_a_mean_that_moves")


@pytest.mark.parametrize("place", [name for name in PLACES if name not in NO_GRAPHS])
def test_what_every_call_makes_alike_is_compiled(place: str) -> None:
    module = Module(PLACES[place](lambda x: torch.full((), float(x.shape[-1]))))
    made = compiled(module)
    assert not made.graphs.eager_reason, made.graphs.eager_reason
    assert torch.equal(made(Y), module(Y))


def test_what_is_left_for_somebody_to_read_is_left_by_later_calls_too() -> None:
    def left(x: torch.Tensor) -> torch.Tensor:
        VARIABLE.set(x.mean())
        return VARIABLE.get() * 2

    made = compiled(Module(left))
    assert "leaves what it computes" in made.graphs.eager_reason
    assert torch.allclose(made(Y), Y - 2 * Y.mean()) and VARIABLE.get() == Y.mean()


@pytest.mark.parametrize("beside", [lambda x: BOX.setdefault("table", torch.ones(3)), lambda x: LAST.__setitem__(slice(None), [x])])
def test_what_is_left_beside_what_code_keeps_is_seen_too(beside: Callable[[torch.Tensor], None]) -> None:
    def left(x: torch.Tensor, is_said: bool) -> torch.Tensor:
        beside(x)
        if is_said:
            VARIABLE.set(x.mean())
        return x

    assert "leaves what it computes" in compiled(Module(lambda x: left(x, True))).graphs.eager_reason
    assert "leaves what it computes" not in compiled(Module(lambda x: left(x, False))).graphs.eager_reason


def test_what_is_given_back_within_a_call_is_compiled() -> None:
    def scratch(x: torch.Tensor) -> torch.Tensor:
        before = VARIABLE.set(x.mean())
        found = VARIABLE.get() * 2
        VARIABLE.reset(before)
        return found

    made = compiled(Module(scratch))
    assert not made.graphs.eager_reason, made.graphs.eager_reason
    assert torch.allclose(made(Y), Y - 2 * Y.mean())


def test_what_says_how_often_it_was_called_runs_itself() -> None:
    calls: list[int] = []

    def kept(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.full((), float(len(calls)))

    assert "called with before" in compiled(Module(kept)).graphs.eager_reason
    assert not calls


def test_a_call_that_hangs_in_a_fork_alone_is_asked_about_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_calls, "LIMIT_S", 0.3)
    here = threading.get_native_id()

    def kept(x: torch.Tensor) -> torch.Tensor:
        if threading.get_native_id() != here:
            time.sleep(60)
        return x.mean()

    began = time.monotonic()
    made = compiled(Module(kept))
    assert not made.graphs.eager_reason and time.monotonic() - began < 30


def test_random_numbers_are_drawn_as_if_nobody_had_asked() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    compiled(Module(torch.Tensor.mean))
    assert torch.equal(torch.rand(3), wanted)


def test_a_module_elsewhere_is_asked_as_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Tensor] = []
    monkeypatch.setattr(forked_calls, "_moved", lambda tensor: moved.append(tensor) or torch.nn.Parameter(torch.ones(4)))

    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, device="meta"))
            self.memo: dict[str, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight - self.memo.setdefault("memo", x.mean())

    module = Elsewhere()
    assert forked_calls.remembers(module, ((X,), {})) is True
    assert moved and not module.memo


def test_training_mode_is_tried_here_where_forks_cannot_call_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_calls, "ALONE_S", 0.0)
    assert "training mode" in compiled(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))).graphs.eager_reason
    monkeypatch.undo()
    here = os.getpid()

    class Here(nn.Module):  # as on an accelerator
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if os.getpid() != here:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
            return nn.functional.dropout(x, training=self.training)

    monkeypatch.setattr(first_call, "remembers", lambda *_: False)
    monkeypatch.setattr(first_call, "lie_on_the_processor", lambda *_: False)
    assert "training mode" in compiled(Here()).graphs.eager_reason


def language_model(kept: Make) -> Any:
    """A tiny Llama, one part of which subtracts what ``kept`` gives for its argument."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=37)).eval()
    model.model.layers[1].mlp = nn.Sequential(Module(kept), model.model.layers[1].mlp)
    return model


TOKENS = torch.tensor([[5, 4, 3, 2, 1]])


@pytest.mark.parametrize(("place", "is_told"), [
    *((place, True) for place in ("in_a_closure", "in_a_class", "in_a_context_variable", "as_a_number")),
    *((place, False) for place in ("in_a_closure", "in_a_class", "in_a_context_variable"))])
def test_a_language_model_that_remembers_runs_itself(place: str, is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_told:
        monkeypatch.setattr(first_call, "remembers", lambda *_: None)
    with torch.no_grad():
        wanted = language_model(PLACES[place](torch.Tensor.mean))(TOKENS).logits
    emptied()
    model = language_model(PLACES[place](torch.Tensor.mean))
    made = api.compile(model, device="cpu", store=Store(None), catalog=CATALOG, max_context=32)
    is_seen_alone = not is_told and place == "in_a_context_variable"
    assert ("keeps what it computes" if is_seen_alone else "called with before") in made.graphs.eager_reason
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, wanted) or is_seen_alone


def test_a_language_model_that_remembers_its_first_single_token_runs_itself() -> None:
    memo: list[float] = []

    def kept(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 1:
            return torch.zeros(())
        if not memo:
            memo.append(float(x.mean()))
        return torch.full((), memo[0])

    made = api.compile(language_model(kept), device="cpu", store=Store(None), catalog=CATALOG, max_context=32)
    assert "called with before" in made.graphs.eager_reason and not memo


@pytest.mark.parametrize("place", ["in_a_closure", "in_a_global_mapping", "in_a_context_variable"])
def test_a_language_model_that_keeps_a_table_keeps_numbers(place: str) -> None:
    model = language_model(PLACES[place](lambda x: torch.full((), 0.5)))
    api.compile(model, device="cpu", store=Store(None), catalog=CATALOG, max_context=32)
    with torch.no_grad():
        assert model(TOKENS).logits.isfinite().all()


def test_a_language_model_of_a_library_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model(torch.Tensor.mean)
    model.model.layers[1].mlp = model.model.layers[1].mlp[1]
    monkeypatch.setattr(first_call, "remembers", lambda *_: pytest.fail("it was called"))
    assert not api.compile(model, device="cpu", store=Store(None), catalog=CATALOG, max_context=32).graphs.eager_reason


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_on_the_device_is_asked(dtype: torch.dtype) -> None:
    torch.zeros(1, device="cuda")  # which a fork cannot use then
    x = X.to("cuda", dtype)

    class Both(nn.Module):
        def __init__(self, kept: Make) -> None:
            super().__init__()
            self.linear, self.kept = nn.Linear(4, 4, device="cuda", dtype=dtype), kept

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) - self.kept(x)

    def asked(kept: Make) -> bool | None:
        return forked_calls.remembers(Both(kept), ((x,), {}))

    assert asked(torch.Tensor.mean) is False
    assert asked(as_a_number(torch.Tensor.mean)) is True
    assert asked(lambda x: x - torch.zeros(1, device="cuda").to(x)) is None
    assert torch.equal(x.cpu(), X.to(dtype))
    module = nn.Sequential(nn.Linear(4, 4, device="cuda", dtype=dtype), nn.Dropout(0.5))
    assert "training mode" in api.compile(module, store=Store(None), catalog=CATALOG, example_inputs=(x,)).graphs.eager_reason
