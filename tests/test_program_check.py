"""A program of kernels that computes something else than the framework, once it is installed, does not serve."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agentcompile_rules_transformers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import agentcompile_core as ac
import agentcompile_core.worker
from agentcompile_core.configuration import Config
from agentcompile_core.errors import Cause, StageName
from agentcompile_core.installation import program_check
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.testing.fake_kernels import floats
from agentcompile_core.worker import Worker

MODULE = '''
import torch

class Model(torch.nn.Module):
    def forward(self, a, b):
        c = a + b
        return c / MASK

def get_inputs():
    return [torch.arange(100.0), torch.ones(100)]

def get_init_inputs():
    return []
'''
A, B = torch.arange(100.0), torch.ones(100)
Kernel = Callable[..., None]


def adding(factor: float = 1.0, missing: int = 0, error: BaseException | None = None, step: int = 1) -> Kernel:
    """What a kernel does once it is installed: adds every ``step``-th element of b, times a factor, without the last ones, or raises."""
    def behave(behaviour: str, runs: int, in0: int, in1: int, out: int, count: int) -> None:
        if error is not None:
            raise error
        a, b, c = (floats(address, count) for address in (in0, in1, out))
        for i in range(count - missing):
            c[i] = (a[i] + b[i * step % count]) * factor

    return behave


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compiles an addition: validated in the child, whose kernels add; installed here, where they do what ``installed`` says."""
    made = partial(Worker, catalog="agentcompile_core.testing.doubles:catalog", builders=1)
    monkeypatch.setattr(agentcompile_core.worker, "Worker", made)
    offers = SimpleNamespace(agentcompile_template_families=hookimpl(lambda: [doubles.FakeFamily()]),
                             agentcompile_backends=hookimpl(lambda: [doubles.FakeBackend()]),
                             agentcompile_validators=hookimpl(lambda: [doubles.SimpleValidator()]))
    catalog = load_catalog(only=(), extra=[("doubles", offers), ("rules", agentcompile_rules_transformers)])
    store = Store(None)

    def compile_(installed: Kernel, mask: str = "1.0") -> Any:
        (tmp_path / "addition.py").write_text(MODULE.replace("MASK", mask))
        monkeypatch.setattr(doubles, "behave", installed)
        return ac.compile(str(tmp_path / "addition.py"), device="cpu", run_on="fake", catalog=catalog, store=store,
                          config=Config(validators=("simple",), backend="fake", rounds=1, budget_plans=1))

    return compile_


def test_a_wrong_program_is_not_served(compiled: Callable[..., Any]) -> None:
    for installed, seen in ((adding(1.01), "its rms error is"), (adding(float("nan")), "NaN or infinite"),
                            (adding(missing=1), "1 of its 100 results are NaN"),
                            (adding(error=RuntimeError("an illegal address")), "raised RuntimeError: an illegal address")):
        model = compiled(installed)
        (selection,) = model.compilation.selections
        assert len(selection.steps) == 1, "validation has passed the kernel"
        assert torch.equal(model(A, B), A + B)
        (note,) = (n for n in model.notes if "every step runs on the framework's operators" in n)
        assert seen in note
        (failure,) = (f for f in model.context.failures if f.stage is StageName.INSTALL)
        assert failure.cause is Cause.TOLERANCE and seen in failure.message
    model = compiled(adding(step=3))  # the example of b is all ones, which does not show it
    assert torch.equal(model(A, A), A + A) and any("is beyond the error budget" in note for note in model.notes)
    right = compiled(adding())
    assert torch.equal(right(A, B), A + B) and not any("framework" in note for note in right.notes)


def test_what_a_program_leaves_unwritten_is_seen_where_the_memory_holds_the_right_result(compiled: Callable[..., Any],
                                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a process takes may be that of an earlier result: what a wrong program does not write is right there, once."""
    empty = torch.empty

    def used_before(*size: Any, **options: Any) -> torch.Tensor:
        found = empty(*size, **options)
        return found.copy_(A + B) if found.shape == A.shape and found.dtype is A.dtype else found

    for missing in (1, 37, 100):
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", used_before)
            model = compiled(adding(missing=missing))
        assert any("NaN or infinite" in n for n in model.notes)
        assert torch.equal(model(A, B), A + B)


def test_a_program_is_also_looked_at_where_the_framework_gives_infinities(compiled: Callable[..., Any]) -> None:
    infinite = "(torch.arange(100.0) - 3.0)"  # zero once
    wanted = (A + B) / (torch.arange(100.0) - 3.0)
    model = compiled(adding(1.01), infinite)
    assert torch.equal(model(A, B), wanted) and any("its rms error" in note for note in model.notes)


@given(st.integers(0, 63), st.sampled_from([float("nan"), float("inf"), -float("inf")]), st.sampled_from([torch.float32, torch.float16]))
def test_a_result_that_is_not_finite_is_beyond_any_budget(place: int, value: float, dtype: torch.dtype) -> None:
    wanted = torch.linspace(-1.0, 1.0, 64).to(dtype)
    found = wanted.clone()
    assert program_check._beyond(found, wanted, 1.0) == ""
    found[place] = value
    assert "1 of its 64 results are NaN or infinite" in program_check._beyond(found, wanted, 1.0)
    assert program_check._beyond(found.clone(), found, 1.0) == "", "where the framework's is not finite either"
