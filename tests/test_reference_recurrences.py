"""Budgets of recurrences over tokens: honest sums in any order are inside, what is left out is not."""

import math
from collections.abc import Callable

import pytest
import torch
from agentcompile_rules_transformers.testing import Draft
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.errors import AgentCompileError
from agentcompile_core.ops.operator_names import RECURRENCE
from agentcompile_core.ops.recurrence import recurrence
from agentcompile_core.ops.reference import Bounded, compare, oracle
from agentcompile_core.ops.reference.second_opinion import disagreement
from agentcompile_core.ops.work import flops_of, reduction_axis_of
from agentcompile_core.plugin_api import DType, Graph, Ref

Values = dict[str, torch.Tensor]
SETTINGS = settings(max_examples=10, derandomize=True, database=None, deadline=None)
TYPES = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}
NAMES = ("state", "decay", "x", "keys", "queries", "rates", "strength", "valid", "skip")
LOG2E = 1.0 / math.log(2.0)


@frozen(kw_only=True)
class Scan:
    """A recurrence: ``heads`` of ``rows`` times ``terms``, of which ``shared`` read the same keys; ``rates``: of each head, None: none."""

    heads: int
    rows: int
    terms: int
    shared: int = 1
    rates: int | None = None
    of_terms: bool = False
    delta: bool = False
    scaled: bool = False
    skip: bool = False
    begins: bool = False
    tokens: int = 1
    of_x: DType = DType.BF16

    def drawn(self, seed: int) -> Values:
        """Operands as models make them: steps or logarithms of decays below zero, keys of a delta rule of length one."""
        generator = torch.Generator().manual_seed(seed)
        tokens, heads, groups = self.tokens, self.heads, self.heads // self.shared

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        found = {"x": normal(1, tokens, heads, self.rows).to(TYPES[self.of_x])}
        found |= {name: normal(1, tokens, groups, self.terms) for name in ("keys", "queries")}
        if self.delta:
            found["keys"] /= found["keys"].norm(dim=-1, keepdim=True)
            found["strength"] = normal(1, tokens, heads).sigmoid()
        steps = torch.nn.functional.softplus(normal(1, tokens, heads, *((self.terms,) if self.of_terms else ())))
        found["decay"] = -steps if self.rates is None else steps
        if self.rates is not None:
            found["rates"] = -normal(heads, self.rates).exp()
        if self.skip:
            found["skip"] = normal(heads)
        if not self.begins:
            found["state"] = normal(1, heads, self.rows, self.terms)
        return found

    def graph(self, values: Values) -> Graph:
        """The call alone."""
        draft, kinds = Draft(), {kind: dtype for dtype, kind in TYPES.items()}
        args = tuple(draft.given(name, tuple(values[name].shape), kinds[values[name].dtype]) if name in values else None for name in NAMES)
        shapes = (1, self.tokens, self.heads, self.rows), (1, self.heads, self.rows, self.terms)
        return draft.graph(*draft.call(RECURRENCE, (*args, self.scaled), *shapes, dtype=DType.F32))


MAMBA = Scan(heads=96, rows=1, terms=16, shared=96, rates=16, scaled=True, skip=True)
MAMBA2 = Scan(heads=6, rows=64, terms=128, shared=3, rates=1, scaled=True, skip=True)
DELTA = Scan(heads=3, rows=128, terms=128, delta=True)
SCANS = {
    "mamba": MAMBA, "mamba of three": evolve(MAMBA, tokens=3), "mamba begins": evolve(MAMBA, begins=True, of_x=DType.F16),
    "mamba2": MAMBA2, "mamba2 of three": evolve(MAMBA2, tokens=3, begins=True), "unscaled": evolve(MAMBA2, scaled=False, skip=False),
    "delta": DELTA, "delta of three": evolve(DELTA, tokens=3, of_x=DType.F32), "delta of terms": evolve(DELTA, of_terms=True),
    "delta of terms begins": evolve(DELTA, of_terms=True, begins=True, tokens=3), "no rates": evolve(DELTA, delta=False, skip=True),
    "few": Scan(heads=4, rows=3, terms=2, shared=2, rates=2, skip=True), "one": Scan(heads=5, rows=2, terms=1, rates=1, tokens=3),
}
EVERY_SCAN = pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)


