"""Many sequences over one session: whatever order they are read, copied and cut in, each one's logits are those of its own tokens."""

from typing import Any

import pytest
import torch
import transformers
from capture_models import TOKENS, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agentcompile_core.errors import UsageError
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.generation.request import Asked, request
from agentcompile_core.runtime.generation.sequences import STEPS, Row, Sequences
from agentcompile_core.runtime.generation.serve import serve
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model

CONTEXT, CHUNKS = 20, (4, 8)
SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
                         "max_position_embeddings": 64, **TOKENS}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_hidden_layers": 2},
    "llama4_text": {**SIZES, "num_hidden_layers": 2, "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 6,
                    "intermediate_size_mlp": 24, "no_rope_layers": [1, 0], "floor_scale": 4},
    "gemma4_text": {**SIZES, "num_hidden_layers": 2, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 4,
                    "vocab_size_per_layer_input": 61, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {**SIZES, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest) -> tuple[nn.Module, Session]:
    """(HuggingFace's model, a session of it)."""
    model = tiny(request.param, MODELS[request.param])
    graphs = capture_language_model(model, "tiny", Workload(dtype=DType.F32, max_context=CONTEXT, prefill_chunks=CHUNKS))
    assert graphs.graphs and graphs.kv is not None, graphs.eager_reason
    return model, Session(graphs, {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model, "cpu"),
                          Executables(device="cpu"), kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=PythonLoop())


TOKEN = st.integers(3, 60)
# Row, what to read behind it, how many logits of that, which row becomes a copy of it, how many tokens are taken back before.
DEEDS = st.tuples(st.integers(0, 2), st.lists(TOKEN, min_size=1, max_size=STEPS + 2), st.integers(1, 3),
                  st.one_of(st.none(), st.integers(0, 2)), st.integers(0, 2))


@settings(max_examples=5)
@given(deeds=st.lists(DEEDS, min_size=2, max_size=6))
def test_logits_are_those_of_a_rows_own_tokens(served: tuple[nn.Module, Session], deeds: list[Any]) -> None:
    model, session = served
    sequences, rows, known = Sequences(session), [Row() for _ in range(3)], [[], [], []]
    for index, more, keep, copied, cut in deeds:
        if sequences.rewinds:
            cut = min(cut, len(known[index]))
            rows[index].cut(cut)
            known[index] = known[index][: len(known[index]) - cut]
        more, keep = more[: CONTEXT - len(known[index])], min(keep, len(more[: CONTEXT - len(known[index])]))
        if not more:
            with pytest.raises(UsageError, match="21 tokens exceeds the context of 20"):
                sequences.logits(rows[index], [5], 1)
            continue
        found = sequences.logits(rows[index], more, keep)
        known[index] = [*known[index], *more]
        wanted = model(torch.tensor([known[index]]), use_cache=False).logits[0, -keep:]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        if copied is not None and copied != index:
            rows[copied], known[copied] = sequences.copy(rows[index]), list(known[index])


def run(served: tuple[nn.Module, Session], **asked: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """HuggingFace's tokens and ours."""
    model, session = served
    prompt = asked.pop("prompt")
    found = []
    for own in (True, False):
        torch.manual_seed(5)
        if own:
            found.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), eos_token_id=None, pad_token_id=0, **asked))
        else:
            wanted = request(model, Asked(input_ids=prompt, options={"eos_token_id": None, "pad_token_id": 0, **asked}), session.graphs)
            found.append(serve(model, session, wanted, seed=None, streamer=None, say=lambda _: None))
    return found[0], found[1]


EDGES = sorted({1, CHUNKS[0] - 1, CONTEXT - 1, *(edge for size in (*CHUNKS, sum(CHUNKS)) for edge in (size, size + 1))})


@pytest.mark.parametrize("length", EDGES)
def test_the_last_position_of_the_context_is_used_behind_prompts_of_any_length(served: tuple[nn.Module, Session], length: int) -> None:
    prompt = torch.randint(3, 61, (1, length), generator=torch.Generator().manual_seed(length))
    theirs, mine = run(served, prompt=prompt, max_new_tokens=CONTEXT - length, do_sample=length % 2 == 0)
    assert mine.shape[1] == CONTEXT and torch.equal(mine, theirs)


@pytest.mark.parametrize("options", [
    {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"repetition_penalty": 1.4}], ids=str)
def test_beams_and_rows_to_the_end_of_the_context(served: tuple[nn.Module, Session], options: dict[str, Any]) -> None:
    for length in (1, CONTEXT - 5):
        prompt = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(length))
        theirs, mine = run(served, prompt=prompt, max_new_tokens=5, **options)
        assert torch.equal(mine, theirs)


def test_a_model_whose_states_cannot_go_back_leaves_drafts_to_the_framework(served: tuple[nn.Module, Session]) -> None:
    model, session = served
    wanted = request(model, Asked(input_ids=[5, 6], max_new_tokens=4, options={"prompt_lookup_num_tokens": 2}), session.graphs)
    assert (wanted.runs, bool(wanted.why)) == (("framework", True) if session.graphs.states else ("session", False))
    assert isinstance(wanted.config, transformers.GenerationConfig)
