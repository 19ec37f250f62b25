"""A decode step whose whole result is too far from the framework's is judged kernel by kernel: right ones serve, wrong ones do not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.expert_cases import routed_experts_case, router_case
from attrs import evolve
from capture_models import SIZES, tiny
from chaotic_check import chaotic
from hypothesis import given, settings
from hypothesis import strategies as st

import agentcompile_core as ac
from agentcompile_core.configuration import Config
from agentcompile_core.installation import program_check, step_check
from agentcompile_core.ops.dtypes import torch_dtype
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.runtime.bound_program import BoundProgram
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.store import Store

pytest.importorskip("agentcompile_validator_emulation")

FEW = settings(max_examples=12, deadline=None, derandomize=True, database=None)
Checked = tuple[Any, Callable[[], tuple[str, list[str]]]]


@pytest.fixture(scope="module")
def checked(emulated_tiny: Any) -> Checked:
    """A session of emulated kernels, and its check: what is wrong, and the notes."""
    model = emulated_tiny
    assert model.session is not None
    session, weights = model.session, WeightStore(model.loaded.module, "cpu")

    def check() -> tuple[str, list[str]]:
        notes: list[str] = []
        return program_check.difference(session, model.compilation.programs, weights, model.loaded, notes), notes

    assert check() == ("", [])
    return session, check


@contextmanager
def spoiled(bound: BoundProgram, index: int, behind: Callable[[], None]) -> Iterator[None]:
    """The program with something done behind one of its parts."""
    parts = bound._parts

    def run() -> None:
        parts[index].run()
        behind()

    bound._parts = (*parts[:index], evolve(parts[index], run=run), *parts[index + 1:])
    try:
        yield
    finally:
        bound._parts = parts


def steps_of(bound: BoundProgram) -> list[int]:
    found = [index for index, segment in enumerate(bound.segments) if segment.step is not None]
    assert len(found) > 10
    return found


def test_a_right_program_serves_though_its_whole_result_is_far_off(checked: Checked) -> None:
    with chaotic():
        why, notes = checked[1]()
    assert why == "" and len(notes) == 1 and "was compared kernel by kernel: as a whole its rms error is 0.4" in notes[0]


@FEW
@given(data=st.data())
def test_a_wrong_result_of_any_kernel_is_told_by_its_name(checked: Checked, data: st.DataObject) -> None:
    """A result that lacks a number, has another's place, or is that of another scale: in any step, whatever the whole gives."""
    session, check = checked
    bound = session.bound("decode")
    index = data.draw(st.sampled_from(steps_of(bound)))
    names = [name for node in bound.segments[index].nodes for name in bound.graph.node_by_name[node].outputs
             if name in bound.environment and bound.environment[name].is_floating_point()
             and any(user.name not in bound.segments[index].nodes for user in bound.graph.users.get(name, ()))]
    if not names:
        return
    result, kind = bound.environment[data.draw(st.sampled_from(names))], data.draw(st.sampled_from(["scaled", "turned", "lost"]))

    def spoil() -> None:
        flat = result.reshape(-1).clone()
        if kind == "lost":
            flat[int(flat.abs().argmax())] = 0.0
        else:
            flat = flat * 1.01 if kind == "scaled" else flat.roll(1)
        result.copy_(flat.view(result.shape))

    with spoiled(bound, index, spoil), chaotic():
        why, notes = check()
    assert bound.segments[index].name in why and not notes


def test_rows_of_the_cache_are_looked_at_too(checked: Checked) -> None:
    session, check = checked
    bound = session.bound("decode")
    index = next(i for i in steps_of(bound) if any(bound.graph.node_by_name[n].mutates for n in bound.segments[i].nodes))
    node = next(bound.graph.node_by_name[n] for n in bound.segments[index].nodes if bound.graph.node_by_name[n].mutates)
    cache = bound.environment[node.mutates[0]]
    with spoiled(bound, index, lambda: cache[:, 1].mul_(1.01)), chaotic():
        why, _ = check()
    assert node.mutates[0] in why


def test_a_token_that_is_not_the_best_is_refused_at_once(checked: Checked) -> None:
    session, check = checked
    bound = session.bound("decode")
    with spoiled(bound, len(bound.parts) - 1, lambda: (session.ids.fill_(3), session.history[2:3].fill_(3))), chaotic():  # type: ignore[arg-type, return-value]
        why, notes = check()
    assert why and ";" not in why and not notes


