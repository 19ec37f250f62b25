"""A language model of which something was exchanged since: it is refused by its name, but for what its own forward exchanges."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_generate_manners import CONFIG, PROMPT, QUICK
from transformers.models.llama import modeling_llama

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.module_changes import AsBound

NEW = 8


def made(config: Any = CONFIG, **options: Any) -> Any:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(copy.deepcopy(config)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.mul_(8.0) if parameter.dim() > 1 else None
    return ac.compile(model, **{**QUICK, **options})


@pytest.fixture(scope="module")
def mine() -> Any:
    return made()


def tokens(model: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> torch.Tensor:
    found = model.generate(prompt, max_new_tokens=NEW, eos_token_id=None, pad_token_id=7, **options)
    return found if isinstance(found, torch.Tensor) else found.sequences


@contextmanager
def other(owner: Any, name: str, value: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def hooked_everywhere() -> Iterator[None]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda part, given, found: None)
    try:
        yield
    finally:
        handle.remove()


class Doubled(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def patched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Another function that computes the same."""
    return lambda *given, **named: function(*given, **named)


CHANGES: dict[str, Callable[[Any], Any]] = {
    r"model\.norm\.variance_epsilon was set": lambda m: other(m.model.norm, "variance_epsilon", lambda _: 5.0),
    r"layers\.0\.self_attn\.scaling was set": lambda m: other(m.model.layers[0].self_attn, "scaling", lambda _: 5.0),
    r"rotary_emb\.inv_freq was replaced": lambda m: other(m.model.rotary_emb, "inv_freq", lambda one: one * 3),
    r"config\.rms_norm_eps was set": lambda m: other(m.config, "rms_norm_eps", lambda _: 0.5),
    r"config\.rope_parameters\.rope_theta was set": lambda m: _theta(m.config.rope_parameters),
    r"config was set": lambda m: other(m.model.layers[0].self_attn, "config", lambda _: transformers.LlamaConfig()),
    r"LlamaMLP\.forward got another forward": lambda _: other(modeling_llama.LlamaMLP, "forward", patched),
    r"LlamaModel\.forward got another forward": lambda _: other(modeling_llama.LlamaModel, "forward", patched),
    r"Linear\.forward got another forward": lambda _: other(torch.nn.Linear, "forward", patched),
    r"apply_rotary_pos_emb was replaced": lambda _: other(modeling_llama, "apply_rotary_pos_emb", patched),
    r"layers\.0\.mlp became a Doubled": lambda m: other(m.model.layers[0].mlp, "__class__", lambda _: Doubled),
    r"every module of torch got a hook": lambda _: hooked_everywhere(),
}


@contextmanager
def _theta(parameters: dict[str, Any]) -> Iterator[None]:
    before = parameters["rope_theta"]
    parameters["rope_theta"] = 3.0
    try:
        yield
    finally:
        parameters["rope_theta"] = before


@pytest.mark.parametrize("words", CHANGES)
def test_what_was_exchanged_is_refused_by_its_name_until_it_is_taken_back(mine, words: str) -> None:
    before = tokens(mine)
    with CHANGES[words](mine.loaded.module):
        for options in ({}, {"num_beams": 2}):
            with pytest.raises(UsageError, match=f"{words}.* after LlamaForCausalLM was compiled.*compile it again"):
                tokens(mine, **options)
    assert torch.equal(tokens(mine), before)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_has_no_say_in_logits_is_no_change(mine, tmp_path: Path) -> None:
    model = mine.loaded.module
    before = tokens(mine)
    model.gradient_checkpointing_enable()
    model.train()
    model.config.use_cache, model.config.pad_token_id, model.config.output_hidden_states = False, 3, True
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    model.model.norm.variance_epsilon = float(repr(model.model.norm.variance_epsilon))  # another object of the same value
    assert torch.equal(tokens(mine), before)
    model.config.output_hidden_states, model.config.use_cache = False, True
    model.gradient_checkpointing_disable()
    model.eval()
    bound = mine.session._weights._as_bound
    assert [bound._slots[at][1:] for at in bound._different()] == [] and bound._is_same()  # it is what is asked for from now on


def test_frequencies_that_a_forward_exchanges_are_no_change_and_those_of_somebody_else_are() -> None:
    turned = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = transformers.LlamaConfig(**{**CONFIG.to_dict(), "rope_parameters": turned, "max_position_embeddings": 32})
    mine = made(config, max_context=32)
    model, turner = mine.loaded.module, mine.loaded.module.model.rotary_emb
    before, short = tokens(mine), turner.inv_freq.clone()
    for _ in range(2):
        tokens(model, torch.arange(10, 60)[None])  # whoever calls the model itself
        assert not torch.equal(turner.inv_freq, short)
        assert torch.equal(tokens(mine), before)
    turner.inv_freq.mul_(2.0)  # in the place of the one that programs read
    with pytest.raises(UsageError, match=r"inv_freq was replaced by another buffer"):
        tokens(mine)
    turner.inv_freq = short * 3
    with pytest.raises(UsageError, match=r"inv_freq was replaced by another buffer"):
        tokens(mine)


class Keeps(torch.nn.Module):
    """Holds what it has read, and how often, as models with states of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.calls, self.scale = None, 0, 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state, self.calls = x * self.scale, self.calls + 1
        return self.state


def test_what_every_forward_writes_is_not_asked_for_again() -> None:
    module, ran = Keeps(), []

    def forward(one: torch.nn.Module) -> None:
        ran.append(one(torch.ones(1)))

    bound = AsBound(module, with_mode=False, forward=forward)
    for _ in range(3):
        module(torch.ones(2))
        assert bound.change() == ""
    assert len(ran) == 1
    module.scale = 3.0
    assert bound.change() == "scale was set to something else"


def test_a_forward_that_cannot_run_puts_nothing_back() -> None:
    module = Keeps()

    def forward(one: torch.nn.Module) -> None:
        raise RuntimeError("no memory")

    bound = AsBound(module, with_mode=False, forward=forward)
    module(torch.ones(2))
    assert bound.change() == "state was set to something else"
