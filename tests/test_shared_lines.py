"""Heads share lines of keys and queries that were repeated for them, if all steps on the way work row by row and are read nowhere else."""

from collections.abc import Callable

import pytest
import torch
from agentcompile_rules_transformers.draft import Draft
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.operator_names import RECURRENCE
from agentcompile_core.plugin_api import DType, Graph, Ref, Symbol, ValueKind
from agentcompile_core.stages.capture.rewrite import eliminate_dead_code
from agentcompile_core.stages.capture.shared_lines import share_lines

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
REPEAT = "aten.repeat_interleave.self_int"


@frozen(kw_only=True)
class Case:
    """A delta rule whose ``lines`` of keys and queries are each repeated for ``shared`` heads; ``again`` heads read what comes of one."""

    lines: int = 2
    shared: int = 3
    again: int = 1
    tokens: int = 4
    terms: int = 8
    dtype: DType = DType.BF16
    norm: str = "sum"  # what rows are divided by: sum, mean, amax, norm, or nothing
    axis: int = 2  # of the repetition, or the same from behind
    apart: bool = False  # whether lines lie term by term, as behind a convolution
    same: bool = False  # whether keys and queries come from one value

    @property
    def repeated(self) -> int:
        """Lines behind the repetition."""
        return self.lines * self.shared

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of keys and queries."""
        return 1, self.tokens, self.repeated, self.terms


CASES = st.builds(
    Case, lines=st.integers(1, 4), shared=st.integers(2, 4), again=st.integers(1, 2), tokens=st.integers(1, 9), terms=st.integers(1, 40),
    dtype=st.sampled_from([DType.BF16, DType.F16, DType.F32]), norm=st.sampled_from(["", "sum", "mean", "amax", "norm"]),
    axis=st.sampled_from([2, -2]), apart=st.booleans(), same=st.booleans())


class Delta(Draft):
    """The graph of a case, step by step."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def lines(self, name: str) -> Ref:
        """Lines as the model has them before it repeats them."""
        case = self.case
        if not case.apart:
            return self.given(name, (1, case.tokens, case.lines, case.terms), case.dtype)
        x = self.given(name, (1, case.lines, case.terms, case.tokens), case.dtype)
        strides = (case.lines * case.terms * case.tokens, 1, case.terms * case.tokens, case.tokens)
        return self.apart("aten.permute.default", (x, (0, 3, 1, 2)), (1, case.tokens, case.lines, case.terms), strides, case.dtype)[0]

    def repeated(self, x: Ref) -> Ref:
        """``x``, each line as often as heads share it."""
        return self.one(REPEAT, (x, self.case.shared, self.case.axis), self.case.shape, self.case.dtype)

    def rows(self, x: Ref) -> Ref:
        """``x`` in float32, with rows of one length."""
        shape, one = self.case.shape, (*self.case.shape[:3], 1)
        wide = self.cast(x, shape, DType.F32) if self.case.dtype is not DType.F32 else x
        if not self.case.norm:
            return wide
        if self.case.norm == "norm":
            length = self.one("aten.linalg_vector_norm.default", (wide, 2, (-1,), True), one, DType.F32)
            return self.one("aten.div.Tensor", (wide, self.one("aten.clamp_min.default", (length, 1e-6), one, DType.F32)), shape, DType.F32)
        square = self.one("aten.mul.Tensor", (wide, wide), shape, DType.F32)
        op = {"sum": "aten.sum.dim_IntList", "mean": "aten.mean.dim", "amax": "aten.amax.default"}[self.case.norm]
        less = self.one("aten.add.Tensor", (self.one(op, (square, (3,), True), one, DType.F32), 1e-6), one, DType.F32)
        return self.one("aten.mul.Tensor", (wide, self.one("aten.rsqrt.default", (less,), one, DType.F32)), shape, DType.F32)

    def recurrence(self, keys: Ref, queries: Ref) -> tuple[Ref, ...]:
        """The rule over ``keys`` and ``queries``; its x is "x"."""
        tokens, heads, terms = self.case.tokens, self.case.repeated * self.case.again, self.case.terms
        x, decay = self.given("x", (1, tokens, heads, terms), DType.F32), self.given("decay", (1, tokens, heads), DType.F32)
        strength = self.given("strength", (1, tokens, heads), DType.F32)
        return self.call(RECURRENCE, (None, decay, x, keys, queries, None, strength), (1, tokens, heads, terms), (1, heads, terms, terms),
                         dtype=DType.F32)

    def whole(self, other: Callable[["Delta", Ref], Ref] | None = None) -> Graph:
        """The finished graph; ``other`` is done to the keys behind their rows."""
        keys = self.rows(self.repeated(self.lines("k")))
        queries = keys if self.case.same else self.rows(self.repeated(self.lines("q")))
        keys = other(self, keys) if other is not None else keys
        scaled = self.one("aten.mul.Tensor", (queries, 0.25), self.case.shape, DType.F32)
        return self.graph(*self.recurrence(keys, scaled))


