"""Frequencies of long sequences: whose they are, what is believed of them, and what is left to the framework."""

import hashlib
import json
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from test_long_frequencies import LIMIT, LONG, SIZES, by_hugging_face, compiled, phi, prompt_of, tiny  # noqa: F401  (phi is a fixture)
from torch import nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError, VerificationError
from agentcompile_core.ir.frequencies import Frequencies
from agentcompile_core.store import Store


@pytest.fixture(scope="module")
def captures() -> Store:
    """What the model of all bundles is when it is asked, which the first of them does."""
    return Store(None)


@pytest.mark.parametrize("change", ["limit", "rereads", "far", "near", "none"])
def test_a_bundle_that_says_otherwise_than_the_model_is_refused(
    phi: tuple[Any, Any], captures: Store, tmp_path: Any, change: str  # noqa: F811
) -> None:
    """No few tokens show what lies beyond the limit, so the module is asked again."""
    folder = phi[1].save(tmp_path / "bundle")
    (path,) = folder.rglob("graphs.json")
    graphs = json.loads(path.read_text())
    one = graphs["frequencies"][0]
    one |= {"limit": 1000} if change == "limit" else {"rereads": False} if change == "rereads" else {}
    if change in ("far", "near"):
        one[change] = [2.0 * number for number in one[change]]
    if change == "none":
        graphs["frequencies"] = []
    before, text = hashlib.sha256(path.read_bytes()).hexdigest(), json.dumps(graphs)
    path.write_text(text)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(before, hashlib.sha256(text.encode()).hexdigest()))
    with pytest.raises(UsageError, match=r"compute something else|are not what is captured"):
        ac.load(folder, tiny("phi3"), run_on="framework", store=captures)


@pytest.mark.parametrize("first", [True, False])
def test_a_buffer_is_one_under_all_of_its_names(first: bool) -> None:
    model, part = tiny("llama"), nn.Module()
    part.register_buffer("other", model.model.rotary_emb.inv_freq, persistent=False)
    parts = {"before": part, **model._modules} if first else {**model._modules, "behind": part}
    model._modules.clear()
    model._modules.update(parts)
    mine = compiled(model)
    assert mine.graphs.frequencies
    for length, count in ((60, 20), (30, 30)):
        assert torch.equal(mine.generate(prompt_of(length), count, eos_token_id=None), by_hugging_face(model, prompt_of(length), count))


def test_a_class_that_keeps_its_cache_is_not_taken_for_one_that_drops_it() -> None:
    """With a way of its own to prepare a step, and the limit in its configuration: neither says what it does at the limit."""
    model = tiny("llama")
    model.config.original_max_position_embeddings = LIMIT

    class Own(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *given: Any, **named: Any) -> Any:
            return super().prepare_inputs_for_generation(*given, **named)

    model.__class__ = Own
    mine = compiled(model)
    assert [one.rereads for one in mine.graphs.frequencies] == [False]
    assert torch.equal(mine.generate(prompt_of(30), 30, eos_token_id=None), by_hugging_face(model, prompt_of(30), 30))


class Recomputing(nn.Module):
    """A rotation that says nothing of its kind and computes its frequencies anew, by how long a sequence is."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.register_buffer("inv_freq", like.original_inv_freq.clone(), persistent=False)
        self.attention_scaling = like.attention_scaling

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        factors = torch.tensor(LONG["long_factor" if int(position_ids.max()) >= LIMIT else "short_factor"])
        self.inv_freq = 1.0 / (factors * 10000.0 ** (torch.arange(0, 16, 2).float() / 16))
        turned = (self.inv_freq[None, :, None].expand(len(position_ids), -1, 1) @ position_ids[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((turned, turned), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def test_a_rotation_that_computes_its_frequencies_anew_is_no_buffers() -> None:
    model = tiny("llama")
    kind = type("RecomputingRotaryEmbedding", (Recomputing,), {})
    model.model.rotary_emb = kind(model.model.rotary_emb)
    mine = compiled(model)
    for length, count in ((9, 20), (60, 20), (30, 30)):
        assert torch.equal(mine.generate(prompt_of(length), count, eos_token_id=None), by_hugging_face(model, prompt_of(length), count))


@pytest.mark.parametrize("other", [{**LONG, "original_max_position_embeddings": LIMIT + 10},
                                   {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}], ids=["two limits", "dynamic"])
def test_layers_of_two_kinds(other: dict[str, Any]) -> None:
    """Several limits are left to the framework, with a reason; one that the model never passes is none."""
    given = {"full_attention": LONG, "sliding_attention": other}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        config = transformers.CONFIG_MAPPING["gemma3_text"](**SIZES | {"head_dim": 16, "num_hidden_layers": len(given)},
                                                            layer_types=[*reversed(given)], rope_parameters=given)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    mine = compiled(model)
    try:
        with torch.no_grad():
            for length in (60, 61, 9):
                model(prompt_of(length))
    except UnboundLocalError:  # transformers 5.17, whose own model fails behind a second long prompt
        assert mine.graphs.kv is None and "otherwise than by one limit" in mine.notes[0]
        return
    assert (mine.graphs.kv is not None) is ("dynamic" in other.values()), mine.notes
    assert mine.graphs.kv is not None or "by several limits" in mine.notes[0]
    for length, count in ((9, 20), (60, 20), (30, 30)):
        assert torch.equal(mine.generate(prompt_of(length), count, eos_token_id=None), by_hugging_face(model, prompt_of(length), count))


def test_what_was_not_captured_says_nothing_of_frequencies(tmp_path: Any) -> None:
    """A model whose graphs compute something else is saved as one that runs on the framework, and opened again."""
    def wrong(*_: Any, **__: Any) -> tuple[str, str]:
        return "it was told so", ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentcompile_core.stages.capture._difference", wrong)
        mine = compiled(tiny("phi3"))
    assert mine.graphs.kv is None and mine.graphs.frequencies == ()
    again = ac.load(mine.save(tmp_path / "bundle"), tiny("phi3"), run_on="framework", store=Store(None))
    assert again.graphs.kv is None


@pytest.mark.parametrize("change", [
    {"source": "model.embed_tokens.weight"}, {"source": "model.norm.weight"}, {"source": "none"}, {"source": "session.position"},
    {"near": (1.0,)}, {"far": ()},
    {"limit": 0}, {"limit": -3}, {"far": (float("nan"),) * 8}, {"near": (float("inf"),) * 8}], ids=str)
def test_frequencies_that_fit_no_graph_are_refused(phi: tuple[Any, Any], change: dict[str, Any]) -> None:  # noqa: F811
    graphs = phi[1].graphs
    one: Frequencies = graphs.frequencies[0]
    with pytest.raises(VerificationError, match="frequencies of"):
        evolve(graphs, frequencies=(evolve(one, **change),)).verify()
    with pytest.raises(VerificationError, match="frequencies of"):
        evolve(graphs, frequencies=(one, one)).verify()


def test_another_rule_than_one_limit_is_left_to_the_framework() -> None:
    """A module that changes its frequencies once more, further on: what it was asked for does not fit one limit."""
    model = tiny("phi3")
    kind = type(model.model.rotary_emb)

    class Third(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            cos, sin = super().forward(x, position_ids)
            return (cos * 0.5, sin) if int(position_ids.max()) > LIMIT + 3 else (cos, sin)

    Third.__name__ = kind.__name__
    model.model.rotary_emb.__class__ = Third
    mine = compiled(model)
    assert mine.graphs.kv is None and any("otherwise than by one limit" in note or "computes" in note or "branches" in note
                                           for note in mine.notes), mine.notes
