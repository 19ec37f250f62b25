"""The schedule space: bounded, legal, sensibly ordered; what is refused; and that every architecture's compiler takes the kernels."""

from pathlib import Path

import pytest
from agentcompile_cuda_kit.targets import PRESETS, preset
from agentcompile_rules_transformers.testing import experts_case, router_case
from agentcompile_templates_cuda_moe import ExpertsFamily, RouterFamily
from attrs import evolve

from agentcompile_core.plugin_api import DType, Expression, Match, Reject, Schedule, Target, check_source

EXPERTS, ROUTER, H200 = ExpertsFamily(), RouterFamily(), preset("h200")
GOLDEN = Path(__file__).parent / "golden"
SHAPES = {  # Qwen3-30B-A3B, Mixtral-8x7B and OLMoE; then rows that no vector divides, and the smallest of all
    "qwen3 gate": experts_case(sizes=(128, 8, 768, 2048), dtype=DType.BF16)[0],
    "qwen3 down": experts_case(sizes=(128, 8, 2048, 768), down=True, dtype=DType.BF16)[0],
    "mixtral gate": experts_case(sizes=(8, 2, 14336, 4096))[0],
    "mixtral down": experts_case(sizes=(8, 2, 4096, 14336), down=True, wide=True)[0],
    "olmoe f32": experts_case(sizes=(64, 8, 1024, 2048), dtype=DType.F32)[0],
    "gpt-oss gate": experts_case(sizes=(32, 4, 2880, 2880), bias=True, lies=("columns", "interleaved"), dtype=DType.BF16)[0],
    "gpt-oss down": experts_case(sizes=(32, 4, 2880, 2880), bias=True, lies=("columns",), down=True, dtype=DType.BF16)[0],
    "odd columns": experts_case(sizes=(9, 3, 101, 77), lies=("columns",))[0],
    "odd": experts_case(sizes=(9, 3, 101, 77), down=True)[0],
    "one": experts_case(sizes=(1, 1, 1, 1))[0],
}
ROUTING = router_case(experts=128, slots=8, normalized=True, dtype=DType.BF16)[0]


def streams(schedule: Schedule) -> bool:
    return "path" in dict(schedule.items)


def loading(match: Match, target: Target = H200) -> list[Schedule]:
    """The schedules that load weights into registers, in their order."""
    return [point for point in EXPERTS.space(match, target).points if not streams(point)]


@pytest.mark.parametrize("shape", SHAPES)
def test_space_is_bounded_distinct_and_legal(shape: str) -> None:
    match = SHAPES[shape]
    for target in map(preset, PRESETS):
        assert EXPERTS.accepts(match, target) is True
        points = EXPERTS.space(match, target).points
        assert 1 <= len(loading(match, target)) <= 96 and len(points) == len(set(points)) <= 144
        for schedule in points:
            source = EXPERTS.lower(match, schedule, target)
            check_source(match, source, target)
            (launch,), needs = source.launches, EXPERTS.needs(match, schedule, target)
            assert launch.shared_bytes < needs.shared_bytes <= target.shared_bytes_per_block and needs.threads == launch.block[0]
            if not streams(schedule):
                assert launch.shared_bytes <= 48 << 10 and launch.grid[1] == (1 if match.flag("summed") else match.integer("slots"))


@pytest.mark.parametrize("shape", ["qwen3 gate", "qwen3 down", "mixtral gate", "mixtral down"])
def test_first_choices_keep_the_gpu_busy(shape: str) -> None:
    for schedule in loading(SHAPES[shape])[:3]:
        launch = EXPERTS.lower(SHAPES[shape], schedule, H200).launches[0]
        assert launch.grid[0] * launch.grid[1] * schedule.integer("warps") >= 4 * H200.sm_count and launch.pdl
        assert schedule.integer("rows") * SHAPES[shape].integer("pair") * schedule.integer("unroll") >= 4


@pytest.mark.parametrize(("slots", "clusters"), [(1, (1, 2)), (4, (1, 2, 4, 8))])
def test_rows_of_columns_are_split_while_each_group_of_lanes_has_a_batch_of_any_slot(slots: int, clusters: tuple[int, ...]) -> None:
    match = experts_case(sizes=(8, slots, 512, 64), lies=("columns",), down=True)[0]
    points = [dict(point.items) for point in EXPERTS.space(match, H200).points]
    widest = [point for point in points if (point["lanes"], point["warps"], point["unroll"]) == (8, 4, 2)]  # 16 groups, two rows at once
    assert sorted(point["split"] for point in widest) == list(clusters)


