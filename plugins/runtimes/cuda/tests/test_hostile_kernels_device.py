"""On a GPU: one compile that meets every hostile kernel refuses each for its reason, and ends with a correct program."""

from typing import Any

import hostile_kernels as hostile
import pytest
import torch

import agentcompile_core as ac
from agentcompile_core.configuration import Config
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import Cause
from agentcompile_core.store import Store

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def compiled() -> Any:
    """A product in fp16 whose only family is the hostile one; without a margin, so that no clock decides."""
    torch.manual_seed(0)
    module = torch.nn.Linear(hostile.COLUMNS, hostile.ROWS, bias=False).half().cuda()
    x = torch.randn(1, 1, hostile.COLUMNS, device="cuda", dtype=torch.float16)
    catalog = load_catalog(only=("transformers_rules", "cuda", "cudagraph", "flashkv", "numerics"), extra=[("hostile", hostile.offers())])
    config = Config(rounds=1, budget_s=100.0, margin=-1.0, origins=("generated",), validators=("numerics",))
    model = ac.compile(module, example_inputs=(x,), catalog=catalog, config=config, store=Store(None))
    return model, module, x


def record(compiled: Any, name: str) -> TuningRecord:
    (found,) = [r for r in compiled[0].compilation.records
                if r.step.implementation == hostile.FAMILY and r.step.schedule["kernel"] == name]
    return found


@pytest.mark.parametrize("name", list(hostile.HOSTILE))
def test_each_is_refused_for_its_reason(compiled: Any, name: str) -> None:
    found, expected = record(compiled, name), hostile.HOSTILE[name]
    assert found.failure in expected.causes and expected.message in found.message, (found.failure, found.message)
    assert found.measurement is None


def test_the_honest_one_is_selected(compiled: Any) -> None:
    assert record(compiled, "honest").failure is None
    (selection,) = compiled[0].compilation.selections
    assert [s.step.schedule["kernel"] for s in selection.steps] == ["honest"], selection.fallback_reasons


def test_the_compile_ends_with_a_correct_program(compiled: Any) -> None:
    model, module, x = compiled
    for _ in range(3):
        fresh = torch.randn_like(x)
        torch.testing.assert_close(model(fresh), module(fresh), rtol=2e-3, atol=2e-3)


def test_faults_are_told_and_named(compiled: Any) -> None:
    told = {(f.plugin, f.cause) for f in compiled[0].compilation.failures}
    assert {(hostile.FAMILY, cause) for cause in (Cause.MEMORY_FAULT, Cause.CRASH, Cause.MISALIGNED, Cause.TIMEOUT)} <= told
