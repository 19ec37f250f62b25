"""Kernels that choose among near scores are judged by what they chose: it must be one that the scores leave open, and all else what the
framework's operators make by the same choice."""

from collections.abc import Callable
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import expert_layers
import pytest
import torch
from agentcompile_rules_transformers.draft import Draft
from expert_layers import SCORINGS, Choice, Layer, with_expert
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentcompile_core.installation import program_check, step_check
from agentcompile_core.ir.graph import DType, Graph, ValueKind
from agentcompile_core.ops import operator_names
from agentcompile_core.ops.decisions import behind, decisions
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import Bounded
from agentcompile_core.ops.reference.choice import may_be_chosen

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)
Tensors = dict[str, torch.Tensor]

LAYERS = st.builds(expert_layers.layer, scoring=st.sampled_from(SCORINGS), experts=st.integers(6, 40), slots=st.integers(1, 4),
                   normalized=st.booleans(), dtype=st.sampled_from([DType.F32, DType.BF16]))
GENERATORS = st.integers(0, 2**20).map(lambda seed: torch.Generator().manual_seed(seed))


def judged(layer: Layer, given_: Tensors, found: Tensors, apart: bool = False) -> str:
    """What the check says of a kernel that gives ``found``; ``apart``: of one for the router, and one for what is behind it."""
    names = [node.name for node in layer.graph.nodes]
    return judged_of(layer.graph, [names[:layer.router], names[layer.router:]] if apart else [names], given_, found)


def judged_of(graph: Graph, parts: list[list[str]], given_: Tensors, found: Tensors) -> str:
    """The same of a graph whose nodes are those of kernels."""
    environment = dict(given_)
    segments = [SimpleNamespace(step=object(), nodes=tuple(part), name=f"step {i}") for i, part in enumerate(parts)]

    def run_of(part: list[str]) -> Callable[[], None]:
        made = {name for node in part for name in graph.node_by_name[node].outputs}
        return lambda: environment.update({name: tensor.clone() for name, tensor in found.items() if name in made})

    pieces = [SimpleNamespace(run=run_of(part)) for part in parts]
    bound: Any = SimpleNamespace(graph=graph, environment=environment, segments=tuple(segments), parts=tuple(pieces))
    limit = program_check._bound(graph)
    with torch.inference_mode():  # as an installed program is looked at
        return step_check.difference(bound, 0, lambda one, other: program_check._beyond(one, other, limit))


def chosen_by(layer: Layer, given_: Tensors, generator: torch.Generator) -> Choice:
    """What an honest kernel chooses; groups that it does not tell, as the framework does: no other ones could be asked for."""
    groups = None
    if layer.scoring == "hidden groups":
        largest = compile_nodes(layer.graph, layer.graph.nodes[:3], device="cpu", outputs=["amax_2.0"]).run(given_)
        groups = largest["amax_2.0"].flatten().topk(layer.taken).indices
    return layer.chooses(given_, generator, groups)


@SETTINGS
@given(layer=LAYERS, gaps=st.sampled_from(["equal", "near", "apart"]), generator=GENERATORS, apart=st.booleans())
def test_an_honest_kernel_is_right_whatever_of_near_ones_it_takes(layer: Layer, gaps: str, generator: torch.Generator, apart: bool) -> None:
    given_ = layer.drawn(generator, gaps)
    assert judged(layer, given_, layer.gives(given_, chosen_by(layer, given_, generator)), apart) == ""


def index_beside(layer: Layer, given_: Tensors, choice: Choice, slot: int) -> Tensors:
    told = with_expert(choice, slot, (int(choice.experts[slot]) + 1) % layer.experts)
    return {**layer.gives(given_, choice), layer.chosen: layer.gives(given_, told)[layer.chosen]}


def another_weight(layer: Layer, given_: Tensors, choice: Choice, slot: int) -> Tensors:
    found = layer.gives(given_, choice)
    found[layer.weights].view(-1)[found[layer.weights].argmax()] *= 1.5
    return found


def row_of_another(layer: Layer, given_: Tensors, choice: Choice, slot: int) -> Tensors:
    """Where scores are equal, of one that might have been chosen."""
    scores = layer.scores(given_, None)
    scores[choice.experts] = -torch.inf
    found = layer.gives(given_, choice)
    _largest_row(layer, found).copy_(layer.rows(given_, scores.argmax()))
    return found


def lost_row(layer: Layer, given_: Tensors, choice: Choice, slot: int) -> Tensors:
    found = layer.gives(given_, choice)
    _largest_row(layer, found).zero_()
    return found


def turned_rows(layer: Layer, given_: Tensors, choice: Choice, slot: int) -> Tensors:
    assume(layer.slots > 1)
    found = layer.gives(given_, choice)
    found[layer.out] = found[layer.out].roll(1, 1)
    return found


