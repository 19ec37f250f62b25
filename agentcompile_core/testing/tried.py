"""A trial run in this process, as the worker runs it: on a backend, by a bound callable, or on the framework itself."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import AgentCompileError
from ..ir.candidate import CALLABLE, StepSource
from ..ir.graph import Graph
from ..ir.plan import Origin, Schedule, Step
from ..ir.region import Match, Role
from ..ir.target import Target
from ..ir.verdict import Case, Trial
from ..ops.bits import same_bits
from ..ops.interpreter import compile_nodes
from ..ops.reference import compare
from ..plugin.interfaces import Backend
from ..plugin.match_kind import MatchKind
from ..runtime.executables import BoundCall
from ..stages.validate.input_cases import cases_for
from ..worker.execution import Execution
from ..worker.operands import graph_values, split_values

POISONS = (float("nan"), 777.0)


def step_of(trial: Trial, name: str) -> Step:
    """A step for a trial that was made by hand."""
    return Step(match_id=trial.match.id, implementation=f"conformance/{name}", origin=Origin.GENERATED, schedule=Schedule({}))


def call_trial(match: Match, graph: Graph, kind: MatchKind, target: Target, cases: int = 0) -> Trial:
    """A trial of a callable on the first ``cases`` input cases of its match (0: all)."""
    source = StepSource(language=CALLABLE, digest="0" * 12, code="", launches=(), reduction_depth=0)
    tried = cases_for(match, kind, "conformance", emulated=True)
    return Trial(match=match, graph=graph, source=source, target=target, cases=tried[: cases or len(tried)])


def framework_call(match: Match, graph: Graph, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> BoundCall:
    """The nodes of a match on the framework's operators, as a callable over operands; ``change`` plants a mistake in its outputs."""
    outputs = [operand for operand in match.operands if operand.role is Role.OUTPUT]

    def run(**operands: Tensor) -> None:
        given = {name: tensor for name, tensor in operands.items() if name not in {o.name for o in outputs}}
        device = next(iter(operands.values())).device
        found = compile_nodes(graph, device=device).run(graph_values(match, graph, given))
        for operand in outputs:
            for name, place in split_values(operand, operands[operand.name], graph).items():
                place.copy_(change(found[name]))

    return BoundCall(run=run)


def run_call(trial: Trial, bound: BoundCall, kind: MatchKind, backend: Backend) -> Execution:
    """``bound`` ready to run on guarded operands."""
    return Execution(trial, backend, None, bound=bound, kind=kind)


def misjudged(run: Execution, case: Case) -> str:
    """What is wrong with one case: memory that may not be written, results beyond the budget, results that differ between runs."""
    seen: list[dict[str, Tensor]] = []
    for poison in POISONS:
        try:
            result = run.run(case, poison)
            expected = run.expected(case, result.inputs)
        except AgentCompileError as exc:
            return str(exc)
        if result.detail:
            return result.detail
        values = run.values(result.outputs)
        wrong = [(name, compare(tensor, expected[name])) for name, tensor in values.items() if name in expected]
        detail = next((f"{name}: {found.detail}" for name, found in wrong if not found.ok), "")
        if detail:
            return detail
        seen.append(values)
    unequal = [name for name in seen[0] if not same_bits(seen[0][name], seen[1][name])]
    return f"{', '.join(unequal)}: two runs on equal inputs differ" if unequal else ""


def off_by_a_tenth(tensor: Tensor) -> Tensor:
    """A planted mistake: every element is off by a tenth of the largest (of integers: by one)."""
    if not tensor.is_floating_point():
        return tensor + 1
    return tensor + (0.1 * tensor.abs().max().clamp(min=1e-3)).to(tensor.dtype)


def what_raised(call: Callable[[], Any]) -> str:
    """Type and message of whatever ``call`` raises; empty if nothing."""
    try:
        call()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""