def _changed(match: Match, name: str, **spec: object) -> Match:
    return evolve(match, operands=tuple(evolve(o, spec=evolve(o.spec, **spec)) if o.name == name else o for o in match.operands))


def _said(match: Match, **attributes: object) -> Match:
    return evolve(match, attributes=tuple((key, attributes.get(key, value)) for key, value in match.attributes))


GATE, DOWN = SHAPES["qwen3 gate"], SHAPES["qwen3 down"]


@pytest.mark.parametrize(("match", "word"), [
    (evolve(GATE, kind="linear"), "linear"),
    (_said(GATE, slots=33), "33"),
    (_said(GATE, pair=3), "pair"),
    (_said(GATE, n=0), "positive"),
    (_said(DOWN, summed=False), "scale"),
    (_changed(GATE, "x", dtype=DType.F32), "float32"),
    (_changed(GATE, "experts", dtype=DType.I32), "int32"),
    (_changed(GATE, "weight", dtype=DType.I8), "int8"),
    (_changed(GATE, "weight", strides=(1, 2, 3)), "contiguous"),
    (evolve(DOWN, epilogue=Expression(arguments=("aux7",))), "aux7"),
])
def test_what_cannot_be_served_is_refused_with_a_reason(match: Match, word: str) -> None:
    verdict = EXPERTS.accepts(match, H200)
    assert isinstance(verdict, Reject) and word in verdict.reason


@pytest.mark.parametrize(("match", "word"), [
    (GATE, "expert_linear"), (_said(ROUTING, experts=1025), "1025"), (_said(ROUTING, slots=0), "0 of"),
    (_changed(ROUTING, "logits", dtype=DType.I64), "int64"), (_changed(ROUTING, "experts", dtype=DType.I32), "int32"),
])
def test_what_the_router_cannot_serve_is_refused_with_a_reason(match: Match, word: str) -> None:
    verdict = ROUTER.accepts(match, H200)
    assert isinstance(verdict, Reject) and word in verdict.reason


def test_one_build_serves_many_shapes() -> None:
    other = experts_case(sizes=(64, 4, 1024, 4096), dtype=DType.BF16)[0]
    schedule = loading(GATE)[0]
    assert EXPERTS.lower(GATE, schedule, H200).digest == EXPERTS.lower(other, schedule, H200).digest


@pytest.mark.parametrize("name", ["gate", "down", "router"])
def test_plan_header_is_golden(name: str, request: pytest.FixtureRequest) -> None:
    match = {"gate": GATE, "down": DOWN, "router": ROUTING}[name]
    family = ROUTER if name == "router" else EXPERTS
    source = family.lower(match, ROUTER.space(match, H200).points[0] if family is ROUTER else loading(match)[0], H200)
    text = source.headers[0][1].replace(source.digest, "DIGEST")
    path = GOLDEN / f"plan_{name}.cuh"
    if request.config.getoption("--update-golden", default=False):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.compile
@pytest.mark.parametrize("name", PRESETS)
def test_builds_without_spills_on_every_architecture(name: str) -> None:
    """The widest batch of each architecture in turn: of a gate, of a sum, in float32, with biases row by row."""
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    biased = experts_case(sizes=(32, 4, 2880, 2880), bias=True, lies=("interleaved",), dtype=DType.BF16)[0]
    match = (GATE, DOWN, SHAPES["olmoe f32"], biased, SHAPES["gpt-oss gate"], SHAPES["gpt-oss down"])[list(PRESETS).index(name) % 6]
    widest = max(loading(match, target), key=lambda p: (p.integer("unroll") * dict(p.items).get("rows", 1), p.items))
    assert backend.build(EXPERTS.lower(match, widest, target), target).resources.spill_bytes == 0
    if match is GATE:
        assert backend.build(ROUTER.lower(ROUTING, ROUTER.space(ROUTING, target).points[0], target), target).resources.spill_bytes == 0
