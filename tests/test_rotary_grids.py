"""Positions of several grids (time, height, width): one table where all grids are one by their memory, as of text, else the module's."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.stages.capture.comparison import difference
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.rotary import semantic_rotary

TOKENS = torch.tensor([[0, 3, 4, 90]])


def of_qwen() -> nn.Module:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    return Qwen3_5TextRotaryEmbedding(transformers.Qwen3_5TextConfig(head_dim=32, hidden_size=64, num_attention_heads=2))


class PlainRotaryEmbedding(nn.Module):
    """A table of positions with one axis, which of several grids takes ``shift`` from the second one."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.linspace(1.0, 0.1, 4))
        self.attention_scaling, self.shift = 1.0, shift

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        given = position_ids if position_ids.dim() == 2 else position_ids[0] + self.shift * position_ids[1]
        angles = given[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def calls(module: nn.Module, positions: Tensor) -> tuple[bool, Any]:
    """Whether the operator made the table of ``positions``, and the table."""
    x = torch.zeros(1, 4, 8)
    with semantic_rotary(nn.Sequential(module)):
        assert "forward" in vars(module)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            found = module(x, positions)
    return any("agentcompile::rotary_embedding" in event.key for event in seen.key_averages()), found


@pytest.mark.parametrize("made", [of_qwen, PlainRotaryEmbedding])
def test_grids_that_are_one_are_the_table_of_that_one(made: Any) -> None:
    module = made()
    for positions in (TOKENS, TOKENS.expand(3, 1, 4), TOKENS[None].expand(4, 1, 4)[1:]):
        by_operator, found = calls(module, positions)
        assert by_operator and all(map(torch.equal, found, module(torch.zeros(1, 4, 8), positions)))


@pytest.mark.parametrize("made", [of_qwen, PlainRotaryEmbedding, lambda: PlainRotaryEmbedding(0.5)])
def test_grids_of_their_own_are_the_modules(made: Any) -> None:
    module, grids = made(), torch.stack((TOKENS, TOKENS + 1, 2 * TOKENS))
    by_operator, found = calls(module, grids)
    assert not by_operator and all(map(torch.equal, found, module(torch.zeros(1, 4, 8), grids)))


def test_a_module_that_mixes_its_grids_keeps_its_forward_for_them() -> None:
    module = PlainRotaryEmbedding(0.5)
    by_operator, found = calls(module, TOKENS.expand(3, 1, 4))
    assert not by_operator and all(map(torch.equal, found, module(torch.zeros(1, 4, 8), TOKENS.expand(3, 1, 4))))


def test_a_model_of_several_grids_is_captured_for_text() -> None:
    config = transformers.Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=2, max_position_embeddings=64)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    graphs = capture_language_model(model, "qwen3_5", Workload(dtype=DType.F32, max_context=32, prefill_chunks=(8,)))
    assert graphs.graphs and not difference(graphs, LoadedModel(module=model, name="m"))
    assert any(node.kind == "rotary_embedding" for graph in graphs.graphs for node in graph.nodes)
