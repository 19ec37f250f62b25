"""HuggingFace's own model runs where no library prepares itself for each length; compiled steps do not ask for that."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from capture_models import GPT, tiny
from torch.nn.modules.module import register_module_forward_pre_hook

import agentcompile_core as ac
from agentcompile_core.runtime.framework_session import EagerSession
from agentcompile_core.runtime.generation.request import Asked
from agentcompile_core.runtime.session import Session
from agentcompile_core.store import Store

PROMPT = torch.tensor([[5, 17, 99, 3, 42]])
QUICK: dict[str, Any] = {"device": "cpu", "run_on": "framework", "store": Store(None), "validators": [], "origins": []}
MODEL, STEPS, BEAMS = {"output_hidden_states": True, "return_dict_in_generate": True}, {}, {"num_beams": 2}


class Backend:
    """One that notes whether a block of any length is open."""

    is_open = False

    @contextmanager
    def any_length(self) -> Iterator[None]:
        assert not self.is_open
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False


@contextmanager
def seen(model: torch.nn.Module, backend: Backend) -> Iterator[list[bool]]:
    """Of each forward of ``model`` in here whether it ran in a block of ``backend``."""
    found: list[bool] = []
    hook = register_module_forward_pre_hook(lambda module, _: found.append(backend.is_open) if module is model else None)
    yield found
    hook.remove()


@pytest.mark.parametrize(("asked", "runs_the_model"), [(MODEL, True), (STEPS, False), (BEAMS, False)], ids=["model", "steps", "beams"])
def test_what_the_model_itself_runs_is_at_any_length(monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], runs_the_model: bool) -> None:
    model, backend = tiny("gpt2", GPT), Backend()
    mine = ac.compile(model, max_context=64, **QUICK)
    monkeypatch.setattr(Session, "backend", backend)
    with warnings.catch_warnings(), seen(model, backend) as found:
        warnings.simplefilter("ignore")
        mine.generate(PROMPT, 4, **asked)
    assert found == [True] * 4 * runs_the_model and not backend.is_open


def test_a_model_that_was_not_captured_is_at_any_length() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=128, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    model, backend = transformers.OpenAIGPTLMHeadModel(config).eval(), Backend()
    mine = ac.compile(model, **QUICK)
    assert isinstance(mine.session, EagerSession)
    mine.session.backend = backend  # type: ignore[assignment]
    with seen(model, backend) as found:
        mine.generate(PROMPT, 4)
    assert found == [True] * 4 and not backend.is_open


def test_what_raises_inside_ends_the_block() -> None:
    model, backend = tiny("gpt2", GPT), Backend()
    session = EagerSession(model, ac.compile(model, max_context=64, **QUICK).graphs, "cpu", backend)  # type: ignore[arg-type]
    model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("inside")))
    with pytest.raises(Exception, match="inside"):
        session.generate(Asked(input_ids=PROMPT, max_new_tokens=2))
    assert not backend.is_open
