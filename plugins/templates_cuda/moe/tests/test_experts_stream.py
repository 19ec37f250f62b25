"""Experts whose rows stream: against fp64 on the CPU in every form, shares that begin and end anywhere, and wrong kernels."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.experts import ExpertRule
from agentcompile_rules_transformers.testing import Draft, experts_case
from agentcompile_templates_cuda_moe import ExpertsFamily
from agentcompile_templates_cuda_moe.stream_space import stream_schedule
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Graph, Match, Schedule
from agentcompile_core.testing.matching import matched

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError
from agentcompile_validator_emulation.testing import Emulated

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from moe_cases import H200, budget_use, drawn, replaced

FAMILY = ExpertsFamily()
FEW = settings(max_examples=5, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def point(rows: int, columns: int, stages: int, in_flight: int, blocks: int = 1, order: str = "") -> Schedule:
    return stream_schedule(warps=4, rows=rows, columns=columns, stages=stages, in_flight=in_flight, blocks_per_sm=blocks, order=order)


WHOLE, SLICED = (8, 72, 136, 248), (264, 520, 776)
CASES: dict[str, tuple[Schedule, dict[str, Any], tuple[int, ...]]] = {  # schedule, form, and lengths of rows that one build serves
    "gate": (point(2, 256, 3, 2), {}, SLICED),
    "gate, row by row": (point(1, 256, 2, 2, blocks=2), {"lies": ("interleaved",), "bias": True, "activation": "gelu", "dtype": DType.BF16},
                         WHOLE),
    "gate, full slices": (point(1, 128, 4, 3), {"dtype": DType.F32, "bias": True}, (128, 384)),
    "of each slot's x": (point(2, 256, 2, 1), {"bias": True}, WHOLE),
    "sum": (point(2, 256, 3, 3), {"down": True, "bias": True}, WHOLE),
    "sum, in f32": (point(1, 256, 2, 1), {"down": True, "wide": True, "dtype": DType.BF16}, SLICED),
    "sum, experts early": (point(2, 256, 3, 3, blocks=2, order="early_experts"), {"down": True, "bias": True}, WHOLE),
    "sum, experts early, in slices": (point(1, 256, 4, 2, blocks=2, order="early_experts"), {"down": True, "dtype": DType.BF16}, SLICED),
    "gate, dependents late": (point(2, 256, 3, 2, order="late_dependents"), {}, SLICED),
}


def case(name: str, sizes: tuple[int, int, int], k: int) -> tuple[Match, Graph]:
    said = CASES[name][1]
    if name != "of each slot's x":
        return experts_case(sizes=(*sizes, k), **said)
    draft, (count, slots, n) = Draft(), sizes
    arguments = (draft.given("x", (1, slots, k), DType.F16), draft.weight("weight", count, n, k, dtype=DType.F16),
                 draft.given("experts", (1, slots), DType.I64), draft.weight("bias", count, n, dtype=DType.F16), False)
    return matched(ExpertRule(), draft.graph(draft.one("agentcompile.expert_linear.default", arguments, (1, slots, n), DType.F16)))


def ran(match: Match, tensors: dict[str, torch.Tensor], schedule: Schedule, sms: int, order: object = None) -> dict[str, torch.Tensor]:
    """The operands after a run on a GPU of ``sms`` SMs, so that blocks go round their rings as often as on a large one."""
    target = evolve(H200, sm_count=sms)
    Emulated(FAMILY.lower(match, schedule, target), match, target).run(tensors, *([] if order is None else [order]))
    return tensors


@pytest.mark.parametrize("name", CASES)
@FEW
@given(data=st.data())
def test_within_budget(name: str, data: st.DataObject) -> None:
    schedule, _, lengths = CASES[name]
    slots = data.draw(st.sampled_from((1, 3, 6)), "slots")
    sizes = (slots + data.draw(st.integers(0, 5), "others"), slots, data.draw(st.integers(1, 50), "n"))
    match, graph = case(name, sizes, data.draw(st.sampled_from(lengths), "k"))
    assert FAMILY.accepts(match, H200) is True
    tensors = drawn(match, data.draw(st.integers(0, 99), "seed"))
    ran(match, tensors, schedule, data.draw(st.integers(1, 5), "SMs"), data.draw(st.sampled_from(SCHEDULES), "order"))
    assert budget_use(match, graph, tensors) <= 1.0


@pytest.mark.parametrize("name", ["gate, row by row", "sum"])
def test_other_experts_are_not_read_and_orders_of_threads_change_no_bit(name: str) -> None:
    match, _ = case(name, (7, 3, 45), 136)
    tensors = drawn(match, 5)
    want = ran(match, dict(tensors), CASES[name][0], 2)["out"].clone()
    tensors["weight"][[e for e in range(7) if e not in tensors["experts"].flatten().tolist()]] = math.nan
    assert want.isfinite().all()
    for order in SCHEDULES:
        assert torch.equal(ran(match, tensors, CASES[name][0], 2, order)["out"], want)


@pytest.mark.parametrize("slots", [1, 3, 32])
@pytest.mark.parametrize("name", ["sum, experts early", "sum, experts early, in slices"])
def test_whatever_lies_where_the_experts_will_be_reaches_no_bit(name: str, slots: int) -> None:
    """Before the wait every fourth block of the emulator finds the choice; others a choice of before, experts beside the first or the last
    that there are, or what is no number of an expert at all; with few and many stages in a share, and matrices of NaN for all others."""
    schedule, said, lengths = CASES[name]
    late = Schedule({**dict(schedule.items), "early_experts": False})
    for n, sms in ((5, 4), (45, 4), (90, 2)):
        match, _ = experts_case(sizes=(slots + 5, slots, n, lengths[1]), **said)
        tensors = drawn(match, 7)
        tensors["experts"][0, :] = torch.tensor([0, slots + 4, *range(2, slots)][:slots])  # -1 in some blocks, slots + 5 in others
        tensors["weight"][[e for e in range(slots + 5) if e not in tensors["experts"].flatten().tolist()]] = math.nan
        want = ran(match, dict(tensors), late, sms)["out"].clone()
        assert want.isfinite().all()
        for order in SCHEDULES:
            tensors["out"].fill_(math.nan)
            assert torch.equal(ran(match, tensors, schedule, sms, order)["out"], want)


def test_integers_are_exact_and_a_nan_reaches_what_uses_it() -> None:
    match, _ = case("of each slot's x", (6, 3, 30), 136)
    tensors = drawn(match, 3, integers=True)
    chosen = tensors["experts"].flatten()
    tensors["weight"][chosen[1], 7, 135] = math.nan
    out = ran(match, tensors, CASES["of each slot's x"][0], 3)["out"].double().reshape(3, 30)
    want = torch.einsum("snk,sk->sn", tensors["weight"].double()[chosen], tensors["x"].double()[0]) + tensors["bias"].double()[chosen]
    assert out.isnan().nonzero().tolist() == [[1, 7]] and torch.equal(out.nan_to_num(0.5), want.nan_to_num(0.5))


TAKEN_BACK = "ring.take_back(asked, lane);"
WRONG = {  # what is wrong: text, with what it is replaced, case
    "slots of the ring are given back too early": ("      ring.wait_full(current);\n",
                                                   "      ring.wait_full(current);\n      if (lane == 0) ring.release(current);\n", "gate"),
    "a copy goes on into another expert": ("min(stage.count - index, share.end() - task.row)", "stage.count - index", "of each slot's x"),
    "the tail of a row is that of the ring": ("column >= width", "column >= 2 * width + 999", "sum, in f32"),
    "experts are taken for known before the wait": ("chosen != guessed", "false", "sum, experts early"),
    "one slot's expert is compared": ("chosen != guessed", "lane == 0 && chosen != guessed", "sum, experts early"),
    "experts that do not exist are asked for": ("__all_sync(ac::full_warp, exists || lane", "__all_sync(ac::full_warp, true || lane",
                                                "sum, experts early"),
    "the expert behind the last is asked for": ("operands.router.count);", "operands.router.count + 1);", "sum, experts early"),
    "what was asked for is not taken back": (TAKEN_BACK, "", "sum, experts early"),
    "what was asked for is not waited for": (TAKEN_BACK, "if (lane < asked) ac::mbarrier_arrive(ring.full + lane);", "sum, experts early"),
    "barriers keep their phase": (TAKEN_BACK, "for (int i = 0; i < asked; ++i) ac::mbarrier_wait(ring.full + i, 0);", "sum, experts early"),
    "consumers begin before the decision": ("early_experts ? 2 : 1);", "early_experts ? 1 : 1);", "sum, experts early"),
    "the experts are read before the wait": ("ac::load_unsettled(operands.experts", "ac::load_relaxed(operands.experts",
                                             "sum, experts early"),
    "a part of what was asked for is asked for again": ("issued >= asked", "issued >= asked - 1", "sum, experts early, in slices"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    text, wrong, name = WRONG[what]
    schedule, _, lengths = CASES[name]
    match, graph = case(name, (7, 3, 23), lengths[1])
    target = evolve(H200, sm_count=2)
    source = replaced(FAMILY.lower(match, schedule, target), text, wrong)
    used = []
    for chosen in ([4, 2, 5], [0, 6, 3]):  # other experts exist beside those; guesses that are wrong for these are outside
        tensors = {**drawn(match, 5), "experts": torch.tensor([chosen])}
        try:
            for order in (None, SCHEDULES[2], SCHEDULES[3]):
                Emulated(source, match, target).run(tensors, *([] if order is None else [order]))
        except EmulationError:
            return
        used.append(budget_use(match, graph, tensors))
    assert not all(use <= 1.0 for use in used)
