"""The schedule space: bounded, legal, and sensibly ordered for the shapes that matter."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from agentcompile_cuda_kit.targets import PRESETS, preset
from agentcompile_templates_cuda_gemv import GemvFamily
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Expression, Feature, Match, Schedule, check_source

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from gemv_cases import ADD_AUX, SILU_GATE, linear_match

FAMILY = GemvFamily()
# Qwen3-1.7B: QKV, O, gate/up, down, head; then rows that no vector divides, and a row too small for anything.
SHAPES = {
    "qkv": linear_match(4096, 2048, norm="rms"),
    "o": linear_match(2048, 2048, aux=1, epilogue=ADD_AUX),
    "gate_up": linear_match(6144, 2048, pair=2, norm="rms", epilogue=SILU_GATE),
    "down": linear_match(2048, 6144, aux=1, epilogue=ADD_AUX),
    "head": linear_match(151936, 2048, norm="rms"),
    "odd": linear_match(100, 777),
    "one": linear_match(1, 1),
    "long_f32": linear_match(64, 20000, dtype=DType.F32),
}


@pytest.mark.parametrize("target", PRESETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_space_is_bounded_distinct_and_legal(shape: str, target: str) -> None:
    match, device = SHAPES[shape], preset(target)
    assert FAMILY.accepts(match, device) is True
    space = FAMILY.space(match, device)
    assert 1 <= len(space) <= 200
    assert len(set(space.points)) == len(space)
    closed = {parameter.name: parameter.values for parameter in space.parameters}
    for schedule in space.points:
        assert all(value in closed[name] for name, value in schedule.items)
        source = FAMILY.lower(match, schedule, device)
        launch = source.launches[0]
        assert launch.shared_bytes + 2048 <= device.shared_bytes_per_block
        assert 1 <= launch.grid[0] <= match.integer("n")
        assert launch.block[0] <= 1024
        if schedule["path"] == "ring":
            resident = schedule.integer("blocks_per_sm")
            assert resident * (launch.shared_bytes + 1536) <= device.shared_bytes_per_sm


@pytest.mark.parametrize("shape", ["qkv", "o", "gate_up", "down", "head"])
def test_first_choices_on_the_h200_are_rings_then_registers(shape: str) -> None:
    first = FAMILY.space(SHAPES[shape], preset("h200")).points[:3]
    assert [schedule["path"] for schedule in first] == ["ring", "ring", "direct"]
    for schedule in first:
        launch = FAMILY.lower(SHAPES[shape], schedule, preset("h200")).launches[0]
        assert 256 <= launch.grid[0] <= 264  # two blocks on every SM, or as near as whole rounds of rows come
        assert launch.pdl


@pytest.mark.parametrize(("n", "k"), [(2304, 9216), (2304, 2048), (2560, 9728), (3072, 12288), (1536, 8960), (9216, 2304), (3584, 3072)])
def test_rows_that_eight_warps_leave_a_round_half_empty_are_dealt_to_another_number(n: int, k: int) -> None:
    """2304 rows are 9 for each of 256 blocks: two rounds of 8 warps, one of 9. The best with 8 warps is beside it: both are measured."""
    device = preset("h200")
    rings = [point for point in FAMILY.space(linear_match(n, k, dtype=DType.BF16), device).points if point["path"] == "ring"]
    other = next(ring for ring in rings[:2] if ring["warps"] != 8)
    assert 8 in [ring["warps"] for ring in rings[:2]]
    blocks = FAMILY.lower(linear_match(n, k, dtype=DType.BF16), other, device).launches[0].grid[0]
    round_rows = other.integer("warps") * other.integer("rows")
    rounds, per_sm = math.ceil(math.ceil(n / blocks) / round_rows), math.ceil(blocks / device.sm_count)
    assert n >= 0.94 * per_sm * device.sm_count * rounds * round_rows


@pytest.mark.parametrize("n", [2048, 4096, 6144, 8192, 151936])
def test_rows_that_eight_warps_share_evenly_have_no_other_number(n: int) -> None:
    points = FAMILY.space(linear_match(n, 2048, dtype=DType.BF16), preset("h200")).points
    assert {point["warps"] for point in points if point["path"] == "ring"} == {8}


@pytest.mark.parametrize(("n", "k"), [(6144, 2048), (9728, 2560), (14336, 4096), (8960, 1536), (8192, 3072)])
def test_paired_rows_are_tried_with_half_as_many_warps_beside_the_usual_number(n: int, k: int) -> None:
    """As many bytes on their way, in slots of half the size, since a warp has two rows of each."""
    device = preset("h200")
    match = linear_match(n, k, pair=2, dtype=DType.BF16)
    first, second = FAMILY.space(match, device).points[:2]
    assert {first["path"], second["path"]} == {"ring"} and {4, 8} == {first["warps"], second["warps"]}
    flights = [point.integer("in_flight") * point.integer("warps") * point.integer("columns") for point in (first, second)]
    assert max(flights) <= 4 / 3 * min(flights)
    alone = FAMILY.space(linear_match(2 * n, k, dtype=DType.BF16), device).points
    assert 4 not in {point["warps"] for point in alone if point["path"] == "ring"}


@pytest.mark.parametrize(("n", "k", "first"), [(1536, 1536, True), (2048, 1536, False), (2048, 2048, False), (1152, 1024, True)])
def test_what_holds_all_that_a_block_has_is_one_slot(n: int, k: int, first: bool) -> None:
    """A copy of a whole row is tried where two blocks on an SM have no more than that, and comes first where it is small."""
    points = FAMILY.space(linear_match(n, k, aux=1, epilogue=ADD_AUX, dtype=DType.BF16), preset("h200")).points
    single = [point for point in points if point["path"] == "ring" and point["stages"] == 1]
    assert single and all(point.integer("columns") >= k and point["in_flight"] == 1 for point in single)
    assert all(point.integer("warps") * point.integer("rows") * 264 >= n for point in single)
    assert (points[0] in single) is first and any(point in single for point in points[:12])


@pytest.mark.parametrize(("n", "k"), [(6144, 2048), (2048, 6144), (4096, 4096), (151936, 1536)])
def test_what_has_more_than_one_slot_has_a_ring_of_several(n: int, k: int) -> None:
    points = FAMILY.space(linear_match(n, k), preset("h200")).points
    assert all(point.integer("stages") > 1 for point in points if point["path"] != "direct")


def test_no_ring_before_sm_90_and_none_for_rows_without_vectors() -> None:
    for shape, target in (("qkv", "a100"), ("odd", "h200")):
        space = FAMILY.space(SHAPES[shape], preset(target))
        assert {schedule["path"] for schedule in space.points} == {"direct"}
    source = FAMILY.lower(SHAPES["qkv"], FAMILY.space(SHAPES["qkv"], preset("a100")).points[0], preset("a100"))
    assert source.features == () and not source.launches[0].pdl


def test_ring_declares_the_features_it_uses() -> None:
    source = FAMILY.lower(SHAPES["qkv"], FAMILY.space(SHAPES["qkv"], preset("h200")).points[0], preset("h200"))
    assert set(source.features) == {Feature.BULK_COPY, Feature.MBARRIER, Feature.GRIDDEPCONTROL}


def _changed(match: Match, name: str, **spec: object) -> Match:
    return evolve(match, operands=tuple(evolve(o, spec=evolve(o.spec, **spec)) if o.name == name else o for o in match.operands))


@pytest.mark.parametrize(("match", "word"), [
    (evolve(SHAPES["o"], kind="attention"), "attention"),
    (_changed(SHAPES["o"], "x", shape=(1, 2, 2048)), "one token"),
    (_changed(SHAPES["o"], "x", dtype=DType.BF16), "bfloat16"),
    (_changed(SHAPES["o"], "out", dtype=DType.I8), "int8"),
    (_changed(SHAPES["o"], "weight", dtype=DType.I8), "int8"),
    (_changed(SHAPES["o"], "weight", strides=(1, 2048)), "contiguous"),
    (evolve(SHAPES["o"], epilogue=Expression(arguments=("aux7",))), "aux7"),
    (evolve(SHAPES["o"], operands=SHAPES["o"].operands[:2]), "out"),
    (linear_match(8, 200_000), "shared memory"),
])
def test_what_cannot_be_served_is_refused_with_a_reason(match: Match, word: str) -> None:
    verdict = FAMILY.accepts(match, preset("h200"))
    assert not verdict
    assert word in verdict.reason


def test_one_build_serves_many_shapes() -> None:
    first, second = linear_match(64, 512), linear_match(4096, 1024)
    schedule = next(s for s in FAMILY.space(first, preset("h200")).points if s["path"] == "direct")
    sources = [FAMILY.lower(match, schedule, preset("h200")) for match in (first, second)]
    assert sources[0].digest == sources[1].digest
    assert {a.name: a.value for a in sources[1].launches[0].arguments if a.name in ("n", "k")} == {"n": 4096, "k": 1024}


@pytest.mark.parametrize("match", [SHAPES["gate_up"], SHAPES["head"], linear_match(128256, 3072)])
def test_dealt_rows_fill_the_ring_first_and_leave_enough_to_deal(match: Match) -> None:
    device = preset("h200")
    space = FAMILY.space(match, device)
    dealt = [point for point in space.points if "static_groups" in dict(point.items)]
    assert 1 <= len([point for point in dealt if point["path"] == "ring"]) <= 4
    assert dealt[0] in [point for point in space.points if point["path"] == "ring"][:4]
    values, = (parameter.values for parameter in space.parameters if parameter.name == "static_groups")
    assert set(values) == {point["static_groups"] for point in dealt}
    for point in dealt:
        source = FAMILY.lower(match, point, device)
        check_source(match, source, device)
        first, slices = point.integer("static_groups"), -(-match.integer("k") // point.integer("columns"))
        groups = -(-match.integer("n") // (point.integer("warps") * point.integer("rows")))
        assert first * slices >= point.integer("stages") and source.launches[0].grid[0] * first <= 0.85 * groups
        assert [(w.name, w.nbytes, w.zeroed) for w in source.workspaces] == [("tickets", 4, True)]
        assert Schedule({name: value for name, value in point.items if name != "static_groups"}) in space, "beside the same one, not dealt"


@given(k=st.integers(32, 4096).map(lambda vectors: 8 * vectors))
@example(k=8960)
@example(k=1536)
@example(k=9216)
def test_slices_of_a_row_are_even(k: int) -> None:
    step = 256  # columns that a warp reads at once
    whole = -(-k // step)
    choices = {point["columns"] for point in FAMILY.space(linear_match(2048, k), preset("h200")).points if point["path"] == "ring"}
    allowed = {min(steps, whole) for steps in range(2, 9)} | ({whole} if whole <= 16 else set())
    assert {columns // step for columns in choices} <= allowed and all(columns % step == 0 for columns in choices)
    for columns in choices:
        slices = -(-k // columns)
        if slices > 1:  # no more room than slices of as many columns as powers of two need for as many stages
            power = next(steps for steps in (2, 4, 8) if columns // step <= steps)
            assert slices * columns <= -(-whole // power) * power * step


def test_slices_of_known_rows() -> None:
    def longest(k: int) -> int:
        return max(columns for point in FAMILY.space(linear_match(1536, k), preset("h200")).points
                   if point["path"] == "ring" and (columns := point.integer("columns")) < k)

    assert [longest(k) for k in (8960, 1536, 2304, 2560, 3072, 9216, 6144)] == [1792, 768, 1280, 1280, 1536, 1536, 2048]


@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down", "head"])
def test_what_is_multiplied_by_tensor_cores_is_a_ring_of_16_bits(name: str) -> None:
    points = FAMILY.space(SHAPES[name], preset("h200")).points
    tensor = [point for point in points if point["path"] == "tensor"]
    rings = [point for point in points if point["path"] == "ring"]
    assert tensor[0] in points[:6] and len(tensor) <= 30 and len(rings) >= 40
    assert Schedule({**dict(tensor[0].items), "path": "ring"}) == next(ring for ring in rings if ring["warps"] == 8)
    for point in tensor:
        source = FAMILY.lower(SHAPES[name], point, preset("h200"))
        check_source(SHAPES[name], source, preset("h200"))
        assert "gemv_stream.cuh" in dict(source.headers) and FAMILY.needs(SHAPES[name], point, preset("h200")).shared_bytes <= 232448
    for other in (SHAPES["long_f32"], SHAPES["odd"]):
        assert not any(point["path"] == "tensor" for point in FAMILY.space(other, preset("h200")).points)
    assert not any(point["path"] == "tensor" for point in FAMILY.space(SHAPES[name], preset("a100")).points)


def test_short_matrices_have_nothing_to_deal() -> None:
    for match in (SHAPES["down"], SHAPES["qkv"]):
        points = FAMILY.space(match, preset("h200")).points
        assert not any("static_groups" in dict(point.items) for point in points)
        assert all(not FAMILY.lower(match, point, preset("h200")).workspaces for point in points[:6])
