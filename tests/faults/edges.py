"""Kernels that are wrong only where inputs are odd, and budgets: each is refused on the inputs that are there for it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers import testing as cases
from attrs import evolve
from test_reference_edges import BY_NAME, DTYPES, FUNCTIONS, Build, new_gelu

from agentcompile_core.ir.verdict import Case, InputFamily
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import compare, oracle
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.testing.fake_kernels import floats
from agentcompile_core.worker.operands import graph_values, make_inputs

from . import cheap
from .kernels import KEPT, record_of
from .registry import add, fault

AREA = "kernels"
F = InputFamily
Wrong = Callable[[list[float], list[float], int], list[float]]


def _each(change: Callable[[float], float]) -> Wrong:
    return lambda a, b, address: [change(x) + change(y) for x, y in zip(a, b, strict=True)]


def _saturated(limit: float) -> Callable[[float], float]:
    return lambda x: x if math.isinf(x) or math.isnan(x) else max(-limit, min(limit, x))


def _over_all(a: list[float], b: list[float], address: int) -> list[float]:
    """As a softmax that takes the maximum of a row before it looks whether there is one."""
    return [float("nan") if all(x == -math.inf for x in (*a, *b)) else x + y for x, y in zip(a, b, strict=True)]


def _wide_loads(a: list[float], b: list[float], address: int) -> list[float]:
    """As one that loads 32 bytes at a time, wherever its operands begin."""
    return [x + y + (1.0 if address % 32 else 0.0) for x, y in zip(a, b, strict=True)]


def _tied(a: list[float], b: list[float], address: int) -> list[float]:
    return [x + y if a.count(max(a)) < 3 or max(a) != 4.0 else x for x, y in zip(a, b, strict=True)]


ODD: dict[str, tuple[Wrong, set[str], str]] = {  # what it does, the families that show it, what it is wrong about
    "takes NaN for zero": (_each(lambda x: 0.0 if math.isnan(x) else x), {F.NAN}, "NaN in used elements"),
    "makes numbers of infinities": (_each(lambda x: math.copysign(3e38, x) if math.isinf(x) else x), {F.INFINITE}, "infinities in inputs"),
    "loses the sign of infinities": (_each(lambda x: abs(x) if math.isinf(x) else x), {F.INFINITE}, "the sign of infinities"),
    "saturates long before its type does": (_each(_saturated(1e30)), {F.MAX_FINITE}, "the largest finite numbers"),
    "saturates at 8192": (_each(_saturated(8192.0)), {F.ONE_HUGE}, "one huge activation"),
    "rounds large numbers": (_each(lambda x: float(round(x)) if 512 < abs(x) < 4096 else x), {F.LARGE_MEAN, F.LARGE_MEAN_BELOW},
                            "inputs of a large mean"),
    "takes nothing below -512": (_each(lambda x: max(x, -512.0) if abs(x) < 4096 else x), {F.LARGE_MEAN_BELOW}, "a large mean below zero"),
    "is wrong where values tie": (_tied, {F.TIES}, "exact ties of the maximum"),
    "has no answer to a row of -inf": (_over_all, {F.ALL_MINUS_INF}, "inputs that are all -inf"),
    "loads wider than the runtime promises": (_wide_loads, {"misaligned"}, "addresses that are 16 bytes off"),
}


def _odd(name: str) -> Any:
    wrong, families, _ = ODD[name]
    others = doubles.behave  # the controls of validators

    def behave(behaviour: str, runs: int, in0: int, in1: int, out: int, count: int) -> None:
        if behaviour != "odd":
            return others(behaviour, runs, in0, in1, out, count)
        a, b, c = (floats(address, count) for address in (in0, in1, out))
        c[:] = wrong(list(a), list(b), in0)

    def run(folder: Path) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doubles, "behave", behave)
            made = cheap.compiled(cheap.module(folder), Store(None), family=cheap.Family("odd", "honest"), workers=cheap.HERE)
            record = record_of(made, "odd")
        last = record.verdict.checks[-1].name
        assert families == {"misaligned"} or last in families, f"{last} has shown it, not {families}"
        return f"{record.failure.value} on inputs of the family {last}: {record.message}"

    return run


for _name, (_, _, _what) in ODD.items():
    add(AREA, f"a kernel that {_name}", f"a candidate is wrong about {_what} only", _odd(_name), KEPT)


class Boasting(cheap.Family):
    """A family whose sources declare reductions without end, as if that widened what they may be off by."""

    def lower(self, match: Any, schedule: Any, target: Any) -> Any:
        """The source with another claim."""
        return evolve(super().lower(match, schedule, target), reduction_depth=1 << 30)


@fault(AREA, "a source declares a reduction of 2**30 elements, and is off by 1 %", KEPT)
def _a_family_that_declares_its_own_bound(folder: Path) -> str:
    made = cheap.compiled(cheap.module(folder), Store(None), workers=cheap.HERE, family=Boasting("wrong", "honest"))
    record = record_of(made, "wrong")
    return f"{record.failure.value}: {record.message}"


def _unattended(left_out: int) -> Any:
    def run(folder: Path) -> str:
        capacity, kind = 8192, BY_NAME["attention"]
        position = capacity - 1
        match, graph = cases.attention_case(heads=(2, 1), head_dim=16, capacity=capacity)
        _, short = cases.attention_case(heads=(2, 1), head_dim=16, capacity=capacity, window=capacity - left_out)
        seen = []
        for family in kind.families:
            case = Case(family=family, seed=5, position=position)
            values = graph_values(match, graph, make_inputs(match, kind, case, "cpu"))
            expected = oracle(graph, values)
            own = {name: tensor.clone() for name, tensor in values.items()}
            wrong = {**own, **compile_nodes(short, device="cpu").run(own)}
            seen += [f"family {family}: {one.detail}" for name, bound in expected.items() if not (one := compare(wrong[name], bound)).ok]
        assert seen, f"{left_out} of {capacity} positions are missing, and nothing sees it"
        return seen[0]

    return run


for _count in (1, 16):
    add(AREA, f"an attention that leaves out {_count} of 8192 cached positions",
        f"an answer without the oldest {_count} of 8192 cached positions is compared with the reference", _unattended(_count),
        "nothing is selected here; families that spread attention over all positions show it")


def _honest(make: Callable[[Any, Any], Any], spiky: bool = False) -> Any:
    def run(folder: Path) -> str:
        worst = 0.0
        for dtype in DTYPES.values():
            for seed, scale in enumerate((0.1, 1.0, 10.0)):
                g = torch.Generator().manual_seed(seed)
                x = torch.randn(300, 64, generator=g) * scale
                x = torch.where(torch.rand(x.shape, generator=g) < 0.02, x * 50, x) if spiky else x
                b = Build()
                found = b.check(make(b, b.given("x", x.to(dtype)))).values()
                assert all(check.ok for check in found), [check.detail for check in found]
                worst = max(worst, *(check.budget_use for check in found))
        return f"not refused: torch's answer is off by at most {worst:.0%} of the budget, in three types and three scales"

    return run


for _name, _make in {**FUNCTIONS, "NewGELU": new_gelu}.items():
    add(AREA, f"an honest {_name}", f"torch's own {_name} is judged", _honest(_make), "no honest result is refused")
add(AREA, "an honest softmax of spiky rows", "torch's own softmax of 300 rows with huge scores is judged",
    _honest(lambda b, x: b.call("aten.softmax.int", x, -1), spiky=True), "no honest result is refused")
