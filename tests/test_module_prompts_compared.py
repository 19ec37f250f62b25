"""Behind prompts that HuggingFace's own model reads nothing is believed: what is compared, once for which kind, and what shows there."""

from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from test_module_prompts import BY_LOOP, BY_STEPS, generated, made
from test_module_prompts import compiled as compiled
from test_module_prompts import composite as composite

from agentcompile_core.ir.graph import OFFSET, GraphKind, map_refs
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.runtime.generation import module_prompt
from agentcompile_core.stages.capture.comparison import difference


def gpt2() -> Any:
    """It adds the embedding of a kind of token, which is that of a token."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config).eval().requires_grad_(False)
    model.transformer.wte.weight.data.mul_(40)
    return model


def test_states_are_where_they_were_behind_the_comparison(composite: Any, compiled: Any) -> None:
    original, mine = compiled["qwen3_5"]
    for seed in range(1, 4):
        mine.session.agreed.clear()
        asked = {**composite.image_prompt(original, seed), "max_new_tokens": 12, "eos_token_id": None}
        assert torch.equal(generated(mine, 0, **asked)[0], generated(original, 0, **asked)[0])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_another_kind_of_token_is_another_kind_of_prompt(order: tuple[int, int]) -> None:
    """BERT adds an embedding by the kind, so that a step behind text of kind 1 is not that behind text of kind 0."""
    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                                     max_position_embeddings=64, is_decoder=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    original = transformers.BertLMHeadModel(config).eval().requires_grad_(False)
    for weights in original.parameters():
        weights.data.mul_(8)
    mine = made(original, 64)
    tokens = torch.tensor([[5, 9, 7, 11]])
    for kind in (*order, *order):
        asked = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "token_type_ids": torch.full_like(tokens, kind),
                 "max_new_tokens": 8, "eos_token_id": None}
        assert torch.equal(generated(mine, 0, **asked)[0], generated(original, 0, **asked)[0])


def test_what_is_known_of_weights_ends_with_them() -> None:
    original = gpt2()
    original.transformer.wte.weight.data[0] = 0.0
    mine = made(original, 64)
    tokens = torch.tensor([[5, 9, 7, 11]])
    asked = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "token_type_ids": torch.zeros_like(tokens),
             "max_new_tokens": 6, "eos_token_id": None}
    for _ in range(2):
        assert torch.equal(generated(mine, 0, **asked)[0], generated(original, 0, **asked)[0])
    original.transformer.wte.weight[0].normal_(0, 3)
    assert torch.equal(generated(mine, 0, **asked)[0], generated(original, 0, **asked)[0])


@pytest.mark.parametrize("spoiled", ["keys", "values", "position", "states", "nothing is imported"])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_a_session_that_does_not_go_on_as_the_model_is_not_believed(composite: Any, compiled: Any, name: str, spoiled: str,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    original, mine = compiled[name]
    if spoiled == "states" and not mine.graphs.states:
        pytest.skip("it has none")
    known, drawn = module_prompt.import_cache, torch.Generator().manual_seed(8)

    def spoil(session: Any, cache: Any, length: int, config: Any) -> str:
        if spoiled == "nothing is imported":
            for tensor in (*session.kv.keys, *session.kv.values):
                tensor.zero_()
            return ""
        why = known(session, cache, length, config)
        if spoiled in ("keys", "values"):
            tensor = getattr(session.kv, spoiled)[0]
            tensor[:, length - 3 : length].normal_(generator=drawn)
        elif spoiled == "states":
            for source in session.graphs.states:
                session.states[source].normal_(generator=drawn)
        return why

    mine.session.agreed.clear()
    read_next = mine.session.read_next
    monkeypatch.setattr(module_prompt, "import_cache", spoil)
    if spoiled == "position":
        monkeypatch.setattr(mine.session, "read_next", lambda token, position: read_next(token, position + 1))
    asked = {**composite.image_prompt(original), "max_new_tokens": 6, "do_sample": True, "top_k": 9}
    found, said = generated(mine, 3, **asked)
    assert BY_LOOP in said and "computes something else" in said
    assert torch.equal(found, generated(original, 3, **asked)[0])


def test_each_kind_of_prompt_is_compared_once(composite: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, mine = compiled["gemma3"]
    prompt = composite.image_prompt(original)
    mine.session.agreed.clear()
    calls: list[int] = []
    handle = mine.loaded.module.register_forward_pre_hook(lambda module, args, keywords: calls.append(keywords["input_ids"].shape[1]),
                                                          with_kwargs=True)
    monkeypatch.setattr(mine.session._weights, "check_unchanged", lambda name: None)  # it refuses hooks
    try:
        shorter = {name: one[:, 2:] if one.dim() == 2 else one for name, one in prompt.items()}
        for asked in (prompt, prompt, shorter):
            generated(mine, 0, **asked, max_new_tokens=3, eos_token_id=None)
    finally:
        handle.remove()
    assert calls == [9, 1, 9, 7], "the window cuts both prompts"


@pytest.mark.parametrize(("name", "beside"), [("gemma3", "kinds"), ("qwen2_5_vl", "kinds"), ("gemma3", "positions")])
def test_what_says_nothing_beside_tokens_is_left_out_once_that_is_known(composite: Any, compiled: Any, name: str, beside: str) -> None:
    """Kinds of tokens that are all 0, and positions that count the tokens."""
    original, mine = compiled[name]
    kinds = next(one for one in composite.image_prompt(original) if one.endswith("token_type_ids"))
    mine.session.agreed.clear()
    said = []
    for ids in ([[5, 9, 7]], [[8, 3]], [[4, 4, 6, 7]]):
        tokens = torch.tensor(ids)
        more = {kinds: torch.zeros_like(tokens)} if beside == "kinds" else {"position_ids": torch.arange(tokens.shape[1])[None]}
        asked = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **more, "max_new_tokens": 5}
        found, note = generated(mine, 1, **asked, do_sample=True, top_k=9)
        assert torch.equal(found, generated(original, 1, **asked, do_sample=True, top_k=9)[0])
        said.append(note)
    assert BY_STEPS in said[0] and said[1:] == ["", ""], "compiled chunks read the others"
    image = {**composite.image_prompt(original), "max_new_tokens": 5}
    assert torch.equal(generated(mine, 1, **image)[0], generated(original, 1, **image)[0])


def test_kinds_of_tokens_that_say_something_are_read_by_the_model_each_time() -> None:
    """GPT-2 adds the embedding of token 0 where a kind is 0."""
    original = gpt2()
    mine = made(original, 64)
    tokens = torch.tensor([[5, 9, 7, 11]])
    for kinds in ({"token_type_ids": torch.zeros_like(tokens)}, {"token_type_ids": torch.zeros_like(tokens)}, {}):
        asked = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **kinds, "max_new_tokens": 6, "pad_token_id": 0}
        found, note = generated(mine, 0, **asked)
        assert torch.equal(found, generated(original, 0, **asked)[0]) and (BY_LOOP in note) == bool(kinds)


def test_a_step_that_ignores_its_offset_is_not_the_model(composite: Any, compiled: Any) -> None:
    original, mine = compiled["qwen2_5_vl"]
    loaded = LoadedModel(module=original, name="tiny")
    assert difference(mine.graphs, loaded) == ""
    graph = mine.graphs.of_kind(GraphKind.DECODE)[0]
    offset = next(value.name for value in graph.values if value.source == OFFSET)
    node = next(node for node in graph.nodes if offset in node.inputs)
    position = next(name for name in node.inputs if name != offset)
    without = {node.outputs[0]: position}
    nodes = tuple(evolve(one, args=map_refs(one.args, without), kwargs=map_refs(one.kwargs, without)) for one in graph.nodes if one != node)
    wrong = evolve(mine.graphs, graphs=tuple(evolve(one, nodes=nodes) if one.name == graph.name else one for one in mine.graphs.graphs))
    assert difference(wrong, loaded) != ""
