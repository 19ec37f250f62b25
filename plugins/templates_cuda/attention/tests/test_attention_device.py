"""The attention kernels on a GPU, clusters included: against fp64, repeated, and over a growing cache."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from agentcompile_templates_cuda_attention import AttentionFamily

from agentcompile_core.plugin_api import DType, Schedule, StepSource, argument_values

pytest.importorskip("agentcompile_validator_emulation")
sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from attention_cases import Model

pytestmark = pytest.mark.device
FAMILY = AttentionFamily()
MODELS = {
    "qwen": Model(kv_heads=8, head_dim=128, rotary_dim=128, capacity=700),
    "llama_1b": Model(kv_heads=8, group=4, norm="none", capacity=700),
    "bf16_all": Model(dtype=DType.BF16, kv_heads=4, group=3, head_dim=128, rotary_dim=128, capacity=700, window=300, softcap=3.0,
                      sinks=True),
    "starcoder": Model(dtype=DType.BF16, kv_heads=2, group=12, head_dim=128, rotary_dim=128, norm="none", capacity=700),
    "multi_query": Model(kv_heads=1, group=71, rotary_dim=0, norm="none", capacity=300, sinks=True),
    "pairs": Model(dtype=DType.BF16, kv_heads=8, group=4, head_dim=128, rotary_dim=64, norm="none", capacity=700, interleaved=True),
    "f32": Model(dtype=DType.F32, kv_heads=4, head_dim=128, rotary_dim=128, capacity=300),
    # Splits of long caches all have work: 64 a KV head in the last positions, merged in teams.
    "few_kv_heads": Model(dtype=DType.BF16, kv_heads=2, group=6, head_dim=128, rotary_dim=128, norm="none", capacity=9000),
    "narrow_and_long": Model(kv_heads=8, group=4, norm="none", capacity=5000),
}


def _runner(source: StepSource) -> Callable[[dict[str, torch.Tensor]], None]:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = backend.live_target()
    handle = backend.load(backend.build(source, target))
    spaces = {w.name: torch.zeros(w.nbytes, dtype=torch.uint8, device="cuda") for w in source.workspaces}

    def run(tensors: dict[str, torch.Tensor]) -> None:
        for launch in source.launches:
            addresses = {name: tensor.data_ptr() for name, tensor in {**spaces, **tensors}.items()}
            backend.prepare_launch(handle, launch, argument_values(launch, addresses), False)(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert not spaces["counters"].any()

    return run


def _points(model: Model) -> list[Schedule]:
    """Every fourth schedule of the live target's space: both paths, every way to merge."""
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = backend.live_target()
    if target is None:
        pytest.skip("there is no GPU")
    return [*FAMILY.space(model.match(), target).points][::4]


@pytest.mark.parametrize("name", MODELS)
def test_every_schedule_is_within_budget_and_repeats(name: str) -> None:
    model = MODELS[name]
    target = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend().live_target()
    for number, point in enumerate(_points(model)):
        source = FAMILY.lower(model.match(), point, target)
        run = _runner(source)
        for position in (0, 17, 127, 128, 255, model.capacity * 2 // 5, model.capacity - 1):
            before = model.draw(position, number)
            tensors = {key: value.cuda() for key, value in before.items()}
            run(tensors)
            after = {key: value.cpu() for key, value in tensors.items()}
            assert model.use(after, before, source.reduction_depth) <= 1.0, (str(point), position)
            first = tensors["out"].clone()
            tensors["out"].fill_(float("nan"))
            run(tensors)
            assert torch.equal(tensors["out"], first), (str(point), position)
