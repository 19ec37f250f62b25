"""States that a model keeps in its modules, or in a cache of a class of its own: declared, zero for every request, written by each step."""

from typing import Any

import pytest
import torch
from capture_models import TOKENS, tiny
from test_states import NEW, captured, session
from torch import Tensor, nn
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from agentcompile_core.ir.graph import GraphKind
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.stages.capture.comparison import difference
from agentcompile_core.stages.capture.own_states import with_own_states
from agentcompile_core.stages.capture.states import Held
from agentcompile_core.stages.capture.unsupported import Unsupported

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
                         "head_dim": 8, "max_position_embeddings": 64, **TOKENS}
IN_MODULES: dict[str, Any] = {**SIZES, "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8}
IN_A_CACHE: dict[str, Any] = {**SIZES, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                              "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4}
KEPT = pytest.mark.parametrize(("model_type", "options", "states"), [
    ("recurrent_gemma", IN_MODULES, {"own.0.0": (1, 16, 3), "own.0.1": (1, 16), "own.1.0": (1, 16, 3), "own.1.1": (1, 16)}),
    ("minimax", IN_A_CACHE, {"own.0.0": (1, 2, 8, 8), "own.2.0": (1, 2, 8, 8)}),
])


def attributes(model: nn.Module) -> dict[str, Any]:
    return {f"{path}.{name}": value for path, part in model.named_modules() for name, value in vars(part).items()
            if value is None or isinstance(value, Tensor)}


@KEPT
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_every_request_gets_the_tokens_of_a_new_model(model_type: str, options: dict[str, Any], states: dict[str, Any], used: bool) -> None:
    """Prompts of a token and of more than a window, one after the other; the model may have run before, and stays what it was."""
    model = tiny(model_type, options)
    if used:
        model.generate(torch.tensor([[7, 7, 9]]), attention_mask=torch.ones(1, 3), max_new_tokens=3, do_sample=False)
    before = attributes(model)
    graphs = captured(model)
    assert {name.removeprefix("state."): spec.shape for name, spec in graphs.states.items()} == states
    assert graphs.kv is not None and graphs.kv.layers == 1
    assert difference(graphs, LoadedModel(module=model, name="tiny")) == ""
    after = attributes(model)
    assert after.keys() == before.keys() and all(after[name] is value for name, value in before.items())
    mine, generator = session(model, graphs), torch.Generator().manual_seed(5)
    for length in (1, 13, 1, 6):
        prompt = torch.randint(3, 61, (1, length), generator=generator)
        wanted = tiny(model_type, options).generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        assert torch.equal(mine.generate(prompt, NEW), wanted), length


def test_chunks_that_begin_anew_leave_the_steps_and_those_that_go_on_stay() -> None:
    """RecurrentGemma's convolutions forget what was before a chunk; MiniMax's recurrence goes on, token by token."""
    assert [g.kind for g in captured(tiny("recurrent_gemma", IN_MODULES)).graphs] == [GraphKind.DECODE]
    graphs = captured(tiny("minimax", IN_A_CACHE))
    assert graphs.whole_chunks and any(g.kind is GraphKind.PREFILL for g in graphs.graphs)


@pytest.mark.parametrize(("keeps", "why"), [
    (lambda cache, _: vars(cache).update(seen=getattr(cache, "seen", 0) + 1), "its cache counts"),
    (lambda cache, new: vars(cache).setdefault("all", []).append(new), "grows"),
    (lambda cache, new: vars(cache).update(all=torch.cat([getattr(cache, "all", new), new])), "of one size"),
], ids=["a number", "a list", "a tensor"])
def test_what_a_cache_keeps_besides_states_is_found(monkeypatch: pytest.MonkeyPatch, keeps: Any, why: str) -> None:
    write = MiniMaxCache.set_linear_cache

    def kept(self: Any, layer: int, new: Any) -> None:
        keeps(self, new)
        write(self, layer, new)

    monkeypatch.setattr(MiniMaxCache, "set_linear_cache", kept)
    with pytest.raises(Unsupported, match=why):
        with_own_states(tiny("minimax", IN_A_CACHE), Held())