def one_twice(layer: Layer, given_: Tensors, choice: Choice, slot: int) -> Tensors:
    assume(layer.slots > 1)
    return layer.gives(given_, with_expert(choice, slot, int(choice.experts[slot - 1])))


def no_expert(layer: Layer, given_: Tensors, choice: Choice, slot: int) -> Tensors:
    found = layer.gives(given_, choice)
    found[layer.chosen].view(-1)[slot] = -1 if slot else layer.experts
    return found


def worse_expert(layer: Layer, given_: Tensors, choice: Choice, slot: int) -> Tensors:
    """With its own weight and row."""
    scores = _among(layer, given_)
    worst = int(scores.argmin())
    assume(scores[choice.experts[slot]] - scores[worst] > 1e-3)
    return layer.gives(given_, with_expert(choice, slot, worst))


def other_order(layer: Layer, given_: Tensors, choice: Choice, slot: int) -> Tensors:
    """With weights and rows in that order."""
    scores = _among(layer, given_)[choice.experts]
    assume(scores.max() - scores.min() > 1e-3)
    return layer.gives(given_, Choice(groups=choice.groups, experts=choice.experts.flip(0)))


def worse_group(layer: Layer, given_: Tensors, choice: Choice, slot: int) -> Tensors:
    """With the best experts of it."""
    assume(choice.groups is not None)
    largest = layer.scores(given_, None).reshape(-1, expert_layers.GROUP).amax(-1)
    worst = int(largest.argmin())
    assert choice.groups is not None
    assume(float(largest[choice.groups].min() - largest[worst]) > 1e-3)
    groups = choice.groups.clone()
    groups[-1] = worst
    chosen = layer.chooses(given_, torch.Generator().manual_seed(1), groups)
    assume(sorted(chosen.experts.tolist()) != sorted(choice.experts.tolist()) or layer.groups)
    return layer.gives(given_, chosen)


def _largest_row(layer: Layer, found: Tensors) -> torch.Tensor:
    """A bound on the rms of all rows has room for one that is nearly zero."""
    rows = found[layer.out].view(layer.slots, -1)
    return rows[rows.float().norm(dim=-1).argmax()]


def _among(layer: Layer, given_: Tensors) -> torch.Tensor:
    scores = layer.scores(given_, None)
    return scores + given_["bias"].float() if "bias" in given_ else scores


WRONG: dict[str, Callable[[Layer, Tensors, Choice, int], Tensors]] = {
    one.__name__: one for one in (index_beside, another_weight, row_of_another, lost_row, turned_rows, one_twice, no_expert, worse_expert,
                                  other_order, worse_group)
}


@pytest.mark.parametrize("what", WRONG)
@settings(SETTINGS, max_examples=40)
@given(layer=LAYERS, gaps=st.sampled_from(["equal", "near", "apart"]), generator=GENERATORS, apart=st.booleans(), slot=st.integers(0, 3))
def test_a_wrong_kernel_is_refused_also_where_it_took_another_of_near_ones(
        what: str, layer: Layer, gaps: str, generator: torch.Generator, apart: bool, slot: int) -> None:
    given_ = layer.drawn(generator, gaps)
    choice = chosen_by(layer, given_, generator)
    found = WRONG[what](layer, given_, choice, min(slot, layer.slots - 1))
    assert judged(layer, given_, found, apart) != ""


@pytest.mark.parametrize("kind", ["of known numbers", "of numbers of which nothing is known", "that also writes a state"])
def test_another_choice_is_taken_only_where_it_can_be_judged(kind: str) -> None:
    """What an operator without a rule may give is not known, nor what a state was that a step has written already."""
    draft = Draft()
    scores = draft.given("scores", (1, 4), DType.F32)
    if kind == "of numbers of which nothing is known":
        scores = draft.one("aten.asinh.default", (scores,), (1, 4), DType.F32)
    best, chosen = draft.call("aten.topk.default", (scores, 2), (1, 2), (1, 2), dtype=DType.F32)
    draft.retype(chosen, DType.I64)
    state = draft.given("state", (1, 2), DType.F32, ValueKind.STATE)
    if kind == "that also writes a state":
        draft.call(operator_names.COPY, (state, best), (1, 2), dtype=DType.F32, mutates=("state",))
    graph, given_ = draft.graph(best, chosen), {"scores": torch.tensor([[0.0, 2.0, 1.0, 1.0]]), "state": torch.zeros(1, 2)}
    same = compile_nodes(graph, device="cpu").run(given_)
    other = {**same, chosen.value: torch.tensor([[1, 5 - int(same[chosen.value][0, 1])]])}
    assert judged_of(graph, [[node.name for node in graph.nodes]], given_, same) == ""
    assert (judged_of(graph, [[node.name for node in graph.nodes]], given_, other) == "") is (kind == "of known numbers")


