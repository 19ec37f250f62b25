"""Products by warpgroups on a GPU, which nothing emulates: every layout, ragged extents, tails and splits, against fp64; repeated."""

import sys
from pathlib import Path

import pytest
import torch
from agentcompile_cuda_kit.targets import capabilities
from agentcompile_rules_transformers.testing import matmul_case
from agentcompile_templates_cuda_gemm import GemmFamily
from attrs import evolve

from agentcompile_core.plugin_api import DType, Graph, Match, Schedule, Target, argument_values

pytest.importorskip("agentcompile_validator_emulation")
sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from test_gemm import budget_use, drawn

pytestmark = pytest.mark.device
FAMILY = GemmFamily()
EXTENTS = ((8, 8, 8), (136, 264, 72), (384, 520, 1096), (1000, 256, 64))


def variant() -> Target:
    """The live device as the architecture-specific variant that has warpgroups."""
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    live = backend.live_target()
    if live is None or not live.arch.startswith("sm_90"):
        pytest.skip("there is no GPU of architecture sm_90")
    return evolve(live, arch="sm_90a", capabilities=capabilities("sm_90a"))


def run(match: Match, point: Schedule, target: Target, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` after the schedule ran on the GPU."""
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    source = FAMILY.lower(match, point, target)
    handle = backend.load(backend.build(source, target))
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    there |= {w.name: torch.zeros(w.nbytes, dtype=torch.uint8, device="cuda") for w in source.workspaces}
    for launch in source.launches:
        addresses = {name: tensor.data_ptr() for name, tensor in there.items()}
        backend.prepare_launch(handle, launch, argument_values(launch, addresses), False)(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return {name: there[name].cpu() for name in tensors}


def product(turned: str, extents: tuple[int, int, int], dtype: DType) -> tuple[Match, Graph]:
    m, n, k = extents
    a, b = ((k, m) if "a" in turned else (m, k)), ((n, k) if "b" in turned else (k, n))
    return matmul_case(shapes=((2, *a), (2, *b)), turned=turned, dtype=dtype, bias=(n,), activation="relu")


def points(target: Target) -> list[Schedule]:
    """One of every tile of warpgroups, with the terms in one piece and dealt out."""
    match, _ = product("b", (4096, 4096, 4096), DType.F16)
    found = {(p["rows"], p["columns"], p["warp_rows"]): p for p in FAMILY.space(match, target).points if p["path"] == "wgmma"}
    return [Schedule({**dict(point.items), "splits": splits}) for point in found.values() for splits in (1, 2)]


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_every_tile_is_within_budget_and_repeats(turned: str, dtype: DType) -> None:
    target = variant()
    for number, extents in enumerate(EXTENTS):
        match, graph = product(turned, extents, dtype)
        tensors = drawn(match, number)
        for point in points(target):
            found = run(match, point, target, tensors)
            assert budget_use(match, graph, found) <= 1.0, (str(point), extents)
            assert torch.equal(run(match, point, target, tensors)["out"], found["out"]), (str(point), extents)


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
def test_integers_are_exact(turned: str) -> None:
    target = variant()
    match, _ = product(turned, (264, 392, 520), DType.F16)
    tensors = drawn(match, 7, integers=True)
    a, b = (tensors[name].double().mT if name in turned else tensors[name].double() for name in "ab")
    wanted = (a @ b + tensors[match.operands[2].name].double()).relu()
    for point in points(target):
        assert torch.equal(run(match, point, target, tensors)["out"].double(), wanted), str(point)
