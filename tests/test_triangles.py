"""Gated delta rules: a chunk solves one triangular system a layer, and gives HuggingFace's tokens."""

import sys
from typing import Any

import pytest
import torch
from capture_models import TOKENS, tiny
from test_states import check_requests, slow

from agentcompile_core.ir.graph import DType, GraphKind, Workload
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.stages.capture import recurrences
from agentcompile_core.stages.capture.comparison import difference
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.triangles import ASKED, triangles_solved

SHARED: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, **TOKENS,
}
MODELS = {
    "qwen3_next": {**SHARED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
                   "decoder_sparse_step": 1},
    "qwen3_5_text": SHARED,
    "olmo_hybrid": {**SHARED, "linear_num_value_heads": 2},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_chunk_holds_one_system_a_layer(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the whole rule is no operator of ours."""
    monkeypatch.setattr(recurrences, "_OURS", {})
    model = slow(tiny(model_type, MODELS[model_type]))
    graphs = capture_language_model(model, model_type, Workload(dtype=DType.F32, max_context=40, prefill_chunks=(4, 20)))
    assert not graphs.eager_reason and {g.tokens for g in graphs.of_kind(GraphKind.PREFILL)} == {4, 16, 20}
    for graph in graphs.of_kind(GraphKind.PREFILL):
        assert sum(node.op == "aten.linalg_solve_triangular.default" for node in graph.nodes) == 2, graph.name
        assert len(graph.nodes) < 400
    assert difference(graphs, LoadedModel(module=model, name=model_type)) == ""
    check_requests(model, graphs, [3, 20, 37])


def test_only_during_a_trace_and_only_where_systems_are_solved() -> None:
    solving, other = (tiny(name, options) for name, options in (("qwen3_5_text", SHARED), ("mamba", {
        "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, **TOKENS})))
    modules = [sys.modules[type(model).__module__] for model in (solving, other)]
    before = [getattr(module, ASKED) for module in modules]
    with pytest.raises(ZeroDivisionError), torch.no_grad(), triangles_solved(solving), triangles_solved(other):
        assert getattr(modules[0], ASKED)() is False and getattr(modules[0], ASKED) is not before[0]
        assert getattr(modules[1], ASKED) is before[1]
        raise ZeroDivisionError
    assert [getattr(module, ASKED) for module in modules] == before
