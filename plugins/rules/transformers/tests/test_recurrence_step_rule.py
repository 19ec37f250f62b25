"""What steps of recurrences take in of the nodes around them, and what they leave alone: other readers, other states, other functions."""

from collections.abc import Callable

import pytest
from agentcompile_rules_transformers.draft import Draft
from agentcompile_rules_transformers.recurrence_step import RecurrenceStepRule

from agentcompile_core.plugin_api import DType, Graph, Match, Ref, ValueKind
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


WRITES = (turned_back, to_another, read_besides, given_back, not_written, scaled_first)


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
