"""Norms that models write out: one launch each with what is computed of them, and as few launches per layer as there were."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.norm import NormRule
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_capture_collapse import FORMS, WAYS, Norm
from test_half_precision import BY_NAME
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.modules import capture_module, load_module
from agentcompile_core.testing.matching import matched

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_templates_cuda_norm import NormFamily
from emulated_cases import within_its_budget

H200 = preset("h200")
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0}
PLAIN = 5  # Q, K, V in one; attention with all before it; its output with the residual; gate and up; down with the residual
POST_NORMS = 2  # a norm behind attention and one behind the MLP need the whole row that many blocks made; each takes its residual in
WHOLE_ROWS = 1  # norms of Q and K over all heads: both in one launch
LAUNCHES = {
    "llama": PLAIN, "mistral": PLAIN, "qwen2": PLAIN, "qwen3": PLAIN, "phi3": PLAIN, "starcoder2": PLAIN, "gemma": PLAIN,
    "granite": PLAIN,  # its multipliers are in the epilogues
    "olmo": PLAIN,  # norms without weights, between two casts
    "gemma2": PLAIN + POST_NORMS, "gemma3_text": PLAIN + POST_NORMS, "olmo2": PLAIN + POST_NORMS + WHOLE_ROWS,
}


@pytest.fixture(scope="module")
def plans() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        from covered import plans

        yield plans
    finally:
        sys.path[:] = before


def planned(plans: Any, model_type: str, layers: int) -> dict[str, Any]:
    config = transformers.CONFIG_MAPPING[model_type](**SIZES, num_hidden_layers=layers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    graphs = capture_language_model(model, model_type, Workload(dtype=DType.BF16, max_context=64, prefill_chunks=()))
    found: dict[str, Any] = plans.planned(graphs, plans.context("cuda/h200"))
    return found


@pytest.mark.parametrize("model_type", LAUNCHES)
def test_a_layer_takes_no_more_launches_than_its_kernels_need(model_type: str, plans: Any) -> None:
    few, more = (planned(plans, model_type, layers) for layers in (1, 3))
    assert not more["framework_operators"]
    assert sum(more["kernels"].values()) - sum(few["kernels"].values()) <= 2 * LAUNCHES[model_type]
    assert sum(more["kernels"].values()) <= 3 * LAUNCHES[model_type] + 6  # of the token, the embedding, the head


class Around(nn.Module):
    """A norm of x and what is computed of it with y, or a norm of y beside it."""

    def __init__(self, norm: Norm, other: Norm, behind: str) -> None:
        super().__init__()
        self.norm, self.other, self.behind = norm, other, behind

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.behind == "beside":
            return self.norm(x), self.other(y)
        if self.behind == "before":
            added = x + y
            return self.norm(added), added
        normal = self.norm(x)
        return {"": lambda: (normal, y), "added": lambda: y + normal, "scaled": lambda: y + 0.25 * normal,
                "gated": lambda: F.silu(normal) * y}[self.behind]()


@settings(max_examples=24, derandomize=True, database=None, deadline=None, phases=(Phase.generate,),
          suppress_health_check=list(HealthCheck))
@given(form=st.sampled_from([form for form in FORMS if form != "bare"]), way=WAYS, dtype=st.sampled_from([torch.bfloat16, torch.float16]),
       behind=st.sampled_from(["", "added", "scaled", "gated", "before", "beside"]), rows=st.integers(1, 3),
       width=st.sampled_from([24, 40, 333]), wide_weight=st.booleans(), seed=st.integers(0, 99))
def test_a_norm_and_what_is_around_it_is_one_kernel_within_its_budget(
    form: str, way: dict[str, Any], dtype: torch.dtype, behind: str, rows: int, width: int, wide_weight: bool, seed: int
) -> None:
    """In every case that a candidate is tried on, of what the framework computes and of what the kernel does, emulated."""
    if form == "one_plus":
        way = {**way, "cast": True}  # else 1 + w is rounded: another function
    if form == "layer":
        behind = "" if behind == "beside" else behind
    norms = [Norm(form, width, **way).to(torch.float32 if wide_weight and form in ("once", "one_plus") else dtype) for _ in range(2)]
    x, y = (torch.randn(rows, width).to(dtype) for _ in range(2))
    loaded = load_module(Around(*norms, behind).eval(), (x, y), dtype=None, device="cpu")
    (whole,) = capture_module(loaded, Workload(dtype=DType.F32, max_context=1)).graphs
    match, graph = matched(NormRule(), whole)
    assert len(graph.nodes) == len(whole.nodes)
    within_its_budget(NormFamily(), BY_NAME["norm"], match, graph, H200, point=seed % 2, seed=seed)
