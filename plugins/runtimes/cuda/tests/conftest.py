"""Device tests run wherever a CUDA device is, and only there. Modules of this folder can be imported by its tests."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    for line in ("device: needs a CUDA device", "compile: needs NVRTC or nvcc"):
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("device"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="module")
def young_heap() -> Iterator[None]:
    """Collections look at what is made from now on, not at the millions of objects that other tests of the process have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
