"""Device tests run wherever a CUDA device is, and only there."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    for line in ("device: needs a CUDA device", "compile: needs NVRTC or nvcc"):
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("device"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
