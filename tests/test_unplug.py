"""Unplugging any plugin distribution leaves a program that says the same; plugging it in again restores what it gave."""

from pathlib import Path
from typing import Any

import pytest

from agentcompile_core import api
from agentcompile_core.configuration import Config
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.store import Store

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"
CONFIG = Config(budget_plans=3, rounds=1, budget_s=240.0)
TOKENS = 4
# Entry points whose loss takes kernels away, and what selected steps must then not use.
FAMILIES = ("gemv", "norm", "elementwise", "rope", "attention", "argmax")
UNUSED = ("softmax", "reduction", "gemm", "moe", "recurrence")  # families without work in the tiny model
OTHERS = (
    "transformers_rules", "random", "replay", "litellm", "cuda", "cudagraph", "flashattn", "flashkv", "triton", "vendor", "emulation",
    "numerics",
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One store for the module, so that what one compilation found out the next one need not."""
    return Store(tmp_path_factory.mktemp("store"))


def compiled(store: Store, *, block: tuple[str, ...] = (), only: tuple[str, ...] | None = None, run_on: str = "auto") -> Any:
    catalog = load_catalog(block=block, only=only, strict=False)
    target = "h200" if catalog.targets else ""  # the plugins cuda and emulation bring it
    return api.compile(str(TINY), dtype="float32", max_context=64, device="cpu", target=target, config=CONFIG, catalog=catalog, store=store,
                       run_on=run_on)


def tokens(model: Any) -> list[int]:
    ids = model.tokenizer("When an exception", return_tensors="pt").input_ids
    return model.generate(ids, TOKENS, eos_token_id=None)[0, ids.shape[1]:].tolist()


def families_of(model: Any) -> set[str]:
    return {step.step.implementation for selection in model.compilation.selections for step in selection.steps}


@pytest.fixture(scope="module")
def complete(store: Store) -> Any:
    """The tiny model with every plugin, through its emulated kernels."""
    return compiled(store, run_on="emulation")


@pytest.fixture(scope="module")
def expected(complete: Any) -> list[int]:
    """What HuggingFace says after the prompt."""
    ids = complete.tokenizer("When an exception", return_tensors="pt").input_ids
    out = complete.loaded.module.generate(ids, max_new_tokens=TOKENS, do_sample=False, disable_compile=True)
    return out[0, ids.shape[1]:].tolist()


def test_every_installed_plugin_is_unplugged_below() -> None:
    ours = ("agentcompile-rules-", "agentcompile-templates-", "agentcompile-runtime-", "agentcompile-validator-", "agentcompile-advisor-")
    installed = {p.name for p in load_catalog(strict=False).plugins if p.distribution.startswith(ours)}
    assert installed <= {*FAMILIES, *UNUSED, *OTHERS}, "add the new plugin to this file"
    assert installed, "no plugin distribution is installed; `make setup` installs them"


@pytest.mark.slow
def test_with_every_plugin(complete: Any, expected: list[int]) -> None:
    assert {name.split("/")[0] for name in families_of(complete)} >= {"gemv", "attention", "argmax"}
    assert tokens(complete) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_family(store: Store, complete: Any, expected: list[int], family: str) -> None:
    model = compiled(store, block=(family,), run_on="emulation")
    left = {name.split("/")[0] for name in families_of(model)}
    assert family not in left
    assert left, "the other families must still serve"
    assert tokens(model) == expected


def test_without_families_that_have_no_work_nothing_changes(store: Store, complete: Any, expected: list[int]) -> None:
    model = compiled(store, block=UNUSED)
    assert tokens(model) == expected and families_of(model) == families_of(complete)


@pytest.mark.parametrize("name", OTHERS)
def test_without_another_plugin(store: Store, complete: Any, expected: list[int], name: str) -> None:
    model = compiled(store, block=(name,))
    assert tokens(model) == expected
    if name == "transformers_rules":
        assert families_of(model) == set(), "without rules there is no match, and everything runs on the framework"
    if name == "numerics":
        assert families_of(model) == set(), "without a numerics validator nothing generated is selected"
    if name == "cuda":
        assert families_of(model) == families_of(complete), "the emulator alone knows its targets and validates kernels for them"
    if name == "flashkv":
        assert any("no plugin for KV caches is installed" in note for note in model.notes)


def test_the_core_alone(store: Store, expected: list[int]) -> None:
    model = compiled(store, only=())
    assert families_of(model) == set()
    assert tokens(model) == expected


def test_plugging_in_again_restores_what_was_selected(store: Store, complete: Any) -> None:
    again = compiled(store)
    assert [s.steps for s in again.compilation.selections] == [s.steps for s in complete.compilation.selections]


def test_plugins_are_blocked_by_the_environment_too(store: Store, complete: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCOMPILE_BLOCK_PLUGINS", "argmax,norm")
    model = compiled(store)
    assert not {"argmax", "norm"} & {name.split("/")[0] for name in families_of(model)}
    assert "gemv/gemv" in families_of(model)


def test_a_bundle_loads_without_the_plugins_that_made_it(tiny_bundle: Path, expected: list[int]) -> None:
    model = api.load(tiny_bundle, str(TINY), device="cpu", catalog=load_catalog(only=(), strict=False))
    assert tokens(model) == expected
