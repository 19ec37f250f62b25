"""A whole model generates through captured graphs what HuggingFace generates, however late each graph is captured."""

import pytest
import torch
from agentcompile_runtime_cudagraph import CudaGraphRuntime
from attrs import evolve
from transformers import LlamaConfig, LlamaForCausalLM

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType, GraphSet, Workload
from agentcompile_core.runtime.built_in import PlainKVCache
from agentcompile_core.runtime.device_choice import PLACES
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.testing.doubles import ReplayingBackend

NEW = 6


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None)
    config.initializer_range = 0.3  # far apart logits: no near ties between two ways to compute them
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def graphs(model: LlamaForCausalLM) -> GraphSet:
    found = capture_language_model(model, "tiny", Workload(dtype=DType.F32, max_context=40, prefill_chunks=(4, 8)))
    assert found.graphs, found.eager_reason
    return found


def session(model: LlamaForCausalLM, graphs: GraphSet, device: str, starts: tuple[int, ...] = ()) -> Session:
    assert graphs.kv is not None
    programs = {g.name: framework_program(g) for g in graphs.graphs}
    programs |= {p.name: p for p in (evolve(programs["decode"], start=start) for start in starts)}
    backend = ReplayingBackend() if device == "cpu" else load_catalog(only=("cuda",)).find("agentcompile_backends", "cuda")
    return Session(graphs, programs, WeightStore(model.to(device), device), Executables(device=device, backend=backend),
                   kv_state=PlainKVCache().allocate(graphs.kv, device), decode=CudaGraphRuntime())


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.device)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("early", [True, False], ids=["prepared", "captured-in-the-middle"])
@pytest.mark.parametrize("length", [1, 7, 20])
def test_generates_what_huggingface_does(model: LlamaForCausalLM, graphs: GraphSet, device: str, early: bool, length: int) -> None:
    mine = session(model, graphs, device)
    if early:
        mine.prepare()
    prompt = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        wanted = model.generate(prompt.to(device), attention_mask=torch.ones_like(prompt).to(device), max_new_tokens=NEW,
                                do_sample=False).cpu()
    for _ in range(2):  # the second request replays only
        assert torch.equal(mine.generate(prompt, NEW), wanted)


@pytest.mark.device
def test_every_program_of_a_model_is_captured(model: LlamaForCausalLM, graphs: GraphSet) -> None:
    mine = session(model, graphs, "cuda")
    mine.prepare()
    assert {name: step.reason for name, step in mine._steps.items()} == dict.fromkeys(mine._steps, "")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("search", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"no_repeat_ngram_size": 2}], ids=str)
def test_rows_and_beams_change_places_between_replays(model: LlamaForCausalLM, graphs: GraphSet, device: str, search: dict) -> None:
    from agentcompile_core.runtime.generation.request import Asked, request
    from agentcompile_core.runtime.generation.serve import serve

    mine = session(model, graphs, device)
    mine.prepare()
    prompts = torch.tensor([[0, 0, 7, 19, 33], [3, 4, 5, 60, 9]])
    mask, options = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]), {"pad_token_id": 0, **search}
    torch.manual_seed(2)
    wanted = model.generate(prompts.to(device), attention_mask=mask.to(device), max_new_tokens=12, **options).cpu()
    asked = Asked(input_ids=prompts, attention_mask=mask, max_new_tokens=12, options=options)
    torch.manual_seed(2)
    found = serve(model, mine, request(model, asked, graphs), seed=None, streamer=None, say=lambda line: None)
    assert torch.equal(found.cpu(), wanted)


DRAWN = [{"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"top_k": 0}, {"min_p": 0.05, "temperature": 1.3}, {"typical_p": 0.9},
         {"epsilon_cutoff": 1e-3}, {"repetition_penalty": 1.3, "top_k": 0}, {"suppress_tokens": [3, 9]},
         {"eos_token_id": list(range(0, 61, 7)), "pad_token_id": 0}, {"do_sample": False, "repetition_penalty": 2.5}]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("streamed", [False, True], ids=["at the end", "streamed"])
@pytest.mark.parametrize("asked", DRAWN, ids=str)
def test_drawn_tokens_are_huggingfaces_and_no_step_waits_for_the_host(
        model: LlamaForCausalLM, graphs: GraphSet, device: str, asked: dict, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core.runtime.generation.request import Asked, request
    from agentcompile_core.runtime.generation.serve import serve

    def refused(*given: object) -> None:
        raise AssertionError("the host chooses")

    class Heard:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, tokens: torch.Tensor) -> None:
            self.tokens += tokens.flatten().tolist()

        def end(self) -> None:
            pass

    mine, prompt = session(model, graphs, device), torch.tensor([[7, 19, 33, 7]])
    mine.prepare()
    captures, capture = [], mine.capture
    monkeypatch.setattr(mine, "capture", lambda run, **named: captures.append(run) or capture(run, **named))
    monkeypatch.setattr("agentcompile_core.runtime.token_maker.Picking", refused)
    options = {"do_sample": True, "eos_token_id": None, **asked}
    for seed in range(4):
        torch.manual_seed(seed)
        wanted = model.generate(prompt.to(device), attention_mask=torch.ones_like(prompt).to(device), max_new_tokens=24, **options).cpu()
        heard = Heard() if streamed else None
        torch.manual_seed(seed)
        made = request(model, Asked(input_ids=prompt, max_new_tokens=24, options=options), graphs)
        found = serve(model, mine, made, seed=None, streamer=heard, say=lambda line: None)
        assert torch.equal(found.cpu(), wanted)
        assert heard is None or heard.tokens == wanted[0].tolist()
    # Four requests, one capture; where steps are not captured their logits lie elsewhere each time, and that is noticed.
    assert len(captures) == 1 if device == "cuda" else len(captures) <= PLACES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("early", [True, False], ids=["prepared", "captured-in-the-middle"])
@pytest.mark.parametrize("asked", [{"do_sample": False}, {"do_sample": True, "top_p": 0.9}, {"do_sample": True, "repetition_penalty": 1.4}],
                         ids=str)
def test_a_request_goes_on_where_another_program_serves(model: LlamaForCausalLM, graphs: GraphSet, device: str, asked: dict,
                                                        early: bool) -> None:
    from agentcompile_core.runtime.generation.request import Asked, request
    from agentcompile_core.runtime.generation.serve import serve

    mine = session(model, graphs, device, starts=(9, 13, 14))
    if early:
        mine.prepare()
    options = {"eos_token_id": None, **asked}
    for length in (1, 7, 12, 20, 7):
        prompt = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(length))
        torch.manual_seed(3)
        wanted = model.generate(prompt.to(device), attention_mask=torch.ones_like(prompt).to(device), max_new_tokens=16, **options).cpu()
        torch.manual_seed(3)
        made = request(model, Asked(input_ids=prompt, max_new_tokens=16, options=options), graphs)
        assert torch.equal(serve(model, mine, made, seed=None, streamer=None, say=lambda line: None).cpu(), wanted)
    if device == "cuda":
        assert all(getattr(step, "captured", False) for name, step in mine._steps.items())
