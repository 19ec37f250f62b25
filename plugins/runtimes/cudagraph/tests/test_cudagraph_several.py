"""Several steps in one graph: the tokens, the cache and the history of single steps, bit for bit, wherever a request ends."""

import pytest
import torch
from agentcompile_runtime_cudagraph import CudaGraphRuntime, GraphStep
from attrs import evolve
from transformers import LlamaConfig, LlamaForCausalLM

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType, GraphSet, Workload
from agentcompile_core.runtime.built_in import PlainKVCache
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.testing.doubles import ReplayingBackend

NEW, VOCABULARY, STEPS = 21, 61, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.device)]
STARTS = [(), (9, 13, 14)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None)
    config.initializer_range = 0.3  # far apart logits: no near ties between two ways to compute them
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def graphs(model: LlamaForCausalLM) -> GraphSet:
    return capture_language_model(model, "tiny", Workload(dtype=DType.F32, max_context=40, prefill_chunks=(4, 8)))


def session(model: LlamaForCausalLM, graphs: GraphSet, device: str, starts: tuple[int, ...]) -> Session:
    assert graphs.kv is not None
    programs = {g.name: framework_program(g) for g in graphs.graphs}
    programs |= {p.name: p for p in (evolve(programs["decode"], start=start) for start in starts)}
    backend = ReplayingBackend() if device == "cpu" else load_catalog(only=("cuda",)).find("agentcompile_backends", "cuda")
    return Session(graphs, programs, WeightStore(model.to(device), device), Executables(device=device, backend=backend),
                   kv_state=PlainKVCache().allocate(graphs.kv, device), decode=CudaGraphRuntime(),
                   steps_per_graph=STEPS)


class Heard:
    def __init__(self, most: int = 10**6) -> None:
        self.tokens, self.most = list[int](), most

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens += tokens.flatten().tolist()
        if len(self.tokens) >= self.most:
            raise ValueError("enough")

    def end(self) -> None:
        pass


def prompt_of(length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


def by_huggingface(model: LlamaForCausalLM, prompt: torch.Tensor, device: str, **options: object) -> torch.Tensor:
    with torch.no_grad():
        shown = torch.ones_like(prompt).to(device)
        return model.generate(prompt.to(device), attention_mask=shown, max_new_tokens=NEW, **options).cpu()


def left(mine: Session) -> list[torch.Tensor]:
    """What a request leaves behind up to the last token that it gave."""
    last = int(mine.position)
    rows = [tensor[:, :last].cpu().clone() for tensor in (*mine.kv.keys, *mine.kv.values)]
    return [mine.position.cpu().clone(), mine.ids.cpu().clone(), mine.history[: last + 1].cpu().clone(), *rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("starts", STARTS, ids=str)
@pytest.mark.parametrize("early", [True, False], ids=["prepared", "captured-in-the-middle"])
@pytest.mark.parametrize("length", [1, 7])
def test_tokens_are_those_of_single_steps_for_every_count_and_every_end(model: LlamaForCausalLM, graphs: GraphSet, device: str,
                                                                       starts: tuple[int, ...], early: bool, length: int) -> None:
    several, single = session(model, graphs, device, starts), session(model, graphs, device, starts)
    single.steps_per_graph = 1
    assert several.steps_per_graph == STEPS > 1
    if early:
        several.prepare()
    prompt = prompt_of(length)
    wanted = by_huggingface(model, prompt, device, do_sample=False)
    asked = [(count, None) for count in range(1, NEW + 1)] + [(NEW, token) for token in dict.fromkeys(wanted[0, length:].tolist())]
    for count, eos in asked:
        of_single, behind_it = single.generate(prompt, count, eos_token_id=eos), left(single)
        for streamed in (False, True):
            heard = Heard() if streamed else None
            found = several.generate(prompt, count, eos_token_id=eos, streamer=heard)
            assert torch.equal(found, of_single)
            assert torch.equal(found, wanted[:, : found.shape[1]]) and (found.shape[1] == length + count or int(found[0, -1]) == eos)
            assert heard is None or heard.tokens == found[0].tolist()
            assert all(torch.equal(a, b) for a, b in zip(left(several), behind_it, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_of_several_steps_are_captured_before_requests_and_replayed(model: LlamaForCausalLM, graphs: GraphSet, device: str,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    mine = session(model, graphs, device, (9, 13, 15))
    mine.prepare()
    known = mine._several._known
    assert set(known) == {(name, STEPS) for name in ("decode", "decode_from_9", "decode_from_15")}
    assert all(isinstance(step, GraphStep) and step.captured for step in known.values())
    replays: list[str] = []
    call = GraphStep.__call__
    monkeypatch.setattr(GraphStep, "__call__", lambda step: replays.append("several" if step in known.values() else "one") or call(step))
    monkeypatch.setattr(mine, "capture", lambda *given, **named: pytest.fail("captured within a request"))
    mine.generate(prompt_of(4), 30)  # one prompt chunk of four; tokens at 4 to 8, then 9 to 12, 13 and 14, 15 to 32
    assert replays == ["one", "several", "one", "several", "one", "one", *["several"] * 4, "one", "one"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("early", [True, False], ids=["prepared", "captured-in-the-middle"])
def test_logits_of_single_steps_are_not_those_of_the_graph_beside_them(model: LlamaForCausalLM, graphs: GraphSet, device: str,
                                                                      early: bool) -> None:
    from agentcompile_core.runtime.generation.request import Asked, request
    from agentcompile_core.runtime.generation.serve import serve

    mine, prompt = session(model, graphs, device, (9,)), prompt_of(5)
    if early:
        mine.prepare()
    for _ in range(2):
        for options in ({"do_sample": True, "top_p": 0.9}, {"do_sample": False}, {"do_sample": False, "no_repeat_ngram_size": 2}):
            torch.manual_seed(2)
            wanted = by_huggingface(model, prompt, device, **options)
            torch.manual_seed(2)
            made = request(model, Asked(input_ids=prompt, max_new_tokens=NEW, options={"eos_token_id": None, **options}), graphs)
            assert torch.equal(serve(model, mine, made, seed=None, streamer=None, say=lambda line: None).cpu(), wanted)
        with torch.no_grad():
            logits = model(wanted.to(device)).logits[0]
        torch.testing.assert_close(mine.teacher_forced(wanted), logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_streamer_that_leaves_leaves_a_session_that_serves(model: LlamaForCausalLM, graphs: GraphSet, device: str) -> None:
    mine, prompt = session(model, graphs, device, (9,)), prompt_of(5)
    mine.prepare()
    wanted = mine.generate(prompt, NEW)
    for most in range(5, 5 + NEW):
        heard = Heard(most + 1)
        with pytest.raises(ValueError, match="enough"):
            mine.generate(prompt, NEW, streamer=heard)
        assert heard.tokens == wanted[0, : most + 1].tolist() and int(mine.position) == most
        assert torch.equal(mine.generate(prompt, NEW), wanted)
