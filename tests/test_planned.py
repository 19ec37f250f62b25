"""Planning types at their real sizes: shares of a plan, what is planned for, rows that are kept, and capture of what it needs."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, GraphKind, Workload
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.modules import capture_module, load_module

ROOT = Path(__file__).parents[1]
ONCE = Workload(dtype=DType.F32, max_context=1)


@pytest.fixture(scope="module")
def planned() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import planned

        yield planned
    finally:
        sys.path[:] = before


class Repeated(nn.Module):
    """Two attentions that read one mask, which was repeated for them."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        mask = (seen > 0).view(2, 1, 1, 5).expand(2, 1, 5, 5)
        first = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return F.scaled_dot_product_attention(first, x, x, attn_mask=mask)


def test_every_operator_of_two_masked_attentions_is_planned(planned: Any) -> None:
    graphs = capture_module(load_module(Repeated(), (torch.randn(2, 4, 5, 8), torch.ones(2, 5)), dtype=None, device="cpu"), ONCE)
    (graph,) = graphs.graphs
    assert graph.kind is GraphKind.FORWARD and not [node for node in graph.nodes if node.kind == "expand"]
    found = planned.plans.planned(graphs, planned.plans.context("cuda/h200"))
    assert found["kernels"] == {"masked_attention": 2} and 0.9 < found["share"] < 1.0
    assert set(found["framework_operators"]) == {"aten.gt.Scalar"}


def test_a_type_is_planned_at_the_size_of_its_class_or_says_why_not(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = planned.plans.context("cuda/h200")
    monkeypatch.setattr(planned.plans, "REAL", {"llama": {"num_hidden_layers": 1}, "gpt2": {"n_head": 5}})
    row = planned.plans.row_of("llama", ctx)
    assert row["share"] > 0.999 and row["reason"] == "" and row["parameters"] > 400e6
    assert row["bytes"] > 2 * (row["parameters"] - 32000 * 4096)  # all but the embedding
    refused = planned.plans.row_of("gpt2", ctx)  # a width of 768 has no five heads
    assert refused["share"] == 0.0 and refused["reason"].startswith("ValueError: ")


def test_attention_of_more_query_heads_than_a_fragment_holds_is_planned(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve query heads per KV head at their real size, and the 71 of one KV head of a falcon."""
    ctx = planned.plans.context("cuda/h200")
    monkeypatch.setattr(planned.plans, "REAL", {"starcoder2": {"num_hidden_layers": 1}})
    rows = [planned.plans.row_of("starcoder2", ctx)]
    sizes = {"vocab_size": 128, "hidden_size": 71 * 16, "num_hidden_layers": 1, "num_attention_heads": 71, "ffn_hidden_size": 48}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, multi_query=True, bos_token_id=1, eos_token_id=2)).eval()
    graphs = capture_language_model(falcon, "falcon", Workload(dtype=DType.F32, max_context=64, prefill_chunks=()))
    rows.append(planned.plans.planned(graphs, ctx))
    assert [(row["kernels"]["attention"], row["framework_operators"]) for row in rows] == [(1, {})] * 2


@pytest.mark.parametrize(("limit", "planned_for"), [(512, 512), (4096, 4096), (131072, 4096)])
def test_no_more_positions_are_planned_for_than_a_type_allows(planned: Any, limit: int, planned_for: int) -> None:
    assert planned.plans.context_of(transformers.LlamaConfig(max_position_embeddings=limit)) == planned_for


def test_shards_share_the_types_and_rows_are_kept(planned: Any, tmp_path: Path) -> None:
    parts = [planned.chosen(Namespace(only="", all=False, shard=f"{i}/3")) for i in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(planned.chosen(Namespace(only="", all=False, shard="1/1")))
    for share in (0.5, 1.0):
        planned.write([{"name": "b", "share": share}], tmp_path, "c0ffee0")
    planned.write([{"name": "a", "share": 0.98}], tmp_path, "beef00d")
    document = json.loads((tmp_path / "planned.json").read_text())
    assert [(row["name"], row["share"], row["commit"]) for row in document["rows"]] == [("a", 0.98, "beef00d"), ("b", 1.0, "c0ffee0")]
    assert document["planned"] == 2
