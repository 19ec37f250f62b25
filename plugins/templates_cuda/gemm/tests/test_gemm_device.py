"""Products by warpgroups on a GPU: every layout, ragged extents, tails and splits, against fp64; repeated."""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import capabilities
from agentcompile_rules_transformers.testing import matmul_case
from agentcompile_templates_cuda_gemm import GemmFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import Bounded, DType, Graph, Kernel, Match, Schedule, Target, argument_values, compare

pytest.importorskip("agentcompile_validator_emulation")
sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from test_gemm import drawn, expected_of

pytestmark = pytest.mark.device
FAMILY = GemmFamily()
KERNELS: dict[str, Kernel] = {}  # by digest: extents do not change a kernel's text
EXTENTS = ((8, 8, 8), (136, 264, 72), (384, 520, 1096), (1000, 256, 64), (2056, 1288, 200))


@functools.cache
def backend() -> Any:
    """The CUDA backend."""
    return pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()


def variant() -> Target:
    """The live device as the architecture-specific variant that has warpgroups."""
    live = backend().live_target()
    if live is None or not live.arch.startswith("sm_90"):
        pytest.skip("there is no GPU of architecture sm_90")
    return evolve(live, arch="sm_90a", capabilities=capabilities("sm_90a"))


def build(match: Match, schedules: list[Schedule], target: Target) -> None:
    """Build what the schedules need and nobody has built yet, side by side."""
    sources = {source.digest: source for source in (FAMILY.lower(match, point, target) for point in schedules)}
    missing = [source for digest, source in sources.items() if digest not in KERNELS]
    with ThreadPoolExecutor() as pool:
        KERNELS.update(zip((source.digest for source in missing), pool.map(lambda s: backend().build(s, target), missing), strict=True))


