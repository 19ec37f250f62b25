"""On a GPU with compute-sanitizer: each tool finds its planted mistake, a right kernel passes all four, and compile takes the next one."""

from typing import Any

import hostile_kernels as hostile
import pytest
import torch
from agentcompile_cuda_kit import control
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.sanitizer import running, validator
from attrs import evolve

import agentcompile_core as ac
from agentcompile_core.configuration import Config
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import Case, Cause, InputFamily, Reject, Trial, control_trials
from agentcompile_core.store import Store

pytestmark = pytest.mark.device

SHARED = "__shared__ float staged[64]; staged[threadIdx.x] = __half2float(x[threadIdx.x]); "
READ = "if (staged[63 - threadIdx.x] == 12345.0f) return; "
RACE = SHARED + "__syncwarp(); " + READ + "__syncthreads();"
DIVERGENT = 'if (threadIdx.x % 32 < 7) asm volatile("bar.sync 0, 64;" ::: "memory");'


class Run:
    """What a validator gets: the inputs of a product or of the standard control."""

    backend = CudaBackend()

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def inputs(self, case: Case, device: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(case.seed)
        given = [o for o in self.trial.match.operands if o.name != "out"]
        return {o.name: torch.randn(o.spec.shape).to(getattr(torch, o.spec.dtype.value)) for o in given}


@pytest.fixture(scope="module")
def judge() -> validator.SanitizerValidator:
    made = validator.SanitizerValidator()
    answer = made.available()
    assert not isinstance(answer, Reject), answer
    return made


def product(name: str, before: str = "") -> Trial:
    target = CudaBackend().live_target()
    assert target is not None
    made = hostile.trial(name, target)
    source = evolve(made.source, code=made.source.code.replace("const int row", before + " const int row", 1))
    return evolve(made, source=source, cases=(Case(family=InputFamily.NORMAL, seed=1),))


def standard(defect: str) -> Trial:
    target = CudaBackend().live_target()
    assert target is not None
    (made,) = control_trials((control(defect),), target)
    return evolve(made, cases=made.cases[:1])


def test_a_right_kernel_passes_every_tool(judge: validator.SanitizerValidator) -> None:
    found = judge.check(product("honest"), Run(product("honest")))
    assert found.passed and [c.name for c in found.checks] == list(running.TOOLS), found.message


@pytest.mark.parametrize("tool, trial, cause", [
    ("memcheck", lambda: standard("write behind the end"), Cause.MEMORY_FAULT), ("racecheck", lambda: product("honest", RACE), Cause.RACE),
    ("initcheck", lambda: standard("garbage kept"), Cause.MEMORY_FAULT), ("synccheck", lambda: product("honest", DIVERGENT), Cause.RACE)])
def test_each_tool_finds_its_mistake(judge: validator.SanitizerValidator, tool: str, trial: Any, cause: Cause) -> None:
    found = judge.check(trial(), Run(trial()))
    assert not found.passed and found.cause is cause and found.message.startswith(tool), found.message


def test_the_bulk_control_runs_under_every_tool(judge: validator.SanitizerValidator) -> None:
    target = CudaBackend().live_target()
    assert target is not None
    for tool in running.TOOLS:
        assert isinstance(judge._false_alarms(tool, target), frozenset)


def test_compile_takes_what_the_sanitizer_passes() -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(hostile.COLUMNS, hostile.ROWS, bias=False).half().cuda()
    x = torch.randn(1, 1, hostile.COLUMNS, device="cuda", dtype=torch.float16)
    catalog = load_catalog(only=("transformers_rules", "cuda", "cudagraph", "flashkv", "numerics", "gemv"))
    config = Config(rounds=1, budget_s=300.0, budget_plans=8, margin=-1.0, origins=("generated",), validators=("numerics",), sanitize=True)
    model = ac.compile(module, example_inputs=(x,), catalog=catalog, config=config, store=Store(None))
    (selection,) = model.compilation.selections
    assert selection.steps and all("sanitizer found nothing" in s.reason for s in selection.steps), (selection, model.compilation.failures)
    torch.testing.assert_close(model(x), module(x), rtol=2e-3, atol=2e-3)
