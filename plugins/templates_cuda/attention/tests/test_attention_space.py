"""Which attention matches are served, with which schedules, and that every architecture's compiler takes the kernels."""

import sys
from functools import cache
from pathlib import Path

import pytest
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_attention import AttentionFamily, space
from agentcompile_templates_cuda_attention.shape import bytes_of_stages, registers, shape_of, static_bytes
from agentcompile_templates_cuda_attention.space import STATIC_SHARED_BYTES
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Feature, Match, Schedule, ScheduleSpace, check_source

pytest.importorskip("agentcompile_validator_emulation")
sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from attention_cases import Model

H200 = preset("h200")
FAMILY = AttentionFamily()
QWEN = Model(kv_heads=8, group=2, head_dim=128, rotary_dim=128, capacity=8192)
LLAMA_1B = Model(kv_heads=8, group=4, head_dim=64, rotary_dim=64, norm="none", capacity=8192)
QWEN_4B = Model(kv_heads=8, group=4, head_dim=128, rotary_dim=128, capacity=8192)
LLAMA_3B = Model(kv_heads=8, group=3, head_dim=128, rotary_dim=128, norm="none", capacity=8192)
MODELS = {"qwen3_1.7b": QWEN, "llama_1b": LLAMA_1B, "qwen3_4b": QWEN_4B, "llama_3b": LLAMA_3B,
          "qwen3_f32": Model(dtype=DType.F32, kv_heads=8, head_dim=128, rotary_dim=128, capacity=8192),
          "tiny": Model(kv_heads=2, group=2, head_dim=32, rotary_dim=32, capacity=512),
          "starcoder2_3b": Model(dtype=DType.BF16, kv_heads=2, group=12, head_dim=128, rotary_dim=128, norm="none", capacity=4096),
          "falcon_7b": Model(kv_heads=1, group=71, head_dim=64, rotary_dim=64, norm="none", capacity=2048),
          "multi_head": Model(kv_heads=32, group=1, head_dim=80, rotary_dim=32, norm="none", capacity=2048)}
TARGETS = ("a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", ["h200", "rtx3090"])
def test_every_point_of_the_space_lowers(name: str, target: str) -> None:
    match = MODELS[name].match()
    assert FAMILY.accepts(match, preset(target)) is True
    space = FAMILY.space(match, preset(target))
    assert 4 <= len(space) == len(set(space.points)) <= 64
    for point in space.points:
        source = FAMILY.lower(match, point, preset(target))
        check_source(match, source, preset(target))
        assert {w.name: w.zeroed for w in source.workspaces} == {"workspace": False, "counters": True}


def test_the_space_offers_every_kernel_where_types_allow() -> None:
    paths = {point["path"] for point in FAMILY.space(QWEN.match(), H200).points}
    assert paths == {"lanes", "tensor", "staged", "whole"}
    assert {point["path"] for point in FAMILY.space(MODELS["qwen3_f32"].match(), H200).points} == {"lanes"}
    wide = Model(kv_heads=1, group=16, head_dim=64, rotary_dim=64, capacity=512)
    assert {point["path"] for point in FAMILY.space(wide.match(), H200).points} >= {"lanes", "tensor", "staged"}


@pytest.mark.parametrize("merge", ["message", "cluster"])
def test_clusters_are_offered_where_they_exist_and_declared(merge: str) -> None:
    short = evolve(QWEN, capacity=512).match()
    points = [p for p in FAMILY.space(short, H200).points if p["merge"] == merge]
    assert {4, 8, 16} <= {p["splits"] for p in points} <= {2, 4, 8, 16}
    for point in points:
        source = FAMILY.lower(short, point, H200)
        assert Feature.CLUSTER in source.features and source.launches[0].cluster == point["splits"]
        assert (Feature.LARGE_CLUSTER in source.features) == (point["splits"] > 8)
    small = FAMILY.space(short, preset("rtx5090")).points
    assert {p["splits"] for p in small if p["merge"] == merge} == {2, 4, 8}, "clusters of 16 are of the large chips"
    assert {p["merge"] for p in FAMILY.space(short, preset("a100")).points} == {"global"}


@pytest.mark.parametrize("name", MODELS)
def test_a_search_that_ends_early_has_met_every_way_to_merge(name: str) -> None:
    """And each has at least an eighth of the space."""
    points = FAMILY.space(MODELS[name].match(), H200).points
    ways = [point["merge"] for point in points]
    assert set(ways[:5]) == {"message", "global"} and ways[0] == "message" and "cluster" in ways[:24]
    assert all(8 * ways.count(way) >= len(ways) for way in set(ways))


@pytest.mark.parametrize("name", MODELS)
def test_a_search_that_ends_early_has_met_a_schedule_for_long_caches(name: str) -> None:
    """Of each way to merge, with as many splits as its first one."""
    points = FAMILY.space(MODELS[name].match(), H200).points
    assert len(set(points)) == len(points) and len(points) <= 64
    for merge in {point["merge"] for point in points}:
        of_way = [p for p in points if p["merge"] == merge and dict(p.items).get("parts", 1) == 1]
        long = [p for p in of_way if p["splits"] == of_way[0]["splits"] and (p["path"], p["warps"], p["unroll"]) in (
            ("staged", 8, 2), ("staged", 12, 2), ("staged", 16, 2), ("tensor", 8, 2), ("lanes", 8, 4))]
        assert not long or any(p in of_way[:2] for p in long), merge
    if name.startswith(("qwen3_1", "llama")):
        whole = [p for p in points if dict(p.items).get("parts", 1) == 1]
        first, narrow = [(p["merge"], p["warps"], p["unroll"]) for p in whole[:6]], name == "llama_1b"
        through_memory, clustered = (12 if narrow else 8, 2), (16 if narrow else 8, 2)
        assert first[1] == ("global", *through_memory), "beside clusters, what merges through memory is there for long caches"
        assert first[2:5] == [("message", *clustered), ("message", 4, 1), ("message", *((4, 2) if narrow else (6, 3)))]
        assert {"global"} == {way for way, *_ in first[5:6]}
        splits = {p["splits"] for p in whole[:10] if p["merge"] == "message"}
        assert splits == {8, 16}, "clusters of 16 blocks win where there are thousands of positions"