def run(match: Match, point: Schedule, target: Target, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the schedule writes, on the GPU where ``tensors`` are; they stay as they are."""
    build(match, [point], target)
    source = FAMILY.lower(match, point, target)
    handle = backend().load(KERNELS[source.digest])
    there = {**tensors, "out": tensors["out"].clone()}
    there |= {w.name: torch.zeros(w.nbytes, dtype=torch.uint8, device="cuda") for w in source.workspaces}
    for launch in source.launches:
        addresses = {name: tensor.data_ptr() for name, tensor in there.items()}
        backend().prepare_launch(handle, launch, argument_values(launch, addresses), False)(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return there["out"]


def on_gpu(match: Match, graph: Graph, seed: int) -> tuple[dict[str, torch.Tensor], Bounded]:
    """Operands on the GPU, and what is expected of them, computed there too: on the host it takes longer than all else."""
    tensors = _there(drawn(match, seed))
    return tensors, expected_of(match, graph, tensors)


def _there(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def product(turned: str, extents: tuple[int, int, int], dtype: DType, batch: tuple[int, ...] = (2,), **said: Any) -> tuple[Match, Graph]:
    m, n, k = extents
    a, b = ((k, m) if "a" in turned else (m, k)), ((n, k) if "b" in turned else (k, n))
    said = said or {"bias": (n,), "activation": "relu"}
    return matmul_case(shapes=((*batch, *a), (*(() if said.get("weight") else batch), *b)), turned=turned, dtype=dtype, **said)


def points(target: Target) -> list[Schedule]:
    """Every tile of warpgroups, alone and in clusters, by blocks that stay and that do not, with the terms in one piece and dealt out."""
    match, _ = product("b", (4096, 4096, 4096), DType.F16)
    found = [p for p in FAMILY.space(match, target).points if p["path"] == "wgmma" and p["splits"] == 1]
    assert len({(p["rows"], p["columns"], p["warp_rows"], p["cluster"], p["resident"]) for p in found}) == len(found) == 24
    return [Schedule({**dict(point.items), "splits": splits}) for point in found for splits in (1, 2)]


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_every_tile_is_within_budget_and_repeats(turned: str, dtype: DType) -> None:
    target = variant()
    for number, extents in enumerate(EXTENTS):
        match, graph = product(turned, extents, dtype)
        tensors, expected = on_gpu(match, graph, number)
        given_before = {name: tensor.clone() for name, tensor in tensors.items() if name != "out"}
        build(match, points(target), target)
        for point in points(target):
            found = run(match, point, target, tensors)
            assert compare(found, expected).budget_use <= 1.0, (str(point), extents)
            assert all(torch.equal(tensors[name], before) for name, before in given_before.items()), (str(point), extents)
            for _ in range(3):  # a place of the ring that is filled too early is wrong now and then
                assert torch.equal(run(match, point, target, tensors), found), (str(point), extents)


@settings(max_examples=4, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_product_by_any_schedule_is_within_budget(data: st.DataObject) -> None:
    """Batches of one and two axes, one b for all, tails that read other operands, blocks that take several tiles each."""
    drawn_ones = [one_product(data) for _ in range(15)]
    with ThreadPoolExecutor() as pool:  # a build takes seconds, a run none
        list(pool.map(lambda one: build(one[0], [one[2]], one[3]), drawn_ones))
    for match, graph, point, target, seed in drawn_ones:
        tensors, expected = on_gpu(match, graph, seed)
        found = run(match, point, target, tensors)
        assert compare(found, expected).budget_use <= 1.0, (match.id, str(point))
        assert torch.equal(run(match, point, target, tensors), found), (match.id, str(point))


def one_product(data: st.DataObject) -> tuple[Match, Graph, Schedule, Target, int]:
    """A product, a schedule for it on a device of some size, and a seed."""
    target = evolve(variant(), sm_count=data.draw(st.sampled_from((2, 6, 132)), "SMs"))
    extents = tuple(8 * data.draw(st.integers(1, 60), name) for name in "mnk")
    said = data.draw(st.sampled_from(({"residual": True}, {"bias": extents[:2]}, {"activation": "gelu"}, {"weight": True},
                                      {"weight": True, "bias": (extents[1],), "residual": True})), "tail")
    turned, dtype = data.draw(st.sampled_from(("", "a", "b", "ab")), "turned"), data.draw(st.sampled_from((DType.F16, DType.BF16)), "type")
    match, graph = product(turned, extents, dtype, data.draw(st.sampled_from(((), (3,), (2, 3))), "batch"), **said)
    return match, graph, data.draw(st.sampled_from(points(target)), "schedule"), target, data.draw(st.integers(0, 99), "seed")


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
def test_pieces_of_fp32_are_within_budget_and_repeat(turned: str) -> None:
    """On a device tensor cores truncate where they add, which no emulator does."""
    target = variant()
    space = [p for p in FAMILY.space(product("b", (4096, 4096, 4096), DType.F32)[0], target).points if p["path"] == "bf16x6"]
    assert len(space) >= 6
    for number, extents in enumerate((*EXTENTS, (65, 33, 4099), (130, 70, 20000))):
        match, graph = product(turned, extents, DType.F32, ())
        tensors, expected = on_gpu(match, graph, number)
        schedules = [Schedule({**dict(p.items), "splits": splits}) for p in space for splits in (1, 2)]
        build(match, schedules, target)
        for point in schedules:
            found = run(match, point, target, tensors)
            assert compare(found, expected).budget_use <= 1.0, (str(point), extents)
            assert torch.equal(run(match, point, target, tensors), found), (str(point), extents)


def test_heads_whose_steps_do_not_grow_with_the_axes_are_fetched_as_they_lie() -> None:
    """Queries times keys [batch, position, head, element], read by head: heads are nearer to each other than positions."""
    target = variant()
    match, _ = matmul_case(shapes=((2, 3, 264, 72), (2, 3, 200, 72)), turned="b")
    shapes = {"a": (2, 264, 3, 72), "b": (2, 200, 3, 72)}
    lying = {"outer": 2, "inner": 3, "a_outer": 264 * 3 * 72, "a_inner": 72, "a_row": 3 * 72, "a_column": 1,
             "b_outer": 200 * 3 * 72, "b_inner": 72, "b_row": 1, "b_column": 3 * 72}
    operands = tuple(evolve(o, spec=evolve(o.spec, shape=shapes.get(o.name, o.spec.shape))) for o in match.operands)
    match = evolve(match, operands=operands, attributes=tuple({**dict(match.attributes), **lying}.items()))
    tensors = _there(drawn(match, 11, integers=True))
    build(match, points(target), target)
    a, b = (tensors[name].double().transpose(1, 2) for name in "ab")
    for point in points(target):
        assert torch.equal(run(match, point, target, tensors).double(), a @ b.mT), str(point)


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
def test_integers_are_exact(turned: str) -> None:
    target = variant()
    match, _ = product(turned, (264, 392, 520), DType.F16)
    tensors = _there(drawn(match, 7, integers=True))
    build(match, points(target), target)
    a, b = (tensors[name].double().mT if name in turned else tensors[name].double() for name in "ab")
    wanted = (a @ b + tensors[match.operands[2].name].double()).relu()
    for point in points(target):
        assert torch.equal(run(match, point, target, tensors).double(), wanted), str(point)
