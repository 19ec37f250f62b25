"""Kernels whose addresses stood between the launch and their first request keep the lengths that docs/performance.md tells of (sm_90a)."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import attention_case, gated_case

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType, Match

spec = importlib.util.spec_from_file_location("compare_machine_code",
                                              Path(__file__).resolve().parent.parent / "scripts" / "compare_machine_code.py")
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)

LAYER = {"heads": (16, 8), "head_dim": 128, "capacity": 8192}
STAGED = {"path": "staged", "warps": 4, "unroll": 2, "splits": 16, "merge": "message", "early_kv": True}
RING = {"path": "ring", "warps": 8, "rows": 1, "columns": 768, "stages": 4, "in_flight": 2, "static_groups": None}


@pytest.mark.compile
@pytest.mark.parametrize(("family", "match", "wanted", "most"), [
    ("attention", attention_case(**LAYER, rope="rms")[0], STAGED, 2200),  # 3,296 where each copy worked out its own place
    ("attention", attention_case(**LAYER, rope="rms", dtype=DType.BF16)[0], STAGED, 2300),
    ("gemv", gated_case(n=8960, k=1536, norm="rms", dtype=DType.BF16)[0], RING, 680),  # 720 where a norm rounded one by one
], ids=["attention_fp16", "attention_bf16", "gate_bf16"])
def test_machine_code_is_as_short_as_it_was_made(family: str, match: Match, wanted: dict[str, Any], most: int) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset("h200")
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    template = next(one for one in load_catalog(strict=False).template_families.values() if one.name == family)
    point = next(p for p in template.space(match, target).points if all(dict(p.items).get(name) == value for name, value in wanted.items()))
    assert 0 < compare.code_of(backend.build(template.lower(match, point, target), target).binary)["instructions"] <= most