def test_clusters_of_16_blocks_are_for_heads_that_leave_most_of_the_gpu_alone() -> None:
    many = {p["splits"] for p in FAMILY.space(evolve(QWEN, kv_heads=16).match(), H200).points if p["merge"] == "message"}
    few = {p["splits"] for p in FAMILY.space(evolve(QWEN, kv_heads=2).match(), H200).points if p["merge"] == "message"}
    assert 16 not in many and 16 in few


@cache
def grouped(group: int) -> tuple[Match, ScheduleSpace]:
    """Qwen's attention with so many heads in a group, and its space; many draws are of the same few."""
    match = evolve(QWEN, group=group).match()
    return match, FAMILY.space(match, H200)


@given(warps=st.integers(1, 16), stages=st.integers(1, 4), path=st.sampled_from(["staged", "whole", "tensor"]),
       group=st.sampled_from([2, 4, 8]))
def test_two_blocks_of_a_cluster_of_16_fit_on_an_sm(warps: int, stages: int, path: str, group: int) -> None:
    """Not every GPC has 16 SMs: 6 warps of two stages, which want an SM for each block, took twice the time of 4."""
    match, offered = grouped(group)
    shape = shape_of(match)
    choice = (path, warps, 4, stages)
    fits = space._fits_twice(shape, choice, ("message", 16), H200)
    shared = static_bytes(shape, path, warps, "message", 16) + bytes_of_stages(shape, path, warps, stages) + 1024
    assert fits is (2 * shared <= 228 << 10 and 2 * registers(shape, path, 4, stages) * 32 * warps <= 1 << 16)
    assert space._fits_twice(shape, choice, ("message", 8), H200)
    for point in offered.points:
        if point["merge"] != "global" and point["splits"] == 16:
            choice = tuple(point[name] for name in ("path", "warps", "lanes", "unroll"))
            assert space._fits_twice(shape, choice, (point["merge"], 16), H200)


@pytest.mark.parametrize("name", MODELS)
def test_stages_of_4_warps_come_first_and_their_parts_soon(name: str) -> None:
    """They won inside the chain of each model at few positions, whatever they take alone; dealt heads where KV heads are few."""
    model = MODELS[name]
    points = FAMILY.space(model.match(), H200).points
    staged = [p for p in points if (p["path"], p["warps"], p["unroll"], p["merge"]) == ("staged", 4, 2, "message")]
    if model.dtype is DType.F32:
        assert not staged
        return
    assert staged[0] is points[0] and staged[0]["early_kv"]
    dealt = {dict(p.items)["parts"] for p in staged if p["early_kv"] and dict(p.items).get("parts", 1) > 1}
    met = {dict(p.items)["parts"] for p in points[:9] if p in staged and dict(p.items).get("parts", 1) > 1}
    assert dealt == met
    assert bool(dealt) is (model.kv_heads <= 8 and model.group >= 4), "fewer heads are not worth reading K and V again"


def test_what_waits_before_it_reads_the_cache_comes_behind_what_does_not() -> None:
    points = FAMILY.space(QWEN.match(), H200).points
    twin = {p: Schedule({**dict(p.items), "early_kv": True}) for p in points if not p["early_kv"]}
    assert twin and all(points.index(early) < points.index(late) for late, early in twin.items() if early in points)
    assert all(point["early_kv"] for point in points[:12])


def test_first_schedules_fill_the_gpu_without_oversubscribing_it() -> None:
    first = FAMILY.space(QWEN.match(), H200).points[0]
    assert 64 <= first.integer("splits") * 8 <= 264


def test_schedules_that_differ_in_splits_share_a_kernel() -> None:
    points = FAMILY.space(QWEN.match(), H200).points
    digests = {FAMILY.lower(QWEN.match(), point, H200).digest for point in points}
    assert len(digests) < len(points)


@pytest.mark.parametrize("model,reason", [
    (Model(head_dim=60, rotary_dim=0), "multiples of 8"),
    (Model(rotary_dim=24), "rotary part of 24"),
    (Model(rotary_dim=20, interleaved=True), "rotary part of 20"),
    (Model(dtype=DType.I64), "float16, bfloat16, float32"),
    (Model(head_dim=4096, rotary_dim=0), "heads of 4096 channels do not fit"),
    (Model(norm="cube"), "unknown norm"),
], ids=lambda value: value if isinstance(value, str) else "model")
def test_what_is_not_served_is_refused_with_a_reason(model: Model, reason: str) -> None:
    answer = FAMILY.accepts(model.match(), H200)
    assert not answer and reason in answer.reason


@pytest.mark.compile
@pytest.mark.parametrize("target", TARGETS)
def test_builds_without_spills(target: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    if not backend.can_build(preset(target)):
        pytest.skip(backend.can_build(preset(target)).reason)
    points = FAMILY.space(QWEN.match(), preset(target)).points
    for path, merge in dict.fromkeys((p["path"], p["merge"]) for p in points):
        point = next(p for p in points if (p["path"], p["merge"]) == (path, merge))
        source = FAMILY.lower(QWEN.match(), point, preset(target))
        kernel = backend.build(source, preset(target))
        assert kernel.resources.spill_bytes == 0
        assert kernel.resources.shared_bytes - source.launches[0].shared_bytes <= STATIC_SHARED_BYTES
