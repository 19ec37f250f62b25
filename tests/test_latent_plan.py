"""Latent attention with a mixture of experts at its full size, planned without weights: what a layer becomes, and that schedules fit."""

from collections import Counter
from pathlib import Path

import torch
import transformers
from agentcompile_cuda_kit.targets import PRESETS

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.ir.plan import RegionPlan
from agentcompile_core.ops.aliasing import is_alias
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.stages import analyze, plan
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.store import Store

FOLDER = Path(__file__).parents[1] / "benchmarks" / "configs" / "deepseek-v2-lite"


def planned() -> tuple[RegionPlan, ...]:
    """The regions of a dense layer and of one with experts of DeepSeek-V2-Lite."""
    config = transformers.AutoConfig.from_pretrained(FOLDER, num_hidden_layers=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    graphs = capture_language_model(model.eval(), "deepseek_v2", Workload(dtype=DType.BF16, max_context=8192, prefill_chunks=(16,)))
    assert graphs.eager_reason == "" and graphs.kv is not None and (graphs.kv.head_dim, graphs.kv.value_dim) == (192, 128)
    ctx = Context(catalog=load_catalog(strict=True), target=PRESETS["h200"], config=Config(), store=Store(None))
    return plan.run(analyze.run(graphs, ctx), ctx)


def test_every_node_of_a_full_size_layer_is_behind_a_kernel_that_has_schedules() -> None:
    kinds: dict[str, Counter[str]] = {}
    for found in planned():
        matches = [found.region.match_by_id[name] for name in found.space.covers[0].matches]
        inside = {name for match in matches for name in match.nodes}
        assert [n.op for n in found.region.graph.nodes if n.name not in inside and not is_alias(found.region.graph, n)] == []
        kinds[found.region.name] = Counter(match.kind for match in matches)
        for match in matches:
            spaces = found.space.spaces_of(match.id)
            assert spaces and all(space.space.points for space in spaces), match.id
    layers = [found for found in kinds.values() if found["attention"]]
    casts = [found.pop("elementwise") - 1 for found in layers]
    assert casts[0] == 0 and casts[1] <= 1  # from transformers 5.24 on the router's weights are float32, and its input is cast alone
    around = {"rope": 2, "attention": 1}
    assert layers == [{"linear": 5, **around}, {"linear": 6, "expert_linear": 2, **around}]
