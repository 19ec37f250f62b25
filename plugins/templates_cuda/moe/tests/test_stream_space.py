"""Schedules of rows that stream: where there are any, even shares, enough bytes in flight; and that compilers take the kernels."""

import struct
from pathlib import Path
from typing import Any

import pytest
from agentcompile_cuda_kit.targets import PRESETS, preset
from agentcompile_rules_transformers.testing import experts_case
from agentcompile_templates_cuda_moe import ExpertsFamily, stream_space
from agentcompile_templates_cuda_moe.space import shape_of
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Feature, Match, Schedule, Target

EXPERTS, H200 = ExpertsFamily(), preset("h200")
BULK = list({preset(name).arch: name for name in PRESETS if preset(name).has(Feature.BULK_COPY)}.values())
GOLDEN = Path(__file__).parent / "golden"


def gate(*sizes: int, **said: object) -> Match:
    return experts_case(sizes=sizes, **{"dtype": DType.BF16, **said})[0]  # type: ignore[arg-type]


def down(*sizes: int, **said: object) -> Match:
    return gate(*sizes, down=True, **said)


MODELS = {  # experts, slots, rows, their length
    "Qwen3-30B-A3B": (gate(128, 8, 768, 2048), down(128, 8, 2048, 768)),
    "OLMoE": (gate(64, 8, 1024, 2048), down(64, 8, 2048, 1024)),
    "Mixtral-8x7B": (gate(8, 2, 14336, 4096), down(8, 2, 4096, 14336)),
    "DeepSeek-V2-Lite": (gate(64, 6, 1408, 2048), down(64, 6, 2048, 1408)),
    "Qwen1.5-MoE": (gate(60, 4, 1408, 2048), down(60, 4, 2048, 1408, wide=True)),
    "gpt-oss by rows": (gate(32, 4, 2880, 2880, bias=True, lies=("interleaved",)), down(32, 4, 2880, 2880, bias=True)),
}
BOTH = {f"{name} {side}": match for name, pair in MODELS.items() for side, match in zip(("gate", "down"), pair, strict=True)}


def streams(match: Match, target: Target = H200) -> tuple[Schedule, ...]:
    return tuple(point for point in EXPERTS.space(match, target).points if dict(point.items).get("path") == "stream")


