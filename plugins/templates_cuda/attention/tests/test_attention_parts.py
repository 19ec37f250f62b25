"""Query heads of a KV head dealt to several blocks: any group, one writer of the new row, none that waits for another."""

import sys
from pathlib import Path

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_attention import AttentionFamily
from agentcompile_templates_cuda_attention.shape import PARTS
from agentcompile_templates_cuda_attention.space import NAMES, STATIC_SHARED_BYTES, schedule, with_parts
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Schedule, StepSource
from agentcompile_core.stages.plan import checked

pytest.importorskip("agentcompile_validator_emulation")
sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions, ThreadOrder
from agentcompile_validator_emulation.testing import Emulated
from attention_cases import Model

H200 = preset("h200")
FAMILY = AttentionFamily()
QUIET = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
STARCODER = Model(dtype=DType.BF16, kv_heads=2, group=12, head_dim=128, rotary_dim=128, norm="none", capacity=4096)
TARGETS = ("a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090")


def even(group: int, most: int) -> int:
    """The fewest parts of at most ``most`` heads in which every part has a head."""
    return next(parts for parts in range(1, group + 1) if -(-group // parts) <= most and (parts - 1) * -(-group // parts) < group)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Layers with more query heads per KV head than a fragment holds, small enough to be emulated."""
    dtype = draw(st.sampled_from((DType.F16, DType.BF16, DType.F32)))
    head_dim = draw(st.sampled_from((16, 24, 32)))
    kv_heads, group = draw(st.sampled_from((1, 2))), draw(st.sampled_from((9, 12, 13, 16, 71)))
    rotary_dim, interleaved = draw(st.sampled_from(((0, False), (16, False), (16, True), (8, True))))
    slopes = tuple(0.5**(1 + head % 9) for head in range(kv_heads * group)) if draw(st.booleans()) else ()
    return Model(dtype=dtype, kv_heads=kv_heads, group=group, head_dim=head_dim, rotary_dim=rotary_dim, interleaved=interleaved,
                 norm=draw(st.sampled_from(("none", "rms"))), capacity=48, window=draw(st.sampled_from((0, 19))),
                 softcap=draw(st.sampled_from((0.0, 3.0))), sinks=draw(st.booleans()), slopes=slopes,
                 value_dim=draw(st.sampled_from((0, 40))))


@st.composite
def schedules(draw: st.DrawFn, model: Model) -> Schedule:
    """One way to deal out a layer's work: parts of up to 8, 4 or 2 heads, on any path, merged in any way."""
    path = draw(st.sampled_from(("lanes", "tensor", "staged", "whole"))) if model.dtype is not DType.F32 else "lanes"
    splits, merge = draw(st.sampled_from(((1, "global"), (3, "global"), (2, "cluster"), (4, "message"))))
    stages = {"staged": draw(st.integers(1, 3)), "whole": draw(st.integers(2, 5))}
    whole = schedule(path, 2 if path == "lanes" else 1, 4, stages.get(path, 1), splits, merge, draw(st.booleans()))
    return with_parts(whole, even(model.group, draw(st.sampled_from((8, 4, 2)))))


def lowered(model: Model, point: Schedule) -> StepSource:
    assert FAMILY.accepts(model.match(), H200) is True
    return FAMILY.lower(model.match(), point, H200)


def use(model: Model, source: StepSource, position: int, options: LaunchOptions | None = None, seed: int = 0) -> float:
    """Runs a step; the largest share of the error budget that an output uses. What is appended is compared bit for bit."""
    kernel, tensors = Emulated(source, model.match(), H200), model.draw(position, seed)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    kernel.run(tensors, options)
    assert kernel.clean() and torch.equal(tensors["v_cache"][0, position].flatten(), before["v"].flatten())
    expected, error = model.prepared(before, "k")
    assert bool(((tensors["k_cache"][0, position].double() - expected).abs() <= error).all())
    for cache in ("k_cache", "v_cache"):
        others = [p for p in range(model.capacity) if p != position]
        assert torch.equal(tensors[cache][0, others].nan_to_num(7.0), before[cache][0, others].nan_to_num(7.0))
    return model.use(tensors, before, source.reduction_depth)


@settings(max_examples=12, **QUIET)
@given(data=st.data())
def test_every_group_and_width_has_schedules_that_deal_each_head_once(data: st.DataObject) -> None:
    dtype, kv_heads, group = (data.draw(st.sampled_from(some)) for some in ((DType.BF16, DType.F32), (1, 2, 8), (1, 8, 9, 12, 16, 71, 128)))
    head_dim, value_dim = (8 * data.draw(st.integers(2, 32)) for _ in range(2))
    match = Model(dtype=dtype, kv_heads=kv_heads, group=group, head_dim=head_dim, value_dim=value_dim, rotary_dim=16, capacity=4096).match()
    target = preset(data.draw(st.sampled_from(TARGETS)))
    assert FAMILY.accepts(match, target) is True
    space = FAMILY.space(match, target)
    assert 4 <= len(checked(space)) <= 64
    for point in space.points:
        parts, needs = dict(point.items).get(PARTS, 1), FAMILY.needs(match, point, target)
        assert parts * -(-group // parts) >= group > (parts - 1) * -(-group // parts)  # none is left, and no part has none
        dynamic = FAMILY.lower(match, point, target).launches[0].shared_bytes
        assert needs.registers <= needs.most_registers and needs.shared_bytes - dynamic <= STATIC_SHARED_BYTES
        assert needs.shared_bytes <= target.shared_bytes_per_block and (dynamic > 0) is (point["path"] in ("staged", "whole"))
        assert FAMILY.lower(match, point, target).launches[0].grid == (point["splits"], kv_heads, parts)


@pytest.mark.parametrize("group", range(1, 9))
def test_groups_that_fit_a_fragment_are_dealt_where_kv_heads_are_few(group: int) -> None:
    """Whole groups come first and keep the names of their schedules, which are those of stored winners; one of three is dealt."""
    many, few = (FAMILY.space(evolve(STARCODER, group=group, kv_heads=count).match(), H200).points for count in (16, 4))
    assert all({name for name, _ in point.items} == set(NAMES) for point in many)
    dealt = [index for index, point in enumerate(few) if PARTS in dict(point.items)]
    assert dealt[:3] == ([2, 5, 8] if group > 3 else [])
    assert {few[index][PARTS] for index in dealt} == {parts for parts in (-(-group // 4), -(-group // 2)) if parts > 1 and group > 3}
    assert len(few) == len(set(few)) <= 64


def test_schedules_that_hold_a_large_group_in_one_block_stay_and_come_first() -> None:
    """Ten query heads of 128 channels fit a block of the FMA kernel."""
    points = FAMILY.space(evolve(STARCODER, group=10).match(), H200).points
    whole = [point for point in points if PARTS not in dict(point.items)]
    assert points[:len(whole)] == tuple(whole) and {point["path"] for point in whole} == {"lanes"}
    dealt = points[len(whole):]
    assert {point[PARTS] for point in dealt} >= {2, 3, 5} and {point["path"] for point in dealt} >= {"staged", "tensor"}


def test_parts_are_even_and_few_ones_come_first() -> None:
    space = FAMILY.space(STARCODER.match(), H200)
    first = space.points[0]
    assert (first["path"], first[PARTS]) == ("staged", 2) and {point[PARTS] for point in space.points} == {2, 3, 6}
    plan = dict(FAMILY.lower(STARCODER.match(), first, H200).headers)["plan.cuh"]
    assert "int group = 6;" in plan and "int kv_group = 12;" in plan
    assert dict(space.ruled_out)  # twelve heads in one block


@pytest.mark.compile
@pytest.mark.parametrize("target", ["a100", "h200", "rtx5090"])
def test_parts_build_without_spills_in_about_the_registers_that_were_foreseen(target: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    if not backend.can_build(preset(target)):
        pytest.skip(backend.can_build(preset(target)).reason)
    match = STARCODER.match()
    points = FAMILY.space(match, preset(target)).points
    for path in ("staged", "whole", "tensor"):
        point = next((point for point in points if point["path"] == path), None)
        if point is None:
            continue
        kernel, needs = (make(match, point, preset(target)) for make in (FAMILY.lower, FAMILY.needs))
        used = backend.build(kernel, preset(target)).resources
        assert used.spill_bytes == 0 and -24 <= needs.registers - used.registers <= 48 and needs.registers <= needs.most_registers
        assert used.shared_bytes - kernel.launches[0].shared_bytes <= STATIC_SHARED_BYTES
        assert 0 <= needs.shared_bytes - used.shared_bytes <= 256


@settings(max_examples=3, **QUIET)
@given(data=st.data())
def test_any_group_is_within_budget_and_appends_once(data: st.DataObject) -> None:
    model = data.draw(models())
    source = lowered(model, data.draw(schedules(model)))
    for position in (0, data.draw(st.integers(1, 47))):
        options = data.draw(st.sampled_from((None, *SCHEDULES)))  # None: after a launch that may still run, as in a chain
        assert use(model, source, position, options, position) <= 1.0


RACE = r"race: argument '{}'.*no fence and atomic operation"
# What a block of a part could do wrong: the text, what stands there instead, and what the emulator says; empty: the numbers are wrong.
WRONG = {
    "two parts append": ("if (share.appends()) {", "if (true) {", RACE.format("k_cache")),
    "two parts write one head": ("if (i / value_dim < share.repeated()) return;", "", RACE.format("out")),
    "a part reads the row that another appends": ("span.is_cached(index)", "(index < span.length)", RACE.format("[kv]_cache")),
    "two parts count as one": ("share.part() * kv_heads + share.kv_head", "share.kv_head", ""),
    "a part takes its neighbour's query heads": ("q + (share.first_head() + g)", "q + (share.kv_head * 9 + g)", ""),
    "a part takes its neighbour's sinks": ("sinks[share.first_head() +", "sinks[share.kv_head * 9 +", ""),
}


def planted(source: StepSource, text: str, wrong: str) -> StepSource:
    assert text in source.code + "".join(part for _, part in source.headers)
    return evolve(source, code=source.code.replace(text, wrong),
                  headers=tuple((name, part.replace(text, wrong)) for name, part in source.headers))


NINE = Model(dtype=DType.F32, kv_heads=1, group=9, head_dim=16, rotary_dim=0, norm="none", capacity=24, sinks=True)
IN_TWO = with_parts(schedule("lanes", 1, 4, 1, 2), 2)  # parts of five: the fifth head is computed by both, and written by one


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_part_that_does_what_is_not_its_own_is_caught(what: str) -> None:
    text, wrong, said = WRONG[what]
    source = planted(lowered(NINE, IN_TWO), text, wrong)
    if said:
        with pytest.raises(EmulationError, match=said):
            use(NINE, source, 20)
    else:
        assert not _is_right(NINE, source)


def _is_right(model: Model, source: StepSource) -> bool:
    """In four orders of the blocks."""
    try:
        return all(use(model, source, 20, LaunchOptions(order=ThreadOrder.RANDOM, seed=seed)) <= 1.0 for seed in range(4))
    except (EmulationError, AssertionError):
        return False


def test_the_same_kernel_without_a_mistake_is_right() -> None:
    assert _is_right(NINE, lowered(NINE, IN_TWO))
