"""Options and fixtures of the core's tests."""

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# One deterministic profile for every property test: same examples on every machine, no database, no deadline.
try:
    from hypothesis import settings

    settings.register_profile("agentcompile", derandomize=True, database=None, deadline=None, max_examples=25)
    settings.load_profile("agentcompile")
except ImportError:  # static tests run without hypothesis
    pass


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-golden``: write the golden files (of plugins) instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files from what the code makes now")


# Looking for garbage among what was imported, again and again, was a sixteenth of all the time, and looking behind every single export a
# twentieth of what captures take.
gc.set_threshold(500_000, 10, 10)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that hold a test marked ``slow`` come first, so that none of them runs alone at the end (``--no-loadscope-reorder``)."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there by now stays, and is not looked at any more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _kept_fork_servers() -> Iterator[None]:
    """What workers are forked from stays for the next test that wants the same; imports took a tenth of all the time."""
    from agentcompile_core.processes.fork_server import keeping

    with keeping():
        yield


@pytest.fixture(scope="session", autouse=True)
def asked_whether_frozen() -> Iterator[Callable[[], bool]]:
    """What was frozen above stays so, and no compile walks over all of it to find that out. Gives what would."""
    from agentcompile_core import garbage

    with pytest.MonkeyPatch.context() as patch:
        asking = garbage.is_frozen
        patch.setattr(garbage, "is_frozen", lambda: True)
        yield asking


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run strict: a failure that a run would survive is raised (architecture, section 6)."""
    monkeypatch.setenv("AGENTCOMPILE_STRICT", os.environ.get("AGENTCOMPILE_STRICT", "1"))


@pytest.fixture(autouse=True)
def _no_configuration_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer configured for themselves changes no test."""
    monkeypatch.setenv("AGENTCOMPILE_CONFIG", os.environ.get("AGENTCOMPILE_CONFIG", ""))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list:
    """Every job that a worker judges in this process."""
    from agentcompile_core.worker.evaluate import WorkerState

    jobs: list = []
    real = WorkerState.evaluate

    def evaluate(self, job, kernel, phase):
        jobs.append(job)
        return real(self, job, kernel, phase)

    monkeypatch.setattr(WorkerState, "evaluate", evaluate)
    return jobs


@pytest.fixture(scope="module")
def bench() -> Iterator[Callable[[str], Any]]:
    """The modules of ``benchmarks`` by name."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    before, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]


@pytest.fixture(scope="session")
def decode_graphs():
    """The module ``decode_graphs``: hand-built decode graphs and what match kinds mean."""
    path = Path(__file__).parent / "decode_graphs.py"
    spec = importlib.util.spec_from_file_location("decode_graphs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"


@pytest.fixture(scope="session")
def cli():
    """``cli(*arguments)``: run the command line in this process; returns (exit code, standard output, standard error)."""
    import contextlib
    import io

    import transformers

    from agentcompile_core.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        transformers.logging.set_verbosity_error()  # as in a process of its own, whatever was imported before
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main([str(a) for a in arguments])
            except SystemExit as exc:  # argparse
                code = int(exc.code or 0)
        return code, out.getvalue(), err.getvalue()

    return run


def of_all_processes(factory: pytest.TempPathFactory) -> Path:
    """The folder that the processes of a run share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="module")
def shared_captures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the module compiles is traced once in a run for all modules that ask for this; it is compared with its model every time.

    For tests of what lies behind a capture: the trace of the tiny model alone takes as long as all the rest of many of them.
    """
    from shared_captures import captured_once

    from agentcompile_core.stages import capture

    folder = of_all_processes(tmp_path_factory) / "captures"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "_captured", captured_once(folder, capture._captured))
        yield


@pytest.fixture(scope="session")
def tiny_compiled(cli, tmp_path_factory: pytest.TempPathFactory):
    """(bundle folder, the document that ``compile --json`` printed) of the tiny model in fp32, built for sm_90 without a GPU.

    Compiled once for all processes of a run.
    """
    import json

    from filelock import FileLock

    root = of_all_processes(tmp_path_factory)
    folder, printed = root / "tiny.bundle", root / "tiny.json"
    with FileLock(root / "tiny.lock"):
        if not printed.exists():
            code, out, err = cli("compile", TINY, "--device", "cpu", "--target", "h200", "--dtype", "float32", "--context", 256,
                                 "--budget-plans", 12, "--rounds", 1, "--budget-s", 240, "--no-cache", "--out", folder, "--json")
            assert code == 0, err
            printed.write_text(out, encoding="utf-8")
    return folder, json.loads(printed.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def tiny_bundle(tiny_compiled) -> Path:
    """The bundle folder of ``tiny_compiled``; do not change it."""
    return tiny_compiled[0]


@pytest.fixture(scope="module")
def emulated_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three layers of the tiny model in fp32 through emulated kernels, for one module; for all modules of a run they are judged once.

    A layer, the one behind it and a last one, and a quarter of the tokens: more of them only take time whenever a step is emulated.
    """
    import torch
    import transformers
    from filelock import FileLock

    import agentcompile_core as ac
    from agentcompile_core.configuration import Config
    from agentcompile_core.store import Store

    root = of_all_processes(tmp_path_factory)
    config = Config(device="cpu", backend="emulation", budget_s=60.0, budget_plans=24, rounds=1, origins=("generated",))
    short = transformers.AutoModelForCausalLM.from_pretrained(TINY, num_hidden_layers=3, dtype=torch.float32)
    short.resize_token_embeddings(short.config.vocab_size // 4)
    with FileLock(root / "emulated.lock"):
        model = ac.compile(short, max_context=64, config=config, store=Store(root / "emulated"), run_on="emulation")
    yield model
    model.context.close()
