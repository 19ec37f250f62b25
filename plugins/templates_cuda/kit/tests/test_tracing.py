"""Traced kernels compute what they did, note their phases in order, and are built by the GPU's compiler."""

import ctypes
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit import make_source, tracing
from agentcompile_cuda_kit.targets import preset

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import PHASES, Launch, StepSource, check_source
from agentcompile_core.worker.operands import make_inputs

pytest.importorskip("agentcompile_validator_emulation")
pytest.importorskip("agentcompile_rules_transformers")
from agentcompile_rules_transformers.testing import attention_case, linear_case, softmax_case
from agentcompile_validator_emulation.engine import Mode, build
from agentcompile_validator_emulation.module import EmulatedModule
from agentcompile_validator_emulation.testing import Emulated

from agentcompile_core.plugin_api import Case

H200 = preset("h200")
START, RELEASED, FIRST, LAST, MERGED, END = range(len(PHASES))
CASES = {
    "gemv": ("gemv", {"path": "ring"}, lambda: linear_case(n=(64, 32, 32), k=256, norm="rms")),
    "gemv_tensor": ("gemv", {"path": "tensor"}, lambda: linear_case(n=(64, 32, 32), k=256, norm="rms")),
    "attention": ("attention", {"merge": "message"}, lambda: attention_case(heads=(4, 2), head_dim=64, capacity=256)),
    "softmax": ("softmax", {}, lambda: softmax_case(shape=(2, 512))),
}


def lowered(name: str) -> tuple[Any, StepSource]:
    made_by, wanted, case = CASES[name]
    family = next(f for f in load_catalog(strict=False).template_families.values() if f.name == made_by)
    match = case()[0]
    point = next(p for p in family.space(match, H200).points if all(dict(p.items).get(key) == value for key, value in wanted.items()))
    return match, family.lower(match, point, H200)


def run(match: Any, source: StepSource, tensors: dict[str, torch.Tensor]) -> Any:
    """Runs a source by the emulator without its checks, one of which is that a kernel keeps nothing; the loaded library."""
    library = build(source.code, dict(source.headers), tuple(launch.entry for launch in source.launches), Mode.PLAIN)
    emulated = Emulated(source, match, H200)
    emulated.module = EmulatedModule(library, checked=False)
    emulated.run(tensors)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("name", CASES)
def test_a_traced_kernel_computes_the_same_and_notes_its_phases_in_order(name: str) -> None:
    match, plain = lowered(name)
    traced = tracing.traced(plain, "here")
    assert traced is not None and traced.digest != plain.digest and plain.digest not in traced.code
    check_source(match, traced, H200)
    kind = load_catalog(strict=False).kind(match.kind)
    given = make_inputs(match, kind, Case(family="normal", seed=1, position=200), "cpu")
    outs = []
    for source in (plain, traced):
        tensors = {key: tensor.clone() for key, tensor in given.items()} | {"out": torch.full(match.need("out").spec.shape, float("nan"),
                                                                                             dtype=torch.float16)}
        library = run(match, source, tensors)
        outs.append(tensors["out"])
    assert torch.equal(*outs)
    size = len(plain.launches) * tracing.BLOCKS * len(PHASES)
    notes = bytes((ctypes.c_ulonglong * size).in_dll(library, tracing.SYMBOL))
    for launch, blocks in zip(traced.launches, tracing.phases_of(notes, traced), strict=True):
        assert len(blocks) == launch.grid[0] * launch.grid[1] * launch.grid[2]
        for times in blocks:
            passed = [time for time in times if time]  # of the last warp of each phase: warps pass them in any order among each other
            assert times[START] == min(passed) and times[END] == max(passed) > times[START]
            assert bool(times[RELEASED]) == (len(traced.launches) == 1)
    if name.startswith("gemv"):
        assert all(times[FIRST] and times[LAST] >= times[FIRST] for times in blocks)
    if name == "attention":
        assert any(times[MERGED] for times in blocks) and not any(times[FIRST] for times in blocks if not times[MERGED])


def test_two_tags_are_two_sources_and_another_language_is_none() -> None:
    _, plain = lowered("gemv")
    one, other = tracing.traced(plain, "a"), tracing.traced(plain, "b")
    assert one is not None and other is not None and one.digest != other.digest and one.key != other.key
    assert tracing.traced(StepSource(language="cpp", digest="0" * 16, code="", launches=()), "a") is None


TWO = """#include "plan.cuh"
extern "C" __global__ void __launch_bounds__(Plan::threads > 1 ? 32 : 64)
one_kernel(float* out) {
  if (threadIdx.x > 3) return;
  out[threadIdx.x] = 1.0f;
}
extern "C" __global__ void other_kernel(float* out) { out[0] = 2.0f; }
"""


def test_of_two_kernels_each_notes_where_it_starts_and_ends() -> None:
    launches = [Launch(entry=f"{name}_kernel", grid=(2, 1, 1), block=(32, 1, 1), arguments=()) for name in ("one", "other")]
    traced = tracing.traced(make_source(TWO, plan={"threads": 32}, launches=launches), "")
    assert traced is not None
    assert "TracedBlock<0> traced_block;\n  if" in traced.code and "{\n  const ac::TracedBlock<1> traced_block; out[0]" in traced.code


def test_a_text_without_a_body_is_refused() -> None:
    source = StepSource(language="cuda", digest="0" * 16, code='extern "C" __global__ void broken(float* out);', launches=())
    with pytest.raises(ValueError, match="has no body"):
        tracing.traced(source, "")


TARGETS = ("h200", "a100", "rtx5090")


@pytest.mark.parametrize("target", TARGETS)
def test_every_family_of_a_decode_step_is_built_with_notes(target: str) -> None:
    cuda = pytest.importorskip("agentcompile_runtime_cuda.backend")
    backend = cuda.CudaBackend()
    if backend.can_build(preset(target)) is not True:
        pytest.skip("no compiler for CUDA here")
    for made_by, _, case in CASES.values():
        family = next(f for f in load_catalog(strict=False).template_families.values() if f.name == made_by)
        match = case()[0]
        source = family.lower(match, family.space(match, preset(target)).points[0], preset(target))
        plain, traced = backend.build(source, preset(target)), backend.build(backend.traced(source, "x"), preset(target))
        assert tracing.SYMBOL.encode() in traced.binary and tracing.SYMBOL.encode() not in plain.binary


