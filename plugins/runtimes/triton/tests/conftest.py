"""Kernels run by Triton's interpreter where there is no GPU, compiled where there is one, and not at all where Triton is not installed."""

import os

import pytest
from agentcompile_runtime_triton import package


def pytest_configure(config: pytest.Config) -> None:
    import torch

    config.addinivalue_line("markers", "device: needs a CUDA device")
    if not torch.cuda.is_available():  # before Triton is imported: it decides there and then what its decorators make
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("device"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def is_interpreted() -> bool:
    """Whether the kernels run on the host. Imports Triton."""
    from agentcompile_runtime_triton import kernels

    return type(kernels.rms_norm).__name__ == "InterpretedFunction"


@pytest.fixture
def interpreted() -> None:
    """Skips what needs CPU tensors where kernels do not take them."""
    if not package.is_installed():
        pytest.skip("triton is not installed")
    if not is_interpreted():
        pytest.skip("Triton compiles for the GPU in this process; TRITON_INTERPRET=1 has it interpret on the host")


@pytest.fixture
def compiled() -> None:
    """Skips what needs a GPU where kernels are not compiled for it."""
    if not package.is_installed():
        pytest.skip("triton is not installed")
    if is_interpreted():
        pytest.skip("Triton interprets on the host in this process (TRITON_INTERPRET=1)")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton and a GPU were there: what is accepted is asked without running anything."""
    monkeypatch.setattr(package, "is_installed", lambda: True)
    monkeypatch.setattr(package, "has_device", lambda: True)
