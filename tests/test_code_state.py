"""What a forward keeps where no attribute leads to: in closures, globals, classes, functions, caches and mappings of one's own.

Here forks of the process do not tell (``test_forked_calls.py`` asks them).
"""

from collections.abc import Iterator

import pytest
import torch
from remembering import CLOSED, PLACES, UNSEEN, Make, Module, X, Y, compiled, emptied, in_a_mapping

from agentcompile_core.stages.capture import first_call


@pytest.fixture(autouse=True)
def _without_forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    emptied()
    monkeypatch.setattr(first_call, "remembers", lambda *_: None)
    yield
    emptied()


@pytest.mark.parametrize("place", PLACES)
def test_what_remembers_its_first_call_runs_itself_and_has_not_been_called_yet(place: str) -> None:
    made = compiled(Module(PLACES[place](torch.Tensor.mean)))
    assert "called with before" in made.graphs.eager_reason
    assert torch.equal(made(Y), Y - Y.mean())
    assert torch.equal(made(X), X - Y.mean())


@pytest.mark.parametrize("place", PLACES)
def test_what_every_call_makes_alike_is_compiled(place: str) -> None:
    module = Module(PLACES[place](lambda x: torch.full((), float(x.shape[-1]))))
    made = compiled(module)
    assert not made.graphs.eager_reason, made.notes
    assert torch.equal(made(Y), Y - 4) and torch.equal(module(Y), Y - 4)


@pytest.mark.parametrize("kind", CLOSED)
def test_what_cannot_be_emptied_again_runs_itself(kind: str) -> None:
    made = compiled(Module(in_a_mapping(CLOSED[kind]())(torch.Tensor.mean)))
    assert "cannot be emptied again" in made.graphs.eager_reason


COMPUTED: dict[str, Make] = {
    "mean": torch.Tensor.mean, "itself": torch.Tensor.detach, "written": lambda x: x.new_zeros(x.shape).copy_(x)[0],
    "side": lambda x: x.max() > 1}


@pytest.mark.parametrize("of", COMPUTED)
@pytest.mark.parametrize("place", UNSEEN)
def test_what_is_computed_and_kept_where_nothing_leads_to_runs_itself(place: str, of: str) -> None:
    module = Module(UNSEEN[place](lambda x: COMPUTED[of](x).to(x.dtype)))
    made = compiled(module)
    assert "keeps what it computes" in made.graphs.eager_reason
    assert torch.equal(made(Y), module(Y))


@pytest.mark.parametrize("place", [name for name in UNSEEN if name != "in_a_generator"])
def test_what_is_kept_there_of_shapes_alone_is_compiled(place: str) -> None:
    module = Module(UNSEEN[place](lambda x: torch.ones_like(x[0]) + x.new_full((), 3.0)))
    made = compiled(module)
    assert not made.graphs.eager_reason, made.graphs.eager_reason
    assert torch.equal(made(Y), Y - 4)
