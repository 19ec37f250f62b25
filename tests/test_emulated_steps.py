"""Steps of models with states through the device's own kernels, emulated: HuggingFace's tokens, and states that are written in place."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.rows import RowKernels
from capture_models import TOKENS, tiny

from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.ops.operator_names import CONVOLUTION, COPY, RECURRENCE
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.testing.doubles import ReplayingBackend

NEW, SIZES = 6, {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, **TOKENS}
MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {**SIZES, "state_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4},
    "mamba": {**SIZES, "state_size": 16},
    "lfm2": {**SIZES, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
             "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
}


class Emulated(ReplayingBackend):
    """Kernels of rows on the CPU; how often a state was written in place, by operator."""

    def __init__(self) -> None:
        super().__init__()
        emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
        self.rows, self.in_place = RowKernels(emulation, lambda: preset("h200"), lambda: False), Counter[str]()

    def body(self, *ops: str) -> Callable[..., Any] | None:
        found = self.rows.body(*ops)
        if found is None or ops[-1] != COPY:
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            self.in_place[ops[0]] += result is not None
            return result

        return counted


@pytest.mark.parametrize("model_type", MODELS)
def test_states_are_written_in_place_and_tokens_are_hugging_faces(model_type: str) -> None:
    """Of several requests of one session, in float32."""
    model, backend = tiny(model_type, MODELS[model_type]), Emulated()
    graphs = capture_language_model(model, model_type, Workload(dtype=DType.F32, max_context=40, prefill_chunks=(8,)))
    assert graphs.graphs and graphs.kv is not None, graphs.eager_reason
    mine = Session(graphs, {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model, "cpu"),
                   Executables(device="cpu", backend=backend), kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=PythonLoop())
    generator = torch.Generator().manual_seed(1)
    for length in (1, 5, 8, 19):
        prompt = torch.randint(3, 61, (1, length), generator=generator)
        wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        assert torch.equal(mine.generate(prompt, NEW), wanted), length
    layers, steps = 1 if model_type == "lfm2" else 2, 4 * (NEW - 1)
    expected = {CONVOLUTION} if model_type == "lfm2" else {CONVOLUTION, RECURRENCE}
    assert all(backend.in_place[op] >= layers * steps - layers for op in expected), backend.in_place
