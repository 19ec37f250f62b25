"""The hand-built decode graphs that the core's tests use as well."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def decode_graphs() -> ModuleType:
    """The module ``decode_graphs`` of the repository's tests."""
    path = Path(__file__).parents[4] / "tests" / "decode_graphs.py"
    spec = importlib.util.spec_from_file_location("decode_graphs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
