"""A model that is changed after it was compiled: what is written in place is followed, what is replaced is refused, by every path alike."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate_manners import CONFIG, PROMPT, QUICK
from torch import nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.weights import WeightStore

NEW = 8


@pytest.fixture(scope="module")
def mine() -> Any:
    torch.manual_seed(1)
    made = transformers.LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.data.mul_(8.0) if parameter.dim() > 1 else None
    return ac.compile(made, **QUICK)


class Adapted(nn.Module):
    """As adapters wrap a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 0.5


@contextmanager
def replaced_parameter(part: nn.Module) -> Iterator[None]:
    name, before = next(iter(part._parameters.items()))
    assert before is not None
    setattr(part, name, nn.Parameter(before * 0.5, requires_grad=False))
    yield
    setattr(part, name, before)


@contextmanager
def moved_data(part: nn.Module) -> Iterator[None]:
    parameter = next(part.parameters(recurse=False))
    before = parameter.data
    parameter.data = before * 0.5
    yield
    parameter.data = before


@contextmanager
def other_type(part: nn.Module) -> Iterator[None]:
    before = {name: one.data for name, one in part.named_parameters()}
    part.to(torch.bfloat16)
    yield
    for name, one in part.named_parameters():
        one.data = before[name]


@contextmanager
def hooked(part: nn.Module) -> Iterator[None]:
    handle = part.register_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def hooked_before(part: nn.Module) -> Iterator[None]:
    handle = part.register_forward_pre_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def other_forward(part: nn.Module) -> Iterator[None]:
    before = part.forward
    part.forward = lambda *given, **named: before(*given, **named)  # type: ignore[method-assign]
    yield
    del part.forward


CHANGES = (replaced_parameter, moved_data, other_type, hooked, hooked_before, other_forward)
REQUESTS: tuple[dict[str, Any], ...] = (
    {}, {"repetition_penalty": 1.3}, {"num_beams": 2}, {"output_hidden_states": True, "return_dict_in_generate": True})


def tokens(model: Any, options: dict[str, Any]) -> torch.Tensor:
    found = model.generate(PROMPT, max_new_tokens=NEW, eos_token_id=None, pad_token_id=7, **options)
    return found if isinstance(found, torch.Tensor) else found.sequences


@settings(max_examples=25, derandomize=True, database=None, deadline=None)
@given(st.data(), st.sampled_from(CHANGES), st.sampled_from(REQUESTS))
@pytest.mark.filterwarnings("ignore")
def test_what_programs_do_not_follow_is_refused_until_it_is_taken_back(mine, data, change: Callable[[nn.Module], Any],
                                                                       options: dict[str, Any]) -> None:
    model = mine.loaded.module
    parts = {name: one for name, one in model.named_modules() if list(one.parameters(recurse=False))}
    name = data.draw(st.sampled_from(sorted(parts)))
    before = tokens(model, {})
    with change(parts[name]), pytest.raises(UsageError, match=f"{name}.* after LlamaForCausalLM was compiled.*compile it again") as caught:
        tokens(mine, options)
    assert "\n" not in str(caught.value)
    assert torch.equal(tokens(mine, {}), before)


@settings(max_examples=6, derandomize=True, database=None, deadline=None)
@given(st.data())
def test_wrapped_layers_are_refused_and_their_model_can_be_compiled_again(mine, data) -> None:
    model = mine.loaded.module
    owner, name = data.draw(st.sampled_from([(one, name) for one in model.modules() for name, inner in one.named_children()
                                             if isinstance(inner, nn.Linear)]))
    inner = getattr(owner, name)
    setattr(owner, name, Adapted(inner))
    try:
        with pytest.raises(UsageError, match=f"{name} was replaced by another module"):
            tokens(mine, {})
    finally:
        setattr(owner, name, inner)
    assert torch.equal(tokens(mine, {}), tokens(model, {}))


@pytest.mark.filterwarnings("ignore")
def test_what_is_written_in_place_is_followed_by_every_path(mine) -> None:
    model = mine.loaded.module
    before = {name: one.clone() for name, one in model.state_dict().items()}
    for deed in (lambda: [one.mul_(0.8) for one in model.parameters()],
                 lambda: model.load_state_dict({name: one * 1.2 for name, one in before.items()}), lambda: model.load_state_dict(before)):
        deed()
        for options in REQUESTS:
            assert torch.equal(tokens(mine, options), tokens(model, options))


def test_training_mode_has_no_say(mine) -> None:
    model = mine.loaded.module
    before = tokens(mine, {})
    model.train()
    assert torch.equal(tokens(mine, {}), before) and model.training
    model.eval()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)


def test_a_second_compilation_may_move_weights_and_the_first_follows_until_they_change() -> None:
    """Each store lays weights out for its own programs: that alone changes no value, and what comes later reaches only the last one."""
    module = Pair().requires_grad_(False)
    stores = [WeightStore(module, "cpu"), WeightStore(module, "cpu")]
    for store in stores:
        store.arrange([("q.weight", "k.weight")])
        store.settle()
    for store in stores:
        store.check_unchanged("Pair")
    module.q.weight.mul_(2.0)
    stores[1].check_unchanged("Pair")
    with pytest.raises(UsageError, match=r"q\.weight was replaced by another tensor after Pair was compiled"):
        stores[0].check_unchanged("Pair")