def test_what_is_replayed_must_be_what_the_kernels_give(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A race between kernels is none where each of them runs alone."""
    session, check = checked
    right = type(session).read_next
    monkeypatch.setattr(type(session), "read_next", lambda self, *given_: right(self, *given_) * 1.0001)
    with chaotic():
        why, _ = check()
    assert "what a captured graph of it gives is not what its kernels give one by one" in why


def test_what_no_rounding_makes_is_refused_at_once(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    session, check = checked
    right = type(session).read_next
    monkeypatch.setattr(type(session), "read_next", lambda self, *given_: right(self, *given_).fill_(float("nan")))
    why, notes = check()
    assert "NaN or infinite" in why and ";" not in why and not notes


@FEW
@given(st.integers(0, 99), st.integers(5, 40), st.integers(1, 4), st.booleans())
def test_which_of_equal_scores_is_chosen_is_open(seed: int, experts: int, slots: int, right: bool) -> None:
    """A router may take another one of the scores that are equal, and no other."""
    _, graph = router_case(experts=experts, slots=slots)
    generator = torch.Generator().manual_seed(seed)
    (given_,) = [value for value in graph.values if value.name not in graph.producer]
    scores = torch.randn(given_.spec.shape, generator=generator).to(torch_dtype(given_.spec.dtype))
    order = scores.flatten().argsort(descending=True)
    scores.view(-1)[order[slots - 1:slots + 1]] = float(scores.flatten()[order[slots]])  # two of which one is chosen
    environment = {given_.name: scores}
    wanted = compile_nodes(graph, device="cpu").run(environment)
    chosen = next(name for name, tensor in wanted.items() if not tensor.is_floating_point())
    place = int((wanted[chosen].flatten() == order[slots - 1]).nonzero()) if order[slots - 1] in wanted[chosen] else int(
        (wanted[chosen].flatten() == order[slots]).nonzero())

    def run() -> None:
        environment.update({name: tensor.clone() for name, tensor in wanted.items()})
        was = environment[chosen].view(-1)[place]
        other = order[slots] if int(was) == int(order[slots - 1]) else order[slots - 1]
        environment[chosen].view(-1)[place] = other if right else order[-1]

    segment = SimpleNamespace(step=object(), nodes=tuple(node.name for node in graph.nodes), name="moe/router")
    bound: Any = SimpleNamespace(graph=graph, environment=environment, segments=(segment,), parts=(SimpleNamespace(run=run),))
    why = step_check.difference(bound, 0, lambda found, wanted: program_check._beyond(found, wanted, 1e-3))
    assert (why == "") is right, why


@FEW
@given(st.integers(0, 99), st.integers(6, 40), st.integers(2, 4), st.sampled_from(["another of equals", "none of them", "another result"]),
       st.booleans())
def test_so_is_what_a_layer_makes_by_it(seed: int, experts: int, slots: int, kind: str, of_equals: bool) -> None:
    """A layer with its router within may take another of the experts that are equal, and no other one; rows are those of the experts that
    it took, also of one of equals."""
    match, graph = routed_experts_case(sizes=(experts, slots, 8, 16))
    generator = torch.Generator().manual_seed(seed)
    environment = {value.name: torch.randn(value.spec.shape, generator=generator).to(torch_dtype(value.spec.dtype))
                   for value in graph.values if value.name not in graph.producer}
    logits = environment[match.need("logits").values[0]]
    order = logits.flatten().argsort(descending=True)
    logits.view(-1)[order[slots - 1:slots + 1]] = float(logits.flatten()[order[slots]])  # two of which one is chosen
    prepared = compile_nodes(graph, device="cpu")
    wanted, turned = prepared.run(dict(environment)), dict(environment)
    chosen, out = match.need("choice").values[0], match.need("out").values[0]
    taken, left = (int(order[slots - 1]), int(order[slots]))
    taken, left = (taken, left) if taken in wanted[chosen] else (left, taken)
    # The layer of a router that took another one: their matrices change places, and their names.
    swap, wrong = torch.arange(experts), slots - 1 if of_equals else 0
    pair = [taken, left if kind != "none of them" else int(order[-1])]
    swap[pair] = swap[pair[::-1]]
    turned[match.need("weight").values[0]] = environment[match.need("weight").values[0]][swap]
    other = prepared.run(turned)

    def run() -> None:
        environment.update({name: tensor.clone() for name, tensor in other.items()})
        environment[chosen].copy_(swap[environment[chosen]])
        if kind == "another result":
            environment[out].view(slots, -1)[wrong].add_(5.0)

    segment = SimpleNamespace(step=object(), nodes=tuple(node.name for node in graph.nodes), name="moe/experts")
    bound: Any = SimpleNamespace(graph=graph, environment=environment, segments=(segment,), parts=(SimpleNamespace(run=run),))
    with torch.inference_mode():  # as an installed program is looked at
        why = step_check.difference(bound, 0, lambda found, wanted: program_check._beyond(found, wanted, 1e-3))
    assert (why == "") is (kind == "another of equals"), why


@pytest.mark.parametrize(("name", "sizes"), [
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16}),
    ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 5}),
])
def test_a_model_whose_experts_are_all_equal_to_its_routers_is_judged_by_those_it_took(name: str, sizes: dict[str, Any]) -> None:
    """The framework takes others than kernels do; rows that lie in other slots than their experts are told, whichever those are."""
    module = tiny(name, {**SIZES, **sizes}, torch.bfloat16)
    for key, parameter in module.named_parameters():
        if key.endswith(("gate.weight", "router.weight", "router.bias")):
            parameter.data.copy_(parameter.data[:1].expand_as(parameter))
    config = Config(device="cpu", backend="emulation", budget_s=60.0, budget_plans=24, rounds=1, origins=("generated",))
    model = ac.compile(module, max_context=64, config=config, store=Store(None), run_on="emulation")
    assert model.session is not None
    session, notes = model.session, list[str]()
    bound = session.bound("decode")
    index = next(i for i in steps_of(bound) if bound.segments[i].match.kind == "expert_linear")  # type: ignore[union-attr]
    match = bound.segments[index].match
    assert match is not None and match.flag("routed")
    out = bound.environment[match.need("out").values[0]]

    def why() -> str:
        with chaotic():
            return program_check.difference(session, model.compilation.programs, WeightStore(module, "cpu"), model.loaded, notes)

    chosen = match.need("choice").values[0]
    assert why() == "" and len(notes) == 1
    assert bound.environment[chosen].flatten().tolist() != torch.zeros(8).topk(4).indices.tolist(), "else this shows nothing"
    with spoiled(bound, index, lambda: out.copy_(out.view(4, -1).roll(1, 0).view(out.shape))):
        said = why()
    assert match.need("out").values[0] in said and bound.segments[index].name in said
    with spoiled(bound, index, lambda: bound.environment[chosen].fill_(1)):  # one expert in all slots
        assert "are not the best" in why()
    model.context.close()
