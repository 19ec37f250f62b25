"""Models that transformers keeps partly in float32 are models of the type that most of their numbers have."""

from collections import Counter

import pytest
import torch
from capture_models import TOKENS, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.stages.capture.describe import dtype_of
from agentcompile_core.stages.capture.modules import check_dtype
from agentcompile_core.store import Store

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
SHARED = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
          "max_position_embeddings": 64, "num_hidden_layers": 2, **TOKENS}
MIXED = {
    "ernie4_5_moe": {**SHARED, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2},
    "hunyuan_v1_moe": {**SHARED, "head_dim": 8, "num_experts": 4, "moe_topk": 2},
}


@settings(max_examples=30, derandomize=True, database=None, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(TYPES), st.integers(1, 40)), min_size=1, max_size=5),
       st.sampled_from(["float32", "float16", "bfloat16"]))
def test_a_model_is_of_the_type_that_most_of_its_numbers_have(sizes: list[tuple[torch.dtype, int]], asked: str) -> None:
    """A router or a decay in float32 makes no other model of it."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(count, dtype=dtype), requires_grad=False) for dtype, count in sizes])
    counts = Counter[str]()
    for dtype, count in sizes:
        counts[str(dtype).removeprefix("torch.")] += count
    del counts["int8"]
    most = {name for name, count in counts.items() if count == max(counts.values())} or {"float32"}
    assert dtype_of(model).value in most
    if counts and asked not in most:
        with pytest.raises(UsageError, match=f"the live model is .* and {asked} was asked for"):
            check_dtype(model, asked)
    elif len(most) == 1:
        check_dtype(model, asked)


@pytest.mark.parametrize("model_type", MIXED)
def test_a_model_of_two_types_is_compiled_as_it_is(model_type: str) -> None:
    model = tiny(model_type, MIXED[model_type], torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    mine = ac.compile(model, dtype="bfloat16", device="cpu", run_on="framework", store=Store(None), validators=(), origins=[],
                      max_context=32)
    assert not mine.graphs.eager_reason and mine.graphs.workload.dtype.value == "bfloat16"
    prompt = torch.tensor([[5, 17, 9, 3, 42, 8]])
    with torch.no_grad():
        wanted = model(prompt).logits[0].float()
    found = mine.session.teacher_forced(prompt).float()
    assert float((found - wanted).square().mean().sqrt()) <= 0.05 * float(wanted.square().mean().sqrt())
