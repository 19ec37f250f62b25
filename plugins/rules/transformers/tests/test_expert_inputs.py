"""Which experts validation draws: any, and regularly those at the two ends of the matrices."""

import pytest
import torch
from agentcompile_rules_transformers import testing as made

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import Case
from agentcompile_core.worker.operands import make_inputs

CASES = 80
COUNT, SLOTS = 12, 3


def drawn(routed: bool) -> torch.Tensor:
    """The chosen experts of many cases, [cases, slots]."""
    sizes = (COUNT, SLOTS, 5, 8)
    match, _ = made.routed_experts_case(sizes=sizes) if routed else made.experts_case(sizes=sizes)
    kind = load_catalog(strict=True).kinds[match.kind]
    inputs = [make_inputs(match, kind, Case(family="normal", seed=seed), "cpu") for seed in range(CASES)]
    if not routed:
        return torch.stack([one["experts"].reshape(-1) for one in inputs])
    logits = torch.stack([one["logits"].reshape(-1).float() for one in inputs])
    assert all(len(row.unique()) == COUNT for row in logits)  # none are equal: the choice is known
    return logits.topk(SLOTS).indices


@pytest.mark.parametrize("routed", [False, True])
def test_the_first_and_the_last_expert_are_chosen_in_most_cases_and_all_others_in_some(routed: bool) -> None:
    chosen = drawn(routed)
    assert all(len(row.unique()) == SLOTS for row in chosen)
    shares = torch.stack([(chosen == expert).any(1).float().mean() for expert in range(COUNT)])
    assert (shares[[0, -1]] > 0.6).all() and (shares[[0, -1]] < 1.0).all()
    assert (shares[1:-1] > 0.03).all()
    for expert in (0, COUNT - 1):  # in every slot: what belongs to the first slot is not always that of the first expert
        assert (chosen == expert).any(0).all()


def test_more_slots_than_experts_meet_each_of_them_before_any_again() -> None:
    match, _ = made.experts_case(sizes=(3, 7, 5, 8))
    kind = load_catalog(strict=True).kinds[match.kind]
    for seed in range(20):
        experts = make_inputs(match, kind, Case(family="normal", seed=seed), "cpu")["experts"].reshape(-1)
        assert sorted(experts[:3].tolist()) == sorted(experts[3:6].tolist()) == [0, 1, 2]
