"""Captures that tests share are those of equal models alone, whoever made them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from attrs import evolve
from capture_models import SIZES, WORKLOAD, tiny
from shared_captures import captured_once

from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.stages.capture.language_model import capture_language_model


def test_a_model_is_traced_once_for_all_who_share_the_folder_and_another_one_is_traced(tmp_path: Path) -> None:
    traced: list[Any] = []

    def trace(loaded: LoadedModel, workload: Any, *_: object) -> Any:
        traced.append((loaded.module, workload))
        return capture_language_model(loaded.module, loaded.name, workload)

    def asked(module: Any, workload: Any = WORKLOAD) -> Any:
        """By another process: nothing is known but what the folder holds."""
        return captured_once(tmp_path, trace)(LoadedModel(module=module, name="m"), workload, SimpleNamespace(), None)

    one, other = (tiny("qwen3", SIZES) for _ in range(2))
    assert asked(one) == asked(other) and [module for module, _ in traced] == [one]
    longer, changed = evolve(WORKLOAD, max_context=24), tiny("qwen3", SIZES)
    changed.model.norm.register_forward_hook(lambda module, given, result: torch.neg(result))
    assert asked(one, longer).workload == longer and asked(changed) != asked(one) and len(traced) == 3
    assert len(list(tmp_path.iterdir())) == 3, "no half of a file is left"
