"""What steps of recurrences take in of the nodes around them, and what they leave alone: other readers, other states, other functions."""

from collections.abc import Callable

import pytest
from agentcompile_rules_transformers.convolution_step import ConvolutionStepRule
from agentcompile_rules_transformers.draft import Draft
from agentcompile_rules_transformers.recurrence_step import RecurrenceStepRule
from attrs import evolve

from agentcompile_core.plugin_api import DType, Graph, Match, Ref, Symbol, ValueKind
from agentcompile_core.testing.targets import FAKE

HEADS, WIDTH, TERMS = 4, 8, 16
F32, BF16 = DType.F32, DType.BF16
STATE, SHAPE, LINES, OF_HEADS = (1, HEADS, WIDTH, TERMS), (1, 1, HEADS, WIDTH), (1, 1, 1, TERMS), (1, 1, HEADS)


class Step(Draft):
    """A scan whose decay is softplus of a value and a bias, times -exp of a logarithm; parts that tests change."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self.given("state", STATE, F32, ValueKind.STATE)
        self.shown: list[Ref] = []

    def softplus(self, x: Ref, *how: float) -> Ref:
        return self.one("aten.softplus.default", (x, *how), OF_HEADS, BF16)

    def finished(self, *, softplus: tuple[float, ...] = (), keys: Callable[["Step"], Ref] | None = None,
                 write: Callable[["Step", Ref], None] | None = None, show: str = "") -> Graph:
        """The graph; ``show`` names a value that is read besides."""
        named: dict[str, Ref] = {}
        addends = self.given("dt", OF_HEADS, BF16), self.weight("dt_bias", HEADS, dtype=BF16)
        named["sum"] = self.one("aten.add.Tensor", addends, OF_HEADS, BF16)
        named["soft"] = self.softplus(named["sum"], *softplus)
        named["step"] = self.cast(named["soft"], OF_HEADS, F32)
        logarithm = self.cast(self.weight("A_log", HEADS, 1, dtype=BF16), (HEADS, 1), F32)
        named["exp"] = self.one("aten.exp.default", (logarithm,), (HEADS, 1), F32)
        named["rates"] = self.one("aten.neg.default", (named["exp"],), (HEADS, 1), F32)
        named["keys"] = keys(self) if keys is not None else self.cast(self.given("k", LINES, BF16), LINES, F32)
        queries = self.cast(self.given("q", LINES, BF16), LINES, F32)
        x = self.given("x", SHAPE, BF16)
        arguments = (self.state, named["step"], x, named["keys"], queries, named["rates"], None, None, None, True)
        y, last = self.call("agentcompile.recurrence.default", arguments, SHAPE, STATE, dtype=F32)
        if write is None:
            self.call("aten.copy_.default", (self.state, last), STATE, dtype=F32, mutates=("state",))
        else:
            write(self, last)
        return self.graph(y, *self.shown, *([named[show]] if show else []))


def widest(graph: Graph) -> Match | None:
    found = list(RecurrenceStepRule().find(graph, FAKE))
    return max(found, key=lambda match: len(match.nodes)) if found else None


def test_all_that_makes_operands_is_taken_in() -> None:
    match = widest(Step().finished())
    assert match is not None
    assert {name: match.need(name).values[0] for name in ("decay", "decay_bias", "rates", "keys", "queries")} == {
        "decay": "dt", "decay_bias": "dt_bias", "rates": "A_log", "keys": "k", "queries": "q"}
    assert match.flag("softplus") and match.flag("log_rates") and match.flag("scaled")


@pytest.mark.parametrize("show,kept", [
    ("sum", {"decay": "sum", "softplus": True}), ("soft", {"decay": "soft", "softplus": False}), ("step", {"decay": "step"}),
    ("exp", {"log_rates": False}), ("rates", {"log_rates": False}), ("keys", {"keys": "keys"})])
def test_what_others_read_is_made_as_before(show: str, kept: dict[str, object]) -> None:
    graph = Step().finished(show=show)
    match = widest(graph)
    assert match is not None
    made = graph.producer[graph.outputs[-1]]
    assert made.name not in match.nodes
    for name, wanted in kept.items():
        seen = match.flag(name) if isinstance(wanted, bool) else match.need(name).values[0]
        assert seen == (wanted if isinstance(wanted, bool) else graph.outputs[-1]), name


@pytest.mark.parametrize("how", [(2.0,), (1.0, 10.0)], ids=["beta", "threshold"])
def test_another_softplus_stays(how: tuple[float, ...]) -> None:
    match = widest(Step().finished(softplus=how))
    assert match is not None and not match.flag("softplus") and not any(name.startswith("softplus") for name in match.nodes)


def turned_back(draft: Step, last: Ref) -> None:
    wrong = draft.apart("aten.transpose.int", (last, 2, 3), (1, HEADS, TERMS, WIDTH), (512, 128, 1, 16), F32)[0]
    seen = draft.one("aten.reshape.default", (wrong, STATE), STATE, F32, kind="copy")
    draft.call("aten.copy_.default", (draft.state, seen), STATE, dtype=F32, mutates=("state",))


def to_another(draft: Step, last: Ref) -> None:
    draft.given("other", STATE, F32, ValueKind.STATE)
    draft.call("aten.copy_.default", (Ref("other"), last), STATE, dtype=F32, mutates=("other",))


def read_besides(draft: Step, last: Ref) -> None:
    draft.shown.append(draft.one("aten.neg.default", (last,), STATE, F32))
    draft.call("aten.copy_.default", (draft.state, last), STATE, dtype=F32, mutates=("state",))


def given_back(draft: Step, last: Ref) -> None:
    draft.shown.append(last)
    draft.call("aten.copy_.default", (draft.state, last), STATE, dtype=F32, mutates=("state",))


def not_written(draft: Step, last: Ref) -> None:
    draft.shown.append(last)


def scaled_first(draft: Step, last: Ref) -> None:
    half = draft.one("aten.mul.Tensor", (last, 0.5), STATE, F32)
    draft.call("aten.copy_.default", (draft.state, half), STATE, dtype=F32, mutates=("state",))


def written_twice(draft: Step, last: Ref) -> None:
    draft.call("aten.copy_.default", (draft.state, last), STATE, dtype=F32, mutates=("state",))
    draft.call("aten.copy_.default", (draft.state, draft.given("other", STATE, F32)), STATE, dtype=F32, mutates=("state",))


def shown_by_a_view(draft: Step, last: Ref) -> None:
    flat = (STATE[1] * STATE[2] * STATE[3],)
    part = draft.one("aten.view.default", (draft.state, flat), flat, F32, kind="view")
    draft.call("aten.copy_.default", (draft.state, last), STATE, dtype=F32, mutates=("state",))
    draft.shown.append(draft.one("aten.neg.default", (part,), flat, F32))


WRITES = (written_twice, shown_by_a_view, turned_back, to_another, read_besides, given_back, not_written, scaled_first)


@pytest.mark.parametrize("write", WRITES, ids=lambda one: one.__name__)
def test_states_that_are_not_simply_written_are_left_to_the_framework(write: Callable[[Step, Ref], None]) -> None:
    assert widest(Step().finished(write=write)) is None


@pytest.mark.parametrize("axis", [(-2,), (-1,)], ids=["another axis", "the last axis"])
def test_lines_are_normed_over_their_last_axis_alone(axis: tuple[int, ...]) -> None:
    def keys(draft: Step) -> Ref:
        line = draft.cast(draft.given("k", LINES, BF16), LINES, F32)
        one = (1, 1, 1, 1) if axis == (-1,) else LINES
        total = draft.one("aten.sum.dim_IntList", (draft.one("aten.mul.Tensor", (line, line), LINES, F32), axis, True), one, F32)
        root = draft.one("aten.rsqrt.default", (draft.one("aten.add.Tensor", (total, 1e-6), one, F32),), one, F32)
        return draft.one("aten.mul.Tensor", (line, root), LINES, F32)

    match = widest(Step().finished(keys=keys))
    assert match is not None and (dict(match.attributes).get("keys_eps", 0.0) == 1e-6) is (axis == (-1,))


def normed(line: Ref, draft: Step, shape: tuple[int, ...], eps: float = 1e-6) -> Ref:
    one = (*shape[:-1], 1)
    total = draft.one("aten.sum.dim_IntList", (draft.one("aten.mul.Tensor", (line, line), shape, F32), (-1,), True), one, F32)
    root = draft.one("aten.rsqrt.default", (draft.one("aten.add.Tensor", (total, eps), one, F32),), one, F32)
    return draft.one("aten.mul.Tensor", (line, root), shape, F32)


@pytest.mark.parametrize("eps", [0.0, -1e-6, 1e-50])
def test_lines_without_a_positive_eps_are_no_normed_ones(eps: float) -> None:
    match = widest(Step().finished(keys=lambda draft: normed(draft.cast(draft.given("k", LINES, BF16), LINES, F32), draft, LINES, eps)))
    assert match is not None and "keys_eps" not in dict(match.attributes)


def test_lines_are_normed_one_by_one() -> None:
    """A norm of several lines as one, which are told apart behind it, is none of each; nor is one whose squares are summed in float16."""
    def together(draft: Step) -> Ref:
        whole = normed(draft.cast(draft.given("k", (1, 1, 2 * TERMS), BF16), (1, 1, 2 * TERMS), F32), draft, (1, 1, 2 * TERMS))
        return draft.one("aten.view.default", (whole, (1, 1, 2, TERMS)), (1, 1, 2, TERMS), F32, kind="view")

    def narrow(draft: Step) -> Ref:
        made = normed(draft.cast(draft.given("k", LINES, BF16), LINES, F32), draft, LINES)
        draft.nodes = [evolve(node, kwargs=(("dtype", Symbol("dtype", "float16")),)) if node.op.startswith("aten.sum") else node
                       for node in draft.nodes]
        return made

    for keys in (together, narrow):
        match = widest(Step().finished(keys=keys))
        assert match is not None and "keys_eps" not in dict(match.attributes)


def test_a_bias_that_makes_the_step_larger_is_no_bias_of_heads() -> None:
    draft = Step()
    pair, both = (1, 2, 1), (1, 2, 2)
    step = draft.one("aten.add.Tensor", (draft.given("dt", pair, F32), draft.weight("dt_bias", 2, dtype=F32)), both, F32)
    step = draft.one("aten.view.default", (draft.one("aten.softplus.default", (step,), both, F32), OF_HEADS), OF_HEADS, F32, kind="view")
    keys, queries = draft.given("k", LINES, F32), draft.given("q", LINES, F32)
    arguments = (draft.state, step, draft.given("x", SHAPE, BF16), keys, queries)
    y, last = draft.call("agentcompile.recurrence.default", arguments, SHAPE, STATE, dtype=F32)
    draft.call("aten.copy_.default", (draft.state, last), STATE, dtype=F32, mutates=("state",))
    match = widest(draft.graph(y))
    assert match is not None and match.operand("decay_bias") is None and match.need("decay").spec.numel == HEADS


def test_a_step_that_scales_x_is_read_whole() -> None:
    """What is multiplied with x is the product with the rates, not the step alone."""
    draft = Step()
    soft = draft.softplus(draft.given("dt", OF_HEADS, BF16))
    logarithm = draft.given("A_log", (HEADS,), F32)
    rate = draft.one("aten.neg.default", (draft.one("aten.exp.default", (logarithm,), (HEADS,), F32),), (HEADS,), F32)
    product = draft.one("aten.mul.Tensor", (rate, draft.cast(soft, OF_HEADS, F32)), OF_HEADS, F32)
    given = (draft.state, product, draft.given("x", SHAPE, BF16), draft.given("k", LINES, F32), draft.given("q", LINES, F32))
    y, last = draft.call("agentcompile.recurrence.default", (*given, None, None, None, None, True), SHAPE, STATE, dtype=F32)
    draft.call("aten.copy_.default", (draft.state, last), STATE, dtype=F32, mutates=("state",))
    match = widest(draft.graph(y))
    assert match is not None and match.operand("rates") is None and match.need("decay").values == (product.value,)


def convolution(state: tuple[int, ...], weight_kind: ValueKind = ValueKind.WEIGHT) -> list[Match]:
    draft, shape = Draft(), (1, 8, 4)
    kept = draft.given("state", state, F32, ValueKind.STATE)
    seen = draft.one("aten.view.default", (kept, shape), shape, F32, kind="view") if state != shape else kept
    arguments = (seen, draft.given("x", (1, 8, 1), F32), draft.given("weight", shape[1:], F32, weight_kind))
    out, last = draft.call("agentcompile.causal_convolution.default", arguments, (1, 8, 1), shape, dtype=F32)
    if seen is not kept:
        last = draft.one("aten.view.default", (last, state), state, F32, kind="view")
    draft.call("aten.copy_.default", (kept, last), state, dtype=F32, mutates=("state",))
    return list(ConvolutionStepRule().find(draft.graph(out), FAKE))


@pytest.mark.parametrize("state", [(1, 8, 4), (8, 4), (1, 8, 1, 4), (2, 4, 4)])
def test_convolutions_have_their_channels_whatever_their_states_are_called(state: tuple[int, ...]) -> None:
    match, = convolution(state)
    assert (match.integer("channels"), match.integer("width")) == (8, 4)


def test_a_convolution_with_computed_weights_is_left_to_the_framework() -> None:
    assert convolution((1, 8, 4), ValueKind.INPUT) == []