def results(graph: Graph, outputs: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    env = {value.name: (torch.rand(value.spec.shape, generator=generator) - 0.5).to(getattr(torch, value.spec.dtype.value))
           for value in graph.values if value.kind is not ValueKind.INTERMEDIATE}
    return compile_nodes(graph, device="cpu", outputs=outputs or None).run(env)


def is_shared(graph: Graph) -> bool:
    """Whether the recurrence reads as many lines as there are, with the same results; where it does not the graph is as it was."""
    after = share_lines(graph).verify()
    if after is graph:
        return False
    got, want = results(after), results(graph)
    assert all(torch.equal(got[name], want[name]) for name in graph.outputs)
    assert not any(node.op == REPEAT for node in after.nodes) and eliminate_dead_code(after) == after
    made = [name for node in after.nodes for name in node.outputs]
    for name, tensor in results(after, tuple(made)).items():
        spec = after.spec(name)
        assert tuple(tensor.shape) == spec.shape and str(tensor.dtype) == f"torch.{spec.dtype.value}", name
        assert (tuple(tensor.stride()) == spec.strides) if spec.strides else tensor.is_contiguous(), name
    return True


@SETTINGS
@given(CASES)
def test_heads_share_lines_that_were_repeated_for_them(case: Case) -> None:
    graph = Delta(case).whole()
    assert is_shared(graph)
    last = share_lines(graph).node_by_name[graph.producer[graph.outputs[0]].name]
    assert all(share_lines(graph).spec(name).shape == (1, case.tokens, case.lines, case.terms) for name in last.inputs[2:4])


def test_lines_that_lie_apart_are_copied_in_order() -> None:
    for apart in (False, True):
        nodes = share_lines(Delta(Case(apart=apart)).whole()).nodes
        assert [node.kind for node in nodes if node.op == "aten.contiguous.default"] == ["copy", "copy"] * apart


def test_lines_without_a_step_between_are_shared_too() -> None:
    draft = Delta(Case(dtype=DType.F32))
    graph = draft.graph(*draft.recurrence(draft.repeated(draft.lines("k")), draft.repeated(draft.lines("q"))))
    assert is_shared(graph) and [node.op for node in share_lines(graph).nodes] == [RECURRENCE]


def _added(draft: Delta, keys: Ref) -> Ref:
    """Other numbers for every head."""
    return draft.one("aten.add.Tensor", (keys, draft.given("other", draft.case.shape, DType.F32)), draft.case.shape, DType.F32)


def _of_heads(draft: Delta, keys: Ref) -> Ref:
    """Other numbers for every head, the same for all terms."""
    other = draft.given("other", (draft.case.repeated, 1), DType.F32)
    return draft.one("aten.mul.Tensor", (keys, other), draft.case.shape, DType.F32)


def _softmax(draft: Delta, keys: Ref) -> Ref:
    return draft.one("aten.softmax.int", (keys, 2), draft.case.shape, DType.F32)


def _sum(draft: Delta, keys: Ref) -> Ref:
    shape = draft.case.shape
    total = draft.one("aten.sum.dim_IntList", (keys, (2,), True), (*shape[:2], 1, shape[3]), DType.F32)
    return draft.one("aten.sub.Tensor", (keys, total), shape, DType.F32)


def _sum_of_both(draft: Delta, keys: Ref) -> Ref:
    shape = draft.case.shape
    total = draft.one("aten.sum.dim_IntList", (keys, (2, 3), True), (*shape[:2], 1, 1), DType.F32)
    return draft.one("aten.sub.Tensor", (keys, total), shape, DType.F32)


def _flipped(draft: Delta, keys: Ref) -> Ref:
    return draft.one("aten.flip.default", (keys, (2,)), draft.case.shape, DType.F32)


def _of_one_token(draft: Delta, keys: Ref) -> Ref:
    """The same numbers for all tokens."""
    (_, _, heads, terms), shared = draft.case.shape, draft.case.shared
    less = draft.given("other", (1, 1, draft.case.lines, terms), DType.F32)
    other = draft.one(REPEAT, (less, shared, 2), (1, 1, heads, terms), DType.F32)
    return draft.one("aten.add.Tensor", (keys, other), draft.case.shape, DType.F32)


def _moved(draft: Delta, keys: Ref) -> Ref:
    """Numbers that lie apart."""
    tokens, heads, terms = draft.case.shape[1:]
    strides, order = (tokens * heads * terms, 1, terms * tokens, tokens), Symbol("memory_format", "channels_last")
    return draft.apart("aten.clone.default", (keys,), draft.case.shape, strides, DType.F32, memory_format=order)[0]


def _total(draft: Delta, keys: Ref) -> Ref:
    """Rows less one number for all that there is."""
    total = draft.one("aten.sum.dim_IntList", (keys, None, True), (1, 1, 1, 1), DType.F32)
    return draft.one("aten.sub.Tensor", (keys, total), draft.case.shape, DType.F32)


def _without_axis(draft: Delta, keys: Ref) -> Ref:
    """As many terms as heads, less a sum of each row that has lost its axis."""
    total = draft.one("aten.sum.dim_IntList", (keys, (3,)), draft.case.shape[:3], DType.F32)
    return draft.one("aten.sub.Tensor", (keys, total), draft.case.shape, DType.F32)


def _written(draft: Delta, keys: Ref) -> Ref:
    return draft.call("aten.mul_.Scalar", (keys, 2.0), draft.case.shape, dtype=DType.F32, mutates=(keys.value,))[0]


@pytest.mark.parametrize("other", [_added, _of_heads, _softmax, _sum, _sum_of_both, _total, _without_axis, _flipped, _moved, _of_one_token,
                                   _written])
def test_what_is_not_done_row_by_row_stays(other: Callable[[Delta, Ref], Ref]) -> None:
    graph = Delta(Case(tokens=6, terms=6)).whole(other)
    assert results(graph) and not is_shared(graph)


@pytest.mark.parametrize("place", ["repeated", "rows", "output", "x", "decay"])
def test_what_something_else_reads_stays(place: str) -> None:
    draft = Delta(Case(dtype=DType.F32, terms=1) if place == "decay" else Case(dtype=DType.F32))
    k = draft.repeated(draft.lines("k"))
    keys, queries = draft.rows(k), draft.rows(draft.repeated(draft.lines("q")))
    outputs = [*draft.recurrence(keys, queries)]
    if place in ("repeated", "rows"):
        outputs.append(draft.one("aten.neg.default", (k if place == "repeated" else keys,), draft.case.shape, DType.F32))
    elif place == "output":
        outputs.append(keys)
    elif place == "x":
        last = draft.nodes.pop()
        draft.nodes.append(evolve(last, args=(*last.args[:2], keys, *last.args[3:])))
    else:  # decays of every term
        last = draft.nodes.pop()
        draft.nodes.append(evolve(last, args=(None, keys, *last.args[2:])))
    graph = draft.graph(*outputs)
    assert results(graph) and not is_shared(graph)


def test_keys_or_queries_alone_stay_repeated() -> None:
    for only in ("keys", "queries"):
        draft = Delta(Case(dtype=DType.F32))
        both = {name: draft.repeated(draft.lines(name)) if name == only else draft.given(name, draft.case.shape, DType.F32)
                for name in ("keys", "queries")}
        graph = draft.graph(*draft.recurrence(both["keys"], both["queries"]))
        assert results(graph) and not is_shared(graph)


def test_other_numbers_of_lines_stay_repeated() -> None:
    draft, shape = Delta(Case(lines=2, shared=2, dtype=DType.F32)), (1, 4, 1, 8)
    queries = draft.one(REPEAT, (draft.given("q", shape, DType.F32), 4, 2), draft.case.shape, DType.F32)
    graph = draft.graph(*draft.recurrence(draft.rows(draft.repeated(draft.lines("k"))), queries))
    assert results(graph) and not is_shared(graph)


@pytest.mark.parametrize("how", ["whole blocks", "tokens", "terms", "as it is"])
def test_other_repetitions_stay(how: str) -> None:
    draft, found = Delta(Case(dtype=DType.F32)), list[Ref]()
    shape, axis = draft.case.shape, {"tokens": 1, "as it is": 2, "terms": 3}.get(how)
    for name in ("k", "q"):
        if how == "whole blocks":
            found.append(draft.one("aten.repeat.default", (draft.lines(name), (1, 1, draft.case.shared, 1)), shape, DType.F32))
            continue
        times = 1 if how == "as it is" else 2
        less = tuple(extent // times if place == axis else extent for place, extent in enumerate(shape))
        found.append(draft.one(REPEAT, (draft.given(name, less, DType.F32), times, axis), shape, DType.F32))
    graph = draft.graph(*draft.recurrence(draft.rows(found[0]), draft.rows(found[1])))
    assert results(graph) and not is_shared(graph)


@pytest.mark.parametrize("late", [False, True])
def test_lines_that_are_written_before_they_are_read_stay(late: bool) -> None:
    draft = Delta(Case(dtype=DType.F32))
    k = draft.lines("k")
    keys = draft.repeated(k)
    if not late:
        draft.call("aten.mul_.Scalar", (k, 2.0), (1, 4, 2, 8), dtype=DType.F32, mutates=("k",))
    outputs = draft.recurrence(draft.rows(keys), draft.rows(draft.repeated(draft.lines("q"))))
    if late:
        draft.call("aten.mul_.Scalar", (k, 2.0), (1, 4, 2, 8), dtype=DType.F32, mutates=("k",))
    assert is_shared(draft.graph(*outputs)) is late


def test_two_recurrences_share_lines_each_for_itself() -> None:
    for apart in (True, False):
        draft = Delta(Case(dtype=DType.F32))
        first = draft.rows(draft.repeated(draft.lines("k"))), draft.rows(draft.repeated(draft.lines("q")))
        second = (draft.rows(draft.repeated(Ref("k"))), draft.rows(draft.repeated(Ref("q")))) if apart else first
        outputs = draft.recurrence(*first)
        last = draft.nodes[-1]
        args = (None, *last.args[1:3], *second, *last.args[5:])
        again = draft.call(RECURRENCE, args, *(draft.case.shape, (1, 6, 8, 8)), dtype=DType.F32)
        assert is_shared(draft.graph(*outputs, *again)) is apart
