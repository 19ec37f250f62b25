"""Options and fixtures of the core's tests."""

import importlib.util
import os
from pathlib import Path

import pytest

# One deterministic profile for every property test: same examples on every machine, no database, no deadline.
try:
    from hypothesis import settings

    settings.register_profile("agentcompile", derandomize=True, database=None, deadline=None, max_examples=25)
    settings.load_profile("agentcompile")
except ImportError:  # static tests run without hypothesis
    pass


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-golden``: write the golden files instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code makes now")


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """``golden(name, text)``: compare ``text`` with tests/golden/<name>, or write it under ``--update-golden``."""
    folder = Path(__file__).parent / "golden"

    def check(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--update-golden"):
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {name}; run pytest with --update-golden and review what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"golden file {name} differs; if it should, use --update-golden"

    return check


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run strict: a failure that a run would survive is raised (architecture, section 6)."""
    monkeypatch.setenv("AGENTCOMPILE_STRICT", os.environ.get("AGENTCOMPILE_STRICT", "1"))


@pytest.fixture(scope="session")
def decode_graphs():
    """The module ``decode_graphs``: hand-built decode graphs and what match kinds mean."""
    path = Path(__file__).parent / "decode_graphs.py"
    spec = importlib.util.spec_from_file_location("decode_graphs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
