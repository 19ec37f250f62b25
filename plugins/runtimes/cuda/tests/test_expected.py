"""What prompts of most models need is being built before they are read: nothing else is built when they are."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda import own_kernels
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.gates import GATES
from row_cases import HALVES
from row_cases import rows as rows

from agentcompile_core.ops import operators  # noqa: F401  registers what the framework computes
from agentcompile_core.plugin_api import DType, operator_names


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of what was begun or asked for, in order."""
    found: list[str] = []
    build_once = own_kernels.build_once

    def noted(backend: Any, source: Any, target: Any) -> Any:
        found.append(source.digest)
        return build_once(backend, source, target)

    monkeypatch.setattr(own_kernels, "build_once", noted)
    return found


@pytest.mark.parametrize("dtype", HALVES)
def test_what_was_begun_is_what_prompts_ask_for(rows: Any, begun: list[str], dtype: torch.dtype) -> None:
    rows.start(torch.empty(0, dtype=dtype))
    ahead = set(begun)
    begun.clear()
    x, weight, square = (torch.ones(*size, dtype=dtype) for size in ((1, 3, 64), (64,), (64, 64)))
    assert rows.body(operator_names.RMS_NORM)(x, weight, 1e-6) is not None
    few_rows = rows.body(operator_names.LINEAR)
    made = [few_rows(torch.ones(1, count, 64, dtype=dtype), square) for count in (2, 3, 8)]
    assert any(one is not None for one in made)
    assert len(set(begun)) > 1 and set(begun) <= ahead


def test_nothing_of_half_precision_is_begun_for_float32(rows: Any, begun: list[str]) -> None:
    rows.start(torch.empty(0))
    assert set(begun) == {rows._kernels._of(torch.empty(0)).digest}


def test_the_backend_begins_at_once_and_only_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, begun, never = CudaBackend(), list[tuple[str, str]](), Future[Any]()
    monkeypatch.setattr(own_kernels, "build_once", lambda backend, source, target: begun.append((source.digest, target.name)) or never)
    monkeypatch.setattr(CudaBackend, "device", "cpu")
    backend.expect(DType.F16)
    assert not begun
    monkeypatch.setattr(CudaBackend, "live_target", lambda self: preset("h200"))
    made = CudaBackend()
    made.expect(DType.F16)
    made.expect(DType.BF16)
    assert len(begun) == len(set(begun)) and {name for _, name in begun} == {"h200"}
    one = made._rows._product._kernels[GATES[0]]._of(torch.empty(0, dtype=torch.float16)).digest
    heads = {kernels._of(torch.empty(0, dtype=torch.bfloat16)).digest for kernels in made._rows._others[0].__self__._kernels.values()}
    assert one in dict(begun) and heads <= set(dict(begun))
    assert len(heads) == 4, "of 64 and of 128 channels, each in both of its shapes"
