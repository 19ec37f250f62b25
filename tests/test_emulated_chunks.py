"""Prompt chunks through the kernels of rows, emulated, between captured pieces: half precision as near to fp32 as the framework's."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.rows import RowKernels
from agentcompile_runtime_cudagraph import CudaGraphRuntime
from attrs import evolve
from capture_models import GPT, SIZES, WINDOWED, tiny
from test_live_prefill import prompt_of
from torch import Tensor, nn

from agentcompile_core.ir.graph import DType, GraphSet, Workload
from agentcompile_core.ops import live_attention
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import Heads
from agentcompile_core.runtime.built_in import PlainKVCache
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.testing.doubles import ReplayingBackend

SMALL, LARGE, CONTEXT = 4, 16, 60
LENGTHS = (1, SMALL + 1, LARGE, 2 * LARGE + 3, CONTEXT - 1, 7)
WIDE = {"hidden_size": 64, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {"qwen3": {**SIZES, **WIDE}, "llama": {**SIZES, **WIDE}, "gemma2": {**WINDOWED, **WIDE},
                                     "qwen3_moe": {**SIZES, **WIDE, "num_experts": 4, "num_experts_per_tok": 2,
                                                   "moe_intermediate_size": 32},
                                     "cohere2": {**SIZES, **WIDE}, "ernie4_5": {**SIZES, **WIDE}, "glm": {**SIZES, **WIDE, "head_dim": 32},
                                     "phi3": {**SIZES, **WIDE, "pad_token_id": 0},
                                     "gpt2": {**GPT, "n_embd": 64}, "starcoder2": {**SIZES, **WIDE}}
PAIRED = ("cohere2", "ernie4_5", "glm")  # their rotations turn neighbours, in float32 between casts but for GLM's, of half a head
LAYERED = ("gpt2", "starcoder2")  # layer norms with biases; Cohere's have none
# Few multiprocessors: blocks have several columns each, of both schedules and not all as many, and there are fewer blocks to emulate.
TARGET = evolve(preset("h200"), sm_count=5)


class Emulated(ReplayingBackend):
    """Kernels of rows on the CPU; attention by the operator's formula."""

    def __init__(self) -> None:
        super().__init__()
        emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
        self.rows = RowKernels(emulation, lambda: TARGET, lambda: False)

    def body(self, *ops: str) -> Callable[..., Any] | None:
        return self.rows.body(*ops)

    def place(self, heads: Sequence[Heads]) -> bool:
        return self.rows.place(heads)


def captured(model: nn.Module, name: str, dtype: DType) -> GraphSet:
    graphs = capture_language_model(model, name, Workload(dtype=dtype, max_context=CONTEXT, prefill_chunks=(SMALL, LARGE)))
    assert graphs.graphs, graphs.eager_reason
    return graphs


def logits_of(model: nn.Module, graphs: GraphSet, backend: ReplayingBackend) -> list[Tensor]:
    assert graphs.kv is not None
    programs, cache = {g.name: framework_program(g) for g in graphs.graphs}, PlainKVCache().allocate(graphs.kv, "cpu")
    mine = Session(graphs, programs, WeightStore(model, "cpu"), Executables(device="cpu", backend=backend), kv_state=cache,
                   decode=CudaGraphRuntime())
    mine.prepare()
    with torch.inference_mode():
        return [mine.prefill(prompt_of(length)).output(0)[0, -1].float() for length in LENGTHS]


@pytest.mark.parametrize("name, dtype", [("qwen3", DType.F16), ("qwen3", DType.BF16), ("llama", DType.BF16), ("gemma2", DType.F16),
                                         ("qwen3_moe", DType.F16), *((name, DType.BF16) for name in (*PAIRED, *LAYERED, "phi3"))])
def test_prompts_of_any_length_are_as_near_as_the_frameworks(name: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_attention, "LARGE", LARGE)
    model, backend = tiny(name, MODELS[name], getattr(torch, dtype.value)), Emulated()
    wide = tiny(name, MODELS[name])
    wide.load_state_dict({key: tensor.float() for key, tensor in model.state_dict().items()})
    graphs = captured(model, name, dtype)
    found, beside = (logits_of(model, graphs, by) for by in (backend, ReplayingBackend()))
    with torch.inference_mode():
        wanted = [wide(prompt_of(length), use_cache=False).logits[0, -1] for length in LENGTHS]
    for ours, theirs, right in zip(found, beside, wanted, strict=True):
        errors = [(one - right).square().mean().sqrt() for one in (ours, theirs)]
        assert float(errors[0]) <= 1.5 * float(errors[1]) + 1e-3 * float(right.std())
    used = {key[0]: served for key, served in backend.rows._served.items()}
    if name in (*PAIRED, *LAYERED):
        assert used["place_heads"] and used["add_norm_rows"] and not used.keys() & {"rope_rows"}
        return
    wanted_kernels = {"norm_rows_warp", "add_norm_rows", "place_heads", "skinny_rows"}
    wanted_kernels |= {"gate_rows", "expert_rows", "weigh_rows"} if name == "qwen3_moe" else {"gate_rows", "gated_rows"}
    assert used == dict.fromkeys(wanted_kernels, True)