@pytest.mark.parametrize("op", ["aten.max.dim", "aten.min.dim"])
@pytest.mark.parametrize("kept", [True, False])
def test_behind_a_place_that_is_given_the_extremes_are_the_same(op: str, kept: bool) -> None:
    """And what is picked by the place is picked there."""
    draft, shape = Draft(), (3, 1) if kept else (3,)
    x, others = draft.given("x", (3, 4), DType.F32), draft.given("others", (4,), DType.F32)
    best, place = draft.call(op, (x, 1, kept), shape, shape, dtype=DType.F32)
    draft.retype(place, DType.I64)
    flat = draft.one("aten.view.default", (place, (3,)), (3,), DType.I64)
    graph = draft.graph(best, place, draft.one("aten.index_select.default", (others, 0, flat), (3,), DType.F32))
    (made,) = decisions(graph.nodes)
    given_ = {"x": torch.zeros(3, 4), "others": torch.arange(4.0), place.value: torch.tensor([2, 3, 0]).view(shape)}
    found = compile_nodes(behind(graph, [made]), device="cpu").run(given_)
    assert (made.scores, made.index, made.dim, made.largest, made.first) == ("x", place.value, 1, op == "aten.max.dim", True)
    assert found[best.value].tolist() == torch.zeros(shape).tolist() and found[graph.outputs[2]].tolist() == [2.0, 3.0, 0.0]


def test_the_places_of_an_argmax_are_a_decision_too() -> None:
    draft = Draft()
    token = draft.one(operator_names.ARGMAX, (draft.given("logits", (1, 4), DType.F32),), (1,), DType.I64)
    place = draft.one("aten.argmin.default", (draft.given("x", (3, 4), DType.F32), 1), (3,), DType.I64)
    graph = draft.graph(token, place)
    assert [(one.index, one.dim, one.largest) for one in decisions(graph.nodes)] == [(token.value, None, True), (place.value, 1, False)]
    assert behind(graph, decisions(graph.nodes)).nodes == ()


def open_by_trying(low: torch.Tensor, high: torch.Tensor, chosen: list[int]) -> bool:
    """Whether some numbers between ``low`` and ``high`` have these as their best, best first: all that matter are tried."""
    levels = [[x for x in {*low.tolist(), *high.tolist()} if a <= x <= b] for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    left = [i for i in range(len(levels)) if i not in chosen]
    return any(all(one[a] >= one[b] for a, b in pairwise(chosen)) and all(one[chosen[-1]] >= one[i] for i in left)
               for one in product(*levels))


@settings(SETTINGS, max_examples=400)
@given(data=st.data())
def test_what_errors_leave_open_is_what_some_numbers_within_them_have(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4), "count")
    value = torch.tensor(data.draw(st.lists(st.integers(-2, 2), min_size=count, max_size=count), "value"), dtype=torch.float64)
    error = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count), "error"), dtype=torch.float64)
    chosen = data.draw(st.permutations(range(count)), "chosen")[:data.draw(st.integers(1, count), "slots")]
    largest = data.draw(st.booleans(), "largest")
    scores = Bounded(value if largest else -value, error)
    wanted = open_by_trying(value - error, value + error, chosen)
    assert may_be_chosen(scores, torch.tensor(chosen), -1, largest=largest) is wanted
    several = Bounded(torch.stack((scores.value, scores.value), 1), torch.stack((error, torch.zeros_like(error)), 1))
    both = torch.tensor([chosen, value.argsort(descending=True, stable=True)[:len(chosen)].tolist()]).T
    assert may_be_chosen(several, both, 0, largest=largest) is wanted


@pytest.mark.parametrize("op", [torch.argmax, torch.argmin])
@given(row=st.lists(st.sampled_from([-torch.inf, -1.0, 0.0, 2.0, torch.inf, torch.nan]), min_size=1, max_size=5))
def test_of_equals_the_first_is_the_best_place(op: Callable[[torch.Tensor], torch.Tensor], row: list[float]) -> None:
    scores, first = torch.tensor(row), int(op(torch.tensor(row)))
    for place in range(len(row)):
        said = may_be_chosen(Bounded(scores.double(), torch.zeros(len(row)).double()), torch.tensor(place), None,
                             largest=op is torch.argmax, first=True)
        assert said is (place == first), place


@given(row=st.lists(st.sampled_from([-torch.inf, -1.0, 0.0, 2.0, torch.inf, torch.nan]), min_size=1, max_size=6), largest=st.booleans(),
       count=st.integers(1, 6))
def test_what_torch_takes_is_open_whatever_is_not_finite(row: list[float], largest: bool, count: int) -> None:
    found = torch.tensor(row).topk(min(count, len(row)), largest=largest).indices
    assert may_be_chosen(Bounded(torch.tensor(row).double(), torch.zeros(len(row)).double()), found, 0, largest=largest)
