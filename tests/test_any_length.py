"""HuggingFace's own model runs where no library prepares itself for each length; compiled steps do not ask for that."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from agentcompile_cuda_kit.targets import preset
from capture_models import GPT, tiny
from torch.nn.modules.module import register_module_forward_pre_hook

import agentcompile_core as ac
from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.runtime.framework_session import EagerSession
from agentcompile_core.runtime.generation import module_prompt
from agentcompile_core.runtime.generation.request import Asked
from agentcompile_core.runtime.session import Session
from agentcompile_core.stages import capture
from agentcompile_core.stages.capture.frontends import LiveModelFrontend
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import ReplayingBackend

PROMPT = torch.tensor([[5, 17, 99, 3, 42]])
QUICK: dict[str, Any] = {"device": "cpu", "run_on": "framework", "store": Store(None), "validators": [], "origins": []}
WHOLE, STEPS, BEAMS = {"output_hidden_states": True, "return_dict_in_generate": True}, {}, {"num_beams": 2}


class Noting(ReplayingBackend):
    """Counts its blocks of any length; ``opened``: those that somebody is in."""

    name = "noting"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.opened = 0

    @contextmanager
    def any_length(self) -> Iterator[None]:
        self.blocks, self.opened = self.blocks + 1, self.opened + 1
        try:
            yield
        finally:
            self.opened -= 1


@contextmanager
def seen(model: torch.nn.Module, backend: Noting) -> Iterator[list[bool]]:
    """Of each forward of ``model`` in here whether it ran in a block of ``backend``."""
    found: list[bool] = []
    def look(module: Any, _: Any) -> None:
        found.extend([backend.opened > 0] if module is model else [])

    look.__module__ = "torch.looking_on"  # as torch's own tools: anybody else's hook would be a change of the model
    hook = register_module_forward_pre_hook(look)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found
    hook.remove()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noting:
    """The backend of every session."""
    backend = Noting()
    monkeypatch.setattr(Session, "backend", backend)
    return backend


@pytest.mark.parametrize(("asked", "by_the_model"), [(WHOLE, True), (STEPS, False), (BEAMS, False)], ids=["model", "steps", "beams"])
def test_what_the_model_itself_runs_is_at_any_length(noted: Noting, asked: dict[str, Any], by_the_model: bool) -> None:
    model = tiny("gpt2", GPT)
    mine = ac.compile(model, max_context=64, **QUICK)
    noted.blocks = 0
    with seen(model, noted) as found:
        mine.generate(PROMPT, 4, **asked)
    assert found == [True] * 4 * by_the_model and noted.blocks == by_the_model and not noted.opened


@pytest.mark.parametrize("loop", ["ours", "custom_generate"])
def test_a_prompt_that_the_model_itself_reads_is_at_any_length(noted: Noting, monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    from covered import composite

    model = composite.tiny("gemma3")
    mine, prompt = ac.compile(model, max_context=96, **QUICK), composite.image_prompt(model)
    steps = mine.session._steps["decode"]
    opened: list[bool] = []
    monkeypatch.setitem(mine.session._steps, "decode", lambda: (opened.append(noted.opened > 0), steps()))
    noted.blocks = 0
    with seen(model, noted) as found:
        if loop == "ours":
            mine.generate(**prompt, max_new_tokens=5, eos_token_id=None)
        else:
            model.generate(**prompt, max_new_tokens=5, eos_token_id=None, custom_generate=mine.custom_generate)
    assert found == [True, True], "the prompt, and one step with which ours is compared"
    assert len(opened) > 2 and not any(opened) and noted.blocks == 2 and not noted.opened


def test_a_prompt_that_the_session_cannot_go_on_behind_is_at_any_length(noted: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    from covered import composite

    model = composite.tiny("gemma3")
    mine = ac.compile(model, max_context=96, **QUICK)
    monkeypatch.setattr(module_prompt, "import_cache", lambda *_: "it is another one")
    with seen(model, noted) as found:
        mine.generate(**composite.image_prompt(model), max_new_tokens=3, eos_token_id=None)
    assert found == [True] * 4, "the prompt, and then the whole request"


def test_a_model_that_was_not_captured_is_at_any_length() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=128, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    model, backend = transformers.OpenAIGPTLMHeadModel(config).eval(), Noting()
    plugin = SimpleNamespace(agentcompile_backends=hookimpl(lambda: [backend]))
    mine = ac.compile(model, catalog=load_catalog(extra=[("noting", plugin)]), **QUICK)
    assert isinstance(mine.session, EagerSession)
    noted = mine.session.backend
    assert isinstance(noted, Noting)
    with seen(model, noted) as found:
        mine.generate(PROMPT, 4)
    assert found == [True] * 4 and noted.blocks == 1 and not noted.opened


@contextmanager
def leaving() -> Iterator[None]:
    yield
    raise OSError("as it ends")


@pytest.mark.parametrize("breaks", [None, leaving, lambda: 1 / 0], ids=["", "ending", "entering"])
def test_what_is_captured_is_compared_at_any_length(tmp_path: Path, breaks: Any) -> None:
    """And traced outside of it. A backend whose block raises is recorded, and all is compared the same."""
    backend, model, frontend = Noting(), tiny("gpt2", GPT), LiveModelFrontend()
    if breaks is not None:
        backend.any_length = breaks
    loaded, workload = frontend.load(model, {}), Workload(dtype=DType.F32, max_context=64, prefill_chunks=(16,))
    ctx = Context(catalog=load_catalog(strict=False), target=preset("h200"), config=Config(), store=Store(tmp_path), backend=backend)
    with seen(model, backend) as found:
        made = capture.run(loaded, workload, ctx, frontend, ("any",), worker=False)
    compared = found.count(True)
    assert made.graphs and found == [False] * (len(found) - compared) + [True] * compared and len(found) > compared
    assert bool(compared) is (breaks is None) and backend.blocks == (breaks is None) and not backend.opened
    for _ in range(2):  # to the store, which keeps nothing of a model that is looked on at, and out of it
        stored = capture.run(loaded, workload, ctx, frontend, ("any",), worker=False)
        frontend.capture = lambda *_: pytest.fail("the store has it")  # type: ignore[method-assign]
    assert stored.graphs == made.graphs and backend.blocks == 3 * (breaks is None) and not backend.opened
    assert {(f.plugin, f.subject) for f in ctx.failures} == ({("noting", "any_length")} if breaks else set())


def test_what_raises_inside_ends_the_block() -> None:
    model, backend = tiny("gpt2", GPT), Noting()
    session = EagerSession(model, ac.compile(model, max_context=64, **QUICK).graphs, "cpu", backend)
    model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("inside")))
    with pytest.raises(Exception, match="inside"):
        session.generate(Asked(input_ids=PROMPT, max_new_tokens=2))
    assert backend.blocks == 1 and not backend.opened


class Breaking(Noting):
    """Its blocks raise as they begin, or as they end."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.ends, self.name = ends, f"breaking {ends}"

    @contextmanager
    def any_length(self) -> Iterator[None]:
        self.blocks += 1
        if not self.ends:
            raise OSError("no such library")
        yield
        raise OSError("no such library")


@pytest.mark.parametrize("ends", [False, True])
def test_a_block_that_raises_costs_no_request(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool) -> None:
    """Behind the compile, too: the model itself runs without it, and what was raised is said."""
    model = tiny("gpt2", GPT)
    mine = ac.compile(model, max_context=64, **QUICK)
    broken = Breaking(ends)
    monkeypatch.setattr(Session, "backend", broken)
    wanted = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    with caplog.at_level("WARNING", "agentcompile.runtime"):
        assert torch.equal(mine.generate(PROMPT, 4, **WHOLE).sequences, wanted)
        mine.generate(PROMPT, 4, **WHOLE)
    assert broken.blocks > 1 and "no such library" in caplog.text and caplog.text.count("any_length() of backend") == 1
