"""What tests of kernels of rows share: the kernels, emulated, and numbers."""

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.rows import RowKernels
from hypothesis import settings

from agentcompile_core.plugin.discovery import load_catalog

HALVES = (torch.float16, torch.bfloat16)
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=40)


@pytest.fixture(scope="module")
def rows() -> RowKernels:
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    return RowKernels(emulation, lambda: preset("h200"), lambda: False)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found: torch.Tensor | None, wanted: torch.Tensor) -> None:
    """At most a unit in the last place apart, by the order of a sum or the exponential of another library."""
    assert found is not None and found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1.01 * torch.finfo(wanted.dtype).eps, atol=1e-6)
