"""Experts that a model dispatches to itself: rows with their own experts' matrices, as the model computes them one expert at a time."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_models import CONTEXT, SIZES, TOKENS, WORKLOAD, generate, greedy, tiny, without
from torch import Tensor, nn

from agentcompile_core.ops import experts as operators
from agentcompile_core.stages.capture.grouped import Grouped
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.unsupported import Unsupported

PROMPT = torch.tensor([[5, 17, 99, 3, 42, 7, 11]])
MLA = {**without("intermediate_size"), "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
       "kv_lora_rank": 16, "q_lora_rank": 16}
OWN = {
    "dbrx": {"vocab_size": 128, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, **TOKENS,
             "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "longcat_flash": {**MLA, "num_layers": 2, "num_hidden_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24,
                      "n_routed_experts": 4, "zero_expert_num": 3, "moe_topk": 3},
    "jetmoe": {**SIZES, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("model_type", OWN)
def test_captured_model_speaks_as_huggingface_does(model_type: str) -> None:
    model = tiny(model_type, OWN[model_type])
    graphs = capture_language_model(model, model_type, WORKLOAD).verify()
    assert graphs.eager_reason == ""
    assert all(any(node.op == "agentcompile.expert_linear.default" for node in graph.nodes) for graph in graphs.graphs)
    wanted, logits = greedy(model, PROMPT, CONTEXT - 12)
    found, own, _ = generate(model, graphs, PROMPT, CONTEXT - 12)
    assert found == wanted
    torch.testing.assert_close(own, logits, rtol=1e-4, atol=1e-4 * float(logits.std()))


class Mixture(nn.Module):
    """Experts of which the last ``idle`` have no matrices; ``change`` is what it does otherwise."""

    def __init__(self, experts: int, idle: int, slots: int, change: str = "") -> None:
        super().__init__()
        self.router = nn.Linear(8, experts + idle)
        self.up = nn.Parameter(torch.randn(experts, 16, 8))
        self.down = nn.Parameter(torch.randn(experts, 16, 8))
        self.experts, self.slots, self.change = experts, slots, change

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(self.slots)
        mask = F.one_hot(index, num_classes=self.router.out_features + (self.change == "room")).permute(2, 1, 0)
        total = torch.zeros_like(x)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            number = int(expert.item())
            slot, row = torch.where(mask[number])
            if row.numel() == 0:
                continue
            made = x[row]
            if number < self.experts:
                made = F.gelu(F.linear(made, self.up[number])) @ self.down[number]
            if self.change == "every other idle" and number % 2:
                made = made + 1
            if self.change == "in place":
                made.mul_(2)
            if self.change == "assigned":
                total[row] = total[row] + made * weights[row, slot, None]
            elif self.change == "by slot":
                total.index_add_(0, slot, made * weights[row, slot, None])
            else:
                total.index_add_(0, row, made * weights[row, slot, None])
        return total


def traced(module: nn.Module, x: Tensor) -> Any:
    with torch.no_grad(), Grouped():
        program = torch.export.export(module, (x,), strict=False)
    return program.module()


@pytest.mark.parametrize("everywhere", [False, True], ids=["chosen", "all"])
@pytest.mark.parametrize(("experts", "idle", "slots", "rows"), [(4, 0, 2, 1), (4, 0, 1, 9), (3, 3, 3, 7), (2, 5, 4, 6), (5, 1, 6, 3)])
def test_a_loop_over_experts(monkeypatch: pytest.MonkeyPatch, experts: int, idle: int, slots: int, rows: int, everywhere: bool) -> None:
    """``everywhere``: as where an accelerator multiplies every expert with all rows, which no row may ask for one expert twice."""
    if everywhere:
        monkeypatch.setattr(operators, "_one_by_one", lambda x, matrices, chosen, bias: operators._all_experts(x, matrices, chosen))
    torch.manual_seed(experts + 10 * idle + 100 * rows)
    module, x = Mixture(experts, idle, slots), torch.randn(rows, 8)
    run = traced(module, x)
    for given in (x, torch.randn(rows, 8)):
        torch.testing.assert_close(run(given), module(given), rtol=1e-5, atol=1e-5)


def test_a_mask_with_room_for_an_expert_that_is_none() -> None:
    """DBRX has one more column than experts: every row still reads its own experts' matrices at once."""
    module, x = Mixture(4, 0, 2, "room"), torch.randn(3, 8)
    run = traced(module, x)
    torch.testing.assert_close(run(x), module(x), rtol=1e-5, atol=1e-5)
    calls = [node for node in run.graph.nodes if "expert_linear" in str(node.target)]
    assert [tuple(node.meta["val"].shape) for node in calls] == [(3, 2, 16), (3, 2, 8)]


@pytest.mark.parametrize("change", ["assigned", "by slot", "every other idle", "in place"])
def test_what_is_not_added_up_row_by_row_is_refused(change: str) -> None:
    with pytest.raises(Unsupported, match="dispatches to its experts"):
        traced(Mixture(2, 4, 2, change), torch.randn(5, 8))


class Sorted(nn.Module):
    """Rows in the order of their experts; ``change`` is what it does otherwise."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.router, self.weight, self.change = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 6, 8)), change

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x).topk(2).indices
        counts = torch.zeros(x.shape[0], 4).scatter(1, index, 1).long().sum(0).tolist()
        order = index.flatten().sort(0).indices
        parts = list(x[order.div(2, rounding_mode="trunc")].split(counts, dim=0))
        if self.change == "a number":
            return x * counts[0]
        if self.change == "another's":
            parts = parts[::-1]
        made = [F.linear(part, self.weight[i]) for i, part in enumerate(parts)]
        if self.change == "not all":
            made = made[:3]
        return torch.zeros(2 * x.shape[0], 6).index_add(0, order, torch.cat(made, dim=0))


def test_rows_that_are_sorted_by_expert() -> None:
    torch.manual_seed(0)
    module, x = Sorted(), torch.randn(7, 8)
    run = traced(module, x)
    for given in (x, torch.randn(7, 8)):
        torch.testing.assert_close(run(given), module(given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("change", "why"), [("a number", "made from data"), ("another's", "dispatches"), ("not all", "dispatches")])
def test_parts_that_are_used_otherwise_are_refused(change: str, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        traced(Sorted(change), torch.randn(7, 8))
