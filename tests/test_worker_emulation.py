"""Generated kernels under the emulation backend, judged by the numerics validator: families, validator and worker together."""

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve

from agentcompile_core.errors import Cause
from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, TensorSpec, Value, ValueKind
from agentcompile_core.ir.plan import Origin, Step
from agentcompile_core.ir.region import Access, Match, Operand, Role, SemanticLabel
from agentcompile_core.ir.verdict import Outcome, Trial
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.worker import Job
from agentcompile_core.worker.evaluate import WorkerState

TARGET = PRESETS["h200"]
N, K = 40, 72


@pytest.fixture(scope="module")
def session():
    return WorkerState(load_catalog(only=("emulation", "numerics", "gemv", "transformers_rules"), strict=True))


def linear_with_residual() -> tuple[Match, Graph]:
    def spec(*shape: int) -> TensorSpec:
        return TensorSpec(shape=shape, dtype=DType.F16)

    values = (Value(name="x", spec=spec(1, 1, K), kind=ValueKind.INPUT), Value(name="w", spec=spec(N, K), kind=ValueKind.WEIGHT),
              Value(name="y", spec=spec(1, 1, N)))
    node = Node(name="linear", op="aten.linear.default", kind="linear", args=(Ref("x"), Ref("w")), outputs=("y",))
    graph = Graph(name="g", kind=GraphKind.DECODE, values=values, nodes=(node,), inputs=("x",), outputs=("y",))
    operands = (Operand(name="x", role=Role.INPUT, access=Access.READ, values=("x",), spec=spec(1, 1, K)),
                Operand(name="weight", role=Role.WEIGHT, access=Access.READ, values=("w",), spec=spec(N, K)),
                Operand(name="out", role=Role.OUTPUT, access=Access.WRITE, values=("y",), spec=spec(1, 1, N)))
    attributes = (("k", K), ("n", N), ("norm", "none"), ("norm_eps", 0.0), ("pair", 1))
    return Match(kind="linear", label=SemanticLabel.GEMV, nodes=("linear",), operands=operands, attributes=attributes), graph


def job(session: WorkerState) -> Job:
    match, graph = linear_with_residual()
    family = session.catalog.template_families["gemv/gemv"]
    assert family.accepts(match, TARGET) is True
    schedule = next(p for p in family.space(match, TARGET).points if p["path"] == "direct")
    step = Step(match_id=match.id, implementation="gemv/gemv", origin=Origin.GENERATED, schedule=schedule)
    trial = Trial(match=match, graph=graph, source=family.lower(match, schedule, TARGET), target=TARGET,
                  cases=cases_for(match, session.catalog.kind("linear"), "test", emulated=True)[:3])
    return Job(trial=trial, step=step, backend="emulation")


def test_a_generated_kernel_passes_and_stays_provisional(session: WorkerState):
    made = job(session)
    found = session.evaluate(made, session.build(made), lambda phase: None)
    assert found.failure is None, found.message
    assert found.verdicts[0].outcome is Outcome.PROVISIONAL
    assert 0.0 < max(c.budget_use for c in found.verdicts[0].checks) <= 1.0
    assert found.measurement is None


def test_the_same_kernel_told_a_shorter_row_is_refused(session: WorkerState):
    made = job(session)
    (launch,) = made.trial.source.launches
    short = tuple(evolve(a, value=a.value - 8) if a.name == "k" else a for a in launch.arguments)
    source = evolve(made.trial.source, launches=(evolve(launch, arguments=short),))
    made = evolve(made, trial=evolve(made.trial, source=source))
    found = session.evaluate(made, session.build(made), lambda phase: None)
    assert found.failure is Cause.TOLERANCE
    assert "beyond the budget" in found.message


def test_a_source_that_does_not_compile_says_where(session: WorkerState):
    made = job(session)
    source = evolve(made.trial.source, code=made.trial.source.code + "\nthis is no C++;\n")
    found = session.build(evolve(made, trial=evolve(made.trial, source=source)))
    assert found.failure is Cause.COMPILE
    assert "error" in found.message