@pytest.mark.parametrize("name", BOTH)
def test_first_streams_deal_evenly_and_have_enough_in_flight(name: str) -> None:
    """Little's law: 4.8 TB/s times a microsecond are 36 KB per SM; every SM stays busy to the end."""
    match = BOTH[name]
    space, shape = EXPERTS.space(match, H200), shape_of(match)
    assert [dict(point.items).get("path") for point in space.points[:6]] == ["stream", "stream", None] * 2
    for schedule in streams(match)[:8]:
        launch = EXPERTS.lower(match, schedule, H200).launches[0]
        resident = schedule.integer("blocks_per_sm")
        rows = shape.n * (1 if shape.summed else shape.slots)
        assert launch.grid == (resident * H200.sm_count, 1, 1) and launch.pdl
        most = sum(-(-(rows - first) // launch.grid[0]) for first in range(0, resident * H200.sm_count, H200.sm_count))
        assert most * H200.sm_count <= 1.05 * rows, "an SM has at most a row more than others"
        flight = schedule.integer("in_flight") * stream_space.stage_bytes(shape, schedule) * resident
        assert 48 << 10 <= flight <= 144 << 10
        columns = schedule.integer("columns")
        assert -(-shape.k // columns) * columns <= 1.1 * shape.k, "slots of the ring are full"


@pytest.mark.parametrize("name", BOTH)
def test_the_best_guesses_are_neighbours_in_both_orders(name: str) -> None:
    """A search of ten schedules meets three of them; sums know their experts early, what is no sum lets its dependents wait."""
    match = BOTH[name]
    order, other = stream_space.ORDERS if match.flag("summed") else stream_space.ORDERS[::-1]
    points = [dict(point.items) for point in streams(match)]
    assert len(points) <= stream_space.MOST_STREAM_POINTS and not any(point[other] for point in points)
    most = 2 * stream_space.BOTH_WAYS
    for ahead, plain in zip(points[:most:2], points[1:most:2], strict=True):
        assert ahead[order] and ahead == {**plain, order: True} != plain
    assert len(points) >= most and all(point[order] for point in points[most:])
    alone = evolve(H200, capabilities=tuple(c for c in H200.capabilities if c != Feature.GRIDDEPCONTROL))
    shapes = [{**point, order: False} for point in (*points[:most:2], *points[most:])]
    assert [dict(point.items) for point in streams(match, alone)][: len(shapes)] == shapes, "nobody begins before others have ended"


@settings(max_examples=25, derandomize=True, database=None, deadline=None)
@given(n=st.integers(1, 20_000), vectors=st.integers(1, 2_000), slots=st.integers(1, 32), dtype=st.sampled_from((DType.F16, DType.F32)),
       summed=st.booleans(), name=st.sampled_from(BULK))
def test_every_schedule_fits_its_target(n: int, vectors: int, slots: int, dtype: DType, summed: bool, name: str) -> None:
    target, k = preset(name), vectors * 16 // dtype.bytes
    match = gate(slots + 1, slots, n, k, dtype=dtype, down=summed)
    shape = shape_of(match)
    for schedule in streams(match, target):
        needs, resident = EXPERTS.needs(match, schedule, target), schedule.integer("blocks_per_sm")
        blocks, dynamic = stream_space.grid_of(shape, schedule, target)[0], stream_space.shared_bytes(shape, schedule, target)
        assert dynamic < needs.shared_bytes and resident * (needs.shared_bytes + 1024) <= target.shared_bytes_per_sm
        assert 1 <= blocks <= min(resident * target.sm_count, n if summed else n * slots)
        if summed:
            assert -(-n // blocks) <= needs.threads - 32, "a consumer finishes each row"
        ring = schedule.integer("stages") * stream_space.stage_bytes(shape, schedule)
        assert dynamic - ring >= k * dtype.bytes * (slots if summed else 1)
    small = 2 * slots * n * (1 if summed else 2) * k * dtype.bytes < target.sm_count * stream_space.LONG_BYTES_PER_SM
    assert not small or "path" not in dict(EXPERTS.space(match, target).points[0].items), "what does not stream comes behind"


def test_reasons_for_what_does_not_stream() -> None:
    odd = EXPERTS.space(gate(9, 3, 101, 77), H200)
    assert not streams(gate(9, 3, 101, 77)) and [reason for reason, _ in odd.ruled_out] == [stream_space.NO_BULK_COPIES]
    assert streams(MODELS["OLMoE"][0], preset("a100")) == () == EXPERTS.space(MODELS["OLMoE"][0], preset("a100")).ruled_out
    found = dict(EXPERTS.space(MODELS["Mixtral-8x7B"][0], H200).ruled_out)
    assert found.keys() == {stream_space.SHARED, stream_space.FEW_BLOCKS, stream_space.TWO_FIT} and min(found.values()) > 0
    assert stream_space.TOO_MANY_ROWS in dict(EXPERTS.space(down(2, 1, 40_000, 64), H200).ruled_out)


@pytest.mark.parametrize(("name", "side"), [("plan_stream", 0), ("plan_stream_down", 1)])
def test_plan_header_is_golden(name: str, side: int, request: pytest.FixtureRequest) -> None:
    match = MODELS["Qwen3-30B-A3B"][side]
    source = EXPERTS.lower(match, streams(match)[0], H200)
    text, path = source.headers[0][1].replace(source.digest, "DIGEST"), GOLDEN / f"{name}.cuh"
    if request.config.getoption("--update-golden", default=False):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
    assert set(source.features) == {"bulk_copy", "mbarrier", "griddepcontrol"}


@pytest.mark.compile
@pytest.mark.parametrize("name", BULK)
def test_builds_without_spills_where_there_are_bulk_copies(name: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    match = BOTH[("gpt-oss by rows gate", "Qwen3-30B-A3B gate", "Mixtral-8x7B down", "gpt-oss by rows down")[BULK.index(name) % 4]]
    widest = max(streams(match, target), key=lambda p: (p.integer("rows") * p.integer("columns"), p.items))
    assert backend.build(EXPERTS.lower(match, widest, target), target).resources.spill_bytes == 0


def order_of(binary: bytes, code: Any) -> str:
    """Launches of dependents (l), waits (w) and bulk copies (c), as they lie in machine code for sm_90 to sm_120."""
    known = {0x82D: "l", code.WAIT: "w", **dict.fromkeys(code.BULK_COPIES, "c")}
    (text,) = code.functions(binary).values()
    starts = range(0, len(text), code.INSTRUCTION_BYTES)
    return "".join(known.get(struct.unpack_from("<H", text, at)[0] & code.OPCODE_BITS, "") for at in starts)


@pytest.mark.compile
@pytest.mark.parametrize("name", BULK)
def test_machine_code_has_the_order_that_a_schedule_says(name: str) -> None:
    """A producer copies x and then stages behind its wait, where experts are early stages in front of it too. Who lets dependents wait
    launches them where it knows the experts, who does not in front of all."""
    code = pytest.importorskip("agentcompile_runtime_cuda.machine_code")
    backend, target = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend(), preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    for side, match in zip(("gate", "down"), MODELS["Qwen3-30B-A3B"], strict=True):
        built = (backend.build(EXPERTS.lower(match, point, target), target) for point in streams(match, target)[:2])
        ahead, plain = (order_of(kernel.binary, code) for kernel in built)
        assert plain[0] == "l" and plain.count("l") == 1 and "wcc" in plain and plain.count("c") == 2, plain
        if side == "down":
            assert ahead[0] == "l" and "cwcc" in ahead and ahead.count("c") == 3, ahead
        else:
            assert ahead.count("l") == 1 and "wclc" in ahead and ahead.replace("l", "") == plain[1:], ahead