def kernel(values: Values, scaled: bool, narrow: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence in float32, sums from the last term to the first, factors by powers of two; ``narrow``: what is rounded to bf16."""

    def kept(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16().float() if name == narrow else tensor

    def added_up(products: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(products.shape[:-1])
        for product in kept("products", products).flip(-1).unbind(-1):
            total = total + product
        return total

    x, decay, rates, strength = values["x"][0].float(), values["decay"][0], values.get("rates"), values.get("strength")
    tokens, heads, rows = x.shape
    keys, queries = (values[name][0].repeat_interleave(heads // values[name].shape[2], dim=1) for name in ("keys", "queries"))
    state = values["state"][0] if "state" in values else torch.zeros(heads, rows, keys.shape[-1])
    steps, out = decay if decay.dim() == 3 else decay.unsqueeze(-1), []
    factors = kept("factors", torch.exp2(steps * (LOG2E if rates is None else rates * LOG2E)))
    for t in range(tokens):
        state, added = factors[t].unsqueeze(1) * state, x[t] * steps[t] if scaled else x[t]
        if strength is not None:
            added = strength[0, t].unsqueeze(-1) * (added - added_up(state * keys[t].unsqueeze(1)))
        state = kept("state", state + added.unsqueeze(-1) * keys[t].unsqueeze(1))
        row = added_up(state * queries[t].unsqueeze(1))
        out.append(row + values["skip"].unsqueeze(-1) * x[t] if "skip" in values else row)
    return torch.stack(out)[None], state[None]


def framework(values: Values, scaled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator itself."""
    return recurrence(*(values.get(name) for name in NAMES), scaled)


def uses(found: tuple[torch.Tensor, ...], expected: tuple[Bounded, ...]) -> tuple[float, ...]:
    """How much of their budgets results use."""
    compared = [compare(one, bound) for one, bound in zip(found, expected, strict=True)]
    return tuple(math.inf if not one.ok and one.budget_use <= 1 else one.budget_use for one in compared)


def judged(scan: Scan, values: Values) -> tuple[Bounded, ...]:
    """The reference of y and of the last state."""
    graph = scan.graph(values)
    found = oracle(graph, values)
    assert disagreement(graph, values, found) == ""
    return tuple(found[name] for name in graph.outputs)


@EVERY_SCAN
@SETTINGS
@given(seed=st.integers(0, 10**6))
def test_recurrences_in_any_order_are_inside(scan: Scan, seed: int) -> None:
    values = scan.drawn(seed)
    expected = judged(scan, values)
    assert max(uses(framework(values, scan.scaled), expected)) <= 1
    assert max(uses(kernel(values, scan.scaled), expected)) <= 1


@pytest.mark.parametrize("tokens, begins", [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("scan", [MAMBA, MAMBA2, DELTA, evolve(DELTA, of_terms=True)], ids=str)
@SETTINGS
@given(seed=st.integers(0, 10**6), alike=st.sets(st.sampled_from(("keys", "queries", "state", "x", "decay"))), level=st.floats(0.1, 2.0),
       own=st.booleans(), huge=st.booleans())
def test_operands_that_are_alike_or_huge_are_inside(scan: Scan, tokens: int, begins: bool, seed: int, alike: set[str], level: float,
                                                    own: bool, huge: bool) -> None:
    """Sums of terms that are all one err to one side; ``own``: queries that are the keys read whatever the keys have written."""
    scan = evolve(scan, tokens=tokens, begins=begins)
    values = scan.drawn(seed)
    for name in alike & values.keys():
        values[name] = torch.full_like(values[name], level if values[name].mean() > 0 else -level)
    if own:
        values["queries"] = values["keys"].clone()
    if huge and not alike and "state" in values:
        values["state"][..., seed % scan.terms] *= 2.0 ** (seed % 20)
    expected = judged(scan, values)
    assert max(uses(framework(values, scan.scaled), expected)) <= 1
    assert max(uses(kernel(values, scan.scaled), expected)) <= 1


FAULTS: dict[str, Callable[[Values], Values]] = {
    "skip": lambda v: {name: one for name, one in v.items() if name != "skip"},
    "decay": lambda v: v | ({"rates": torch.zeros_like(v["rates"])} if "rates" in v else {"decay": torch.zeros_like(v["decay"])}),
    "exchanged": lambda v: v | {"keys": v["queries"], "queries": v["keys"]},
    "strength": lambda v: {name: one for name, one in v.items() if name != "strength"},
    "less strength": lambda v: v | {"strength": v["strength"] * 0.999},
    "term": lambda v: v | {"queries": torch.cat((v["queries"][..., :-1], torch.zeros_like(v["queries"][..., :1])), -1)},
    "state": lambda v: {name: one for name, one in v.items() if name != "state"},
    "heads": lambda v: v | {"x": v["x"].flip(2)},
    "first token": lambda v: v | {name: v[name][:, :1].expand_as(v[name]) for name in ("x", "keys", "decay")},
}
UNSEEN_IN_STATE = ("skip", "term")


def faults_of(scan: Scan) -> list[str]:
    """What can be wrong with it."""
    there = {"skip": scan.skip, "strength": scan.delta, "less strength": scan.delta, "state": not scan.begins,
             "decay": not scan.begins or scan.tokens > 1, "first token": scan.tokens > 1}
    return [fault for fault in FAULTS if there.get(fault, True)]


@pytest.mark.parametrize("name, fault", [(name, fault) for name, scan in SCANS.items() for fault in faults_of(scan)])
def test_what_is_left_out_of_a_recurrence_shows(name: str, fault: str) -> None:
    scan = SCANS[name]
    values = scan.drawn(5)
    y, state = uses(framework(FAULTS[fault](values), scan.scaled), judged(scan, values))
    alike = fault == "exchanged" and scan.begins and scan.tokens == 1  # y is x times the product of the two
    assert (y > 1 or alike) and (state > 1 or fault in UNSEEN_IN_STATE)


@EVERY_SCAN
def test_a_state_that_keeps_an_old_value_shows(scan: Scan) -> None:
    values = scan.drawn(6)
    _, expected = judged(scan, values)
    _, found = framework(values, scan.scaled)
    before = values["state"] if "state" in values else torch.zeros_like(found)
    place = (0, scan.heads - 1, scan.rows // 2, scan.terms - 1)
    found[place] = before[place]
    assert compare(found, expected).wrong == 1


@EVERY_SCAN
def test_budgets_of_recurrences_are_tight(scan: Scan) -> None:
    """The framework uses a share of what is allowed, what is rounded to bf16 on the way is far outside."""
    honest, narrow = [], []
    for seed in range(8):
        values = scan.drawn(seed)
        expected = judged(scan, values)
        honest.append(uses(framework(values, scan.scaled), expected))
        rounded = [uses(kernel(values, scan.scaled, what), expected) for what in ("products", "state")]
        if not scan.begins or scan.tokens > 1:
            rounded.append(uses(kernel(values, scan.scaled, "factors"), expected))
        narrow.append(min(y for y, _ in rounded))
    assert min(max(used) for used in zip(*honest, strict=True)) > 0.05
    assert min(narrow) > 100


@pytest.mark.parametrize("scan", [MAMBA, evolve(MAMBA, tokens=3), MAMBA2, evolve(MAMBA2, tokens=3)], ids=str)
@SETTINGS
@given(seed=st.integers(0, 10**6), alike=st.booleans())
def test_errors_of_computed_operands_are_carried(scan: Scan, seed: int, alike: bool) -> None:
    """What a graph rounds to bf16 before: a kernel that keeps it in float32 is inside, one that halves it is not.

    ``alike``: beside terms that are all alike, so that of what the errors of steps and of x do to all of them nothing averages out.
    """
    values = scan.drawn(seed)
    if alike:
        values |= {name: torch.full_like(values[name], 0.61) for name in ("keys", "queries", "state")}
    wide, computed = dict(values), ("decay", "x") if alike else ("decay", "keys", "queries", "x")
    draft, known = Draft(), {}
    for name in computed:
        shape = tuple(values[name].shape)
        known[name] = draft.cast(draft.cast(draft.given(name, shape, DType.F32), shape, DType.BF16), shape, DType.F32)
        wide[name] = values[name].float() * 1.0037
    args: list[Ref | None] = [known.get(name) or (draft.given(name, tuple(values[name].shape), DType.F32) if name in values else None)
                              for name in NAMES]
    shapes = (1, scan.tokens, scan.heads, scan.rows), (1, scan.heads, scan.rows, scan.terms)
    graph = draft.graph(*draft.call(RECURRENCE, (*args, scan.scaled), *shapes, dtype=DType.F32))
    found = oracle(graph, wide)
    assert disagreement(graph, wide, found) == ""
    expected = tuple(found[name] for name in graph.outputs)
    rounded = wide | {name: wide[name].bfloat16().float() for name in computed}
    assert max(uses(framework(rounded, scan.scaled), expected)) <= 1
    assert max(uses(kernel(wide, scan.scaled), expected)) <= 1
    for name in computed:
        assert max(uses(framework(rounded | {name: rounded[name] * 0.5}, scan.scaled), expected)) > 1


def test_nothing_is_demanded_beyond_float32_and_nan_stays() -> None:
    scan = evolve(DELTA, heads=2, rows=4, terms=8, skip=True)
    values = scan.drawn(3)
    values["decay"][0, 0, 0] = 200.0
    y, state = judged(scan, values)
    assert not bool(y.error[0, 0, 0].isfinite().any()) and not bool(state.error[0, 0].isfinite().any())
    assert bool(y.error[0, 0, 1].isfinite().all()) and bool(state.error[0, 1].isfinite().all())
    assert max(uses(framework(values, False), (y, state))) <= 1
    values = scan.drawn(3)
    values["state"][0, 0, 1, 2], values["state"][0, 1, 3, 0] = math.inf, math.nan
    y, state = judged(scan, values)
    assert not math.isfinite(float(y.error[0, 0, 0, 1])) and math.isnan(float(y.value[0, 0, 1, 3]))
    assert int(y.error.isfinite().sum()) == 6 and int(y.value.isnan().sum()) == 1
    assert max(uses(framework(values, False), (y, state))) <= 1
    assert not compare(framework(values, False)[0].nan_to_num(), y).ok
    values = evolve(scan, begins=True).drawn(3)
    values["decay"][0, 0] = torch.tensor((math.nan, -math.inf))
    y, state = judged(evolve(scan, begins=True), values)
    assert not bool(y.value.isnan().any() | y.error[0, 0, 0].isfinite().any()) and bool(y.error[0, 0, 1].isfinite().all())
    assert max(uses(framework(values, False), (y, state))) <= 1


def test_padding_is_refused() -> None:
    draft = Draft()
    args = {name: draft.given(name, shape, DType.F32) for name, shape in (
        ("state", (1, 2, 3, 4)), ("decay", (1, 1, 2)), ("x", (1, 1, 2, 3)), ("keys", (1, 1, 2, 4)), ("queries", (1, 1, 2, 4)))}
    valid = draft.given("valid", (1,), DType.I64)
    graph = draft.graph(*draft.call(RECURRENCE, (*args.values(), None, None, valid), (1, 1, 2, 3), (1, 2, 3, 4), dtype=DType.F32))
    values = {name: torch.zeros(graph.spec(name).shape) for name in args} | {"valid": torch.ones(1, dtype=torch.int64)}
    with pytest.raises(AgentCompileError, match="padding"):
        oracle(graph, values)


def test_arithmetic_is_counted() -> None:
    scan = evolve(MAMBA2, tokens=3)
    graph = scan.graph(scan.drawn(0))
    assert flops_of(graph.nodes, graph) == 6 * 3 * 6 * 64 * 128 and reduction_axis_of(graph.nodes, graph) == -1
