"""What modules are asked with in forks: numbers that they take and that tell, whatever arguments, answers and checks they have."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import remembering as places
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agentcompile_core import api
from agentcompile_core.store import Store

X, Y = places.X, places.Y
IDS, OTHER_IDS = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[7, 8, 9, 7, 3]])


class Remembering(nn.Module):
    """Answers with its first argument and what ``of`` made of its first arguments ever."""

    def __init__(self, of: Callable[..., Any], answer: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, memo = nn.Embedding(20, 4), list[Any]()

        def called(*given: Any) -> Any:
            if not memo:
                memo.append(of(self, *given))
            return answer(self, given[0], memo[0])

        self.called = called

    def forward(self, *given: Any) -> Any:
        return self.called(*given)


def asked(of: Callable[..., Any], answer: Callable[..., Any], *example: Any) -> tuple[Any, Remembering]:
    made = api.compile(Remembering(of, answer).eval(), device="cpu", store=Store(None), catalog=places.CATALOG, example_inputs=example)
    return made, Remembering(of, answer).eval()


def less(_: Any, x: torch.Tensor, memo: Any) -> torch.Tensor:
    return x - memo


OF_IDS: dict[str, Callable[..., Any]] = {
    "sum": lambda m, i: float(i.sum()), "greatest": lambda m, i: float(i.max()), "least": lambda m, i: float(i.min()),
    "first": lambda m, i: float(i[0, 0]), "mean of rows": lambda m, i: float(m.table(i).mean()),
    "norm": lambda m, i: float(m.table(i).norm())}


@pytest.mark.parametrize("of", OF_IDS)
def test_whatever_is_remembered_of_ids(of: str) -> None:
    made, fresh = asked(OF_IDS[of], lambda m, i, memo: m.table(i) - memo, IDS)
    assert "called with before" in made.graphs.eager_reason
    with torch.no_grad():
        assert torch.equal(made(OTHER_IDS), fresh(OTHER_IDS))


@pytest.mark.parametrize(("holds", "example", "other"), [
    (lambda x: bool(((x > 0) & (x < 1)).all()), torch.linspace(0.1, 0.9, 12).reshape(3, 4), torch.linspace(0.5, 0.6, 12).reshape(3, 4)),
    (lambda x: torch.allclose(x.sum(-1), torch.ones(3)), X.softmax(-1), (2 * Y).softmax(-1).flip(1)),
])
def test_a_module_that_checks_its_arguments_is_asked_with_such_as_it_takes(holds: Any, example: torch.Tensor, other: torch.Tensor) -> None:
    def of(_: Any, x: torch.Tensor) -> float:
        if not holds(x):
            raise ValueError("not what it takes")
        return float(x[0, 0])

    made, fresh = asked(of, lambda _, x, memo: x.log() - memo if holds(x) else 1 / 0, example)
    assert "called with before" in made.graphs.eager_reason
    assert torch.equal(made(other), fresh(other))


@settings(max_examples=12, derandomize=True, database=None, deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]), st.floats(0.01, 2), st.booleans())
def test_however_little_shows(dtype: torch.dtype, share: float, is_of_one: bool) -> None:
    def answer(_: Any, x: torch.Tensor, memo: torch.Tensor) -> torch.Tensor:
        found = x * 1e3
        found[0, 0] = memo
        return found if is_of_one else x - memo * share

    made, fresh = asked(lambda _, x: x[0, 0].clone() if is_of_one else torch.tanh(x.mean()), answer, X.to(dtype))
    assert "called with before" in made.graphs.eager_reason
    assert torch.equal(made(Y.to(dtype)), fresh(Y.to(dtype)))


@dataclasses.dataclass
class Answer:
    """Somebody's result."""

    number: float


@pytest.mark.parametrize("answer", [
    lambda m, x, memo: (x, Answer(memo)), lambda m, x, memo: (x, torch.full((2,), memo).numpy()),
    lambda m, x, memo: (x, str(memo).encode()),
    lambda m, x, memo: (x, complex(memo)), lambda m, x, memo: {"x": x, "set": {memo}},
    lambda m, x, memo: (x, torch.eye(2).to_sparse() * memo), lambda m, x, memo: (x, torch.nested.nested_tensor([x * memo, x]))])
def test_whatever_it_is_remembered_in(answer: Callable[..., Any]) -> None:
    made, _ = asked(lambda m, x: float(x.mean()), answer, X)
    assert "called with before" in made.graphs.eager_reason


@pytest.mark.parametrize("beside", [0.5, 3, True])
def test_numbers_of_python_are_arguments_too(beside: Any) -> None:
    made, _ = asked(lambda m, x, by: float(by), less, X, beside)
    assert "called with before" in made.graphs.eager_reason


@pytest.mark.parametrize("x", [X.to_sparse(), X.to_sparse_csr(), X.to(torch.float8_e4m3fn), X.abs().to(torch.uint16), X[:0], X[0, 0],
                               X[:, :1].expand(3, 4), torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)], ids=str)
def test_tensors_that_know_few_operators_end_no_compile(x: torch.Tensor) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.dequantize() if x.is_quantized else x.to_dense() if x.layout is not torch.strided else x.float()) * 2

    made = api.compile(Twice(), device="cpu", store=Store(None), catalog=places.CATALOG, example_inputs=(x,))
    assert torch.equal(made(x), Twice()(x))
    assert "called with before" not in made.graphs.eager_reason


def test_what_is_remembered_in_training_mode_alone_stays_in_the_fork() -> None:
    memo: list[float] = []

    class Training(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and not memo:
                memo.append(float(x.mean()))
            return x - memo[0] if memo else x

    made = api.compile(Training().train(), device="cpu", store=Store(None), catalog=places.CATALOG, example_inputs=(X + 1,))
    assert "training mode" in made.graphs.eager_reason
    assert not memo
