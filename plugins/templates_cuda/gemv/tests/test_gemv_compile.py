"""The generated text, and that every architecture's compiler takes it: no spills, weights asked for before the wait."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from agentcompile_cuda_kit import include_dir
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_gemv import GemvFamily
from agentcompile_templates_cuda_gemv.direct_space import direct_schedule
from agentcompile_templates_cuda_gemv.ring_space import ring_schedule

from agentcompile_core.plugin_api import DType, Feature, Match, Schedule, StepSource, Target

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from gemv_cases import ADD_AUX, SILU_GATE, linear_match

FAMILY = GemvFamily()
INCLUDE = include_dir()
GOLDEN = Path(__file__).parent / "golden"
TARGETS = {"sm_80": "a100", "sm_86": "rtx3090", "sm_89": "rtx4090", "sm_90": "h200", "sm_100": "b200", "sm_120": "rtx5090"}
QKV = linear_match(4096, 2048, norm="rms")
GATE = linear_match(6144, 2048, pair=2, norm="rms", epilogue=SILU_GATE)
DOWN = linear_match(2048, 6144, aux=1, epilogue=ADD_AUX)
DIRECT = direct_schedule(warps_per_row=1, rows=2, unroll=4, blocks_per_sm=2)
RING = ring_schedule(rows=1, columns=1024, stages=3, in_flight=2, blocks_per_sm=2)


def _nvrtc(source: StepSource, arch: str, ptx: bool) -> tuple[bytes, str]:
    from cuda import pathfinder
    from cuda.bindings import nvrtc

    folder = pathfinder.find_nvidia_header_directory("cudart")
    kind = f"compute_{arch[3:]}" if ptx else arch
    options = [f"--gpu-architecture={kind}", "-default-device", "--std=c++17", f"-I{INCLUDE}", f"-I{folder}", f"-I{folder}/cccl"]
    options += [] if ptx else ["--ptxas-options=-v"]
    names, texts = zip(*source.headers)
    _, program = nvrtc.nvrtcCreateProgram(source.code.encode(), b"gemv.cu", len(names), [t.encode() for t in texts],
                                          [n.encode() for n in names])
    result, = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    log = b" " * len(log)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(result) == 0, log.decode()
    size, get = (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if ptx else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    binary = b" " * size(program)[1]
    get(program, binary)
    nvrtc.nvrtcDestroyProgram(program)
    return binary, log.decode()


def _nvcc(source: StepSource, arch: str, ptx: bool, folder: Path) -> tuple[bytes, str]:
    for name, text in (*source.headers, ("gemv.cu", source.code)):
        (folder / name).write_text(text, encoding="utf-8")
    command = ["nvcc", "-std=c++17", "-ptx" if ptx else "-cubin", f"-arch={arch}", f"-I{INCLUDE}", f"-I{folder}", "-Xptxas", "-v",
               str(folder / "gemv.cu"), "-o", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return (folder / "out").read_bytes(), done.stderr


def _compile(source: StepSource, arch: str, folder: Path, ptx: bool = False) -> tuple[bytes, str]:
    """Binary (or PTX text) and log, by NVRTC, else by nvcc."""
    try:
        import cuda.bindings  # noqa: F401
    except ImportError:
        if shutil.which("nvcc") is None:
            pytest.skip("neither NVRTC nor nvcc is installed")
        return _nvcc(source, arch, ptx, folder)
    return _nvrtc(source, arch, ptx)


def _target(arch: str) -> Target:
    return preset(TARGETS[arch])


@pytest.mark.compile
@pytest.mark.parametrize("arch", TARGETS)
def test_every_architecture_compiles_both_paths_without_spills(arch: str, tmp_path: Path) -> None:
    target = _target(arch)
    cases = [(QKV, DIRECT), (linear_match(64, 512, dtype=DType.BF16, norm="layer"), DIRECT)]
    if target.has(Feature.BULK_COPY):
        cases += [(GATE, RING), (DOWN, ring_schedule(rows=2, columns=512, stages=2, in_flight=1, blocks_per_sm=2))]
    for match, schedule in cases:
        source = FAMILY.lower(match, schedule, target)
        binary, log = _compile(source, arch, tmp_path)
        assert source.launches[0].entry.encode() in binary
        assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log) == [("0", "0")]
        assert "warning" not in log


@pytest.mark.compile
@pytest.mark.parametrize("match", [QKV, GATE, DOWN], ids=["qkv", "gate_up", "down"])
def test_the_first_choice_of_each_path_does_not_spill(match: object, tmp_path: Path) -> None:
    space = FAMILY.space(match, preset("h200"))
    for path in ("ring", "direct"):
        schedule = next(point for point in space.points if point["path"] == path)
        _, log = _compile(FAMILY.lower(match, schedule, preset("h200")), "sm_90", tmp_path)
        assert "0 bytes spill stores, 0 bytes spill loads" in log


@pytest.mark.compile
@pytest.mark.parametrize(("match", "most"), [(QKV, 56), (DOWN, 56), (GATE, 72)], ids=["qkv", "down", "gate_up"])
@pytest.mark.parametrize("warps", [4, 6, 8])
def test_tensor_cores_leave_registers_to_the_kernels_around_them(match: Match, most: int, warps: int, tmp_path: Path) -> None:
    """Left to itself the compiler takes 72 to 102, so that the blocks of the kernel behind it wait until these end."""
    ring = ring_schedule(rows=1, columns=1024, stages=3, in_flight=2, blocks_per_sm=2, warps=warps)
    _, log = _compile(FAMILY.lower(match, Schedule({**dict(ring.items), "path": "tensor"}), preset("h200")), "sm_90", tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert all(int(used) <= most for used in re.findall(r"Used (\d+) registers", log))


@pytest.mark.compile
def test_direct_path_asks_for_its_weights_before_the_dependency_wait(tmp_path: Path) -> None:
    text, _ = _compile(FAMILY.lower(QKV, DIRECT, preset("h200")), "sm_90", tmp_path, ptx=True)
    before, after = text.decode().split("griddepcontrol.wait", 1)
    weights = "ld.global.L1::no_allocate.v4"
    assert before.count(weights) == DIRECT.integer("rows") * DIRECT.integer("unroll")
    assert before.index("griddepcontrol.launch_dependents") < before.index(weights)
    assert weights in after


@pytest.mark.compile
@pytest.mark.parametrize("match", [
    linear_match(2048, 1536, dtype=DType.BF16, norm="rms"), linear_match(2048, 1536, dtype=DType.BF16, norm="layer", norm_bias=True),
    linear_match(2048, 1536, dtype=DType.BF16, norm="rms_one_plus", pair=2, epilogue=SILU_GATE),
], ids=["rms", "layer", "rms_one_plus_gate"])
def test_bfloat16_is_rounded_in_pairs(match: Match, tmp_path: Path) -> None:
    """One by one it is an instruction of a quarter of the rate: a microsecond of a layer was spent on it in front of two products."""
    for schedule in (ring_schedule(rows=1, columns=768, stages=4, in_flight=2, blocks_per_sm=2), DIRECT):
        text, _ = _compile(FAMILY.lower(match, schedule, preset("h200")), "sm_90", tmp_path, ptx=True)
        assert b"cvt.rn.bf16x2.f32" in text and b"cvt.rn.bf16.f32" not in text


@pytest.mark.compile
@pytest.mark.parametrize(("k", "warps"), [(8960, 6), (14336, 8), (6144, 8), (2048, 8), (20480, 4)])
def test_a_row_without_a_norm_is_asked_for_at_once_and_nothing_is_waited_for_before_it(k: int, warps: int, tmp_path: Path) -> None:
    match = linear_match(1536, k, aux=1, epilogue=ADD_AUX)
    schedule = ring_schedule(rows=1, columns=1024, stages=2, in_flight=2, blocks_per_sm=1, warps=warps)
    text, _ = _compile(FAMILY.lower(match, schedule, preset("h200")), "sm_90", tmp_path, ptx=True)
    consumers = max(text.decode().split("griddepcontrol.wait;"), key=lambda part: part.count("ld.shared"))
    staging = consumers[:consumers.index("bar.sync")]
    vectors = math.ceil(k / 8 / (32 * warps))
    turns = math.ceil(vectors / 8)
    assert staging.count("ld.global.v4") == staging.count("st.shared.v4") == math.ceil(vectors / turns)
    assert staging.rindex("ld.global.v4") < staging.index("st.shared.v4")
    assert "cvt.f32.f16" not in staging, "what the epilogue adds is converted where it is used"


@pytest.mark.parametrize(("name", "match", "schedule"), [("plan_direct.cuh", DOWN, DIRECT), ("plan_ring.cuh", GATE, RING)])
def test_plan_header_is_golden(name: str, match: object, schedule: object, request: pytest.FixtureRequest) -> None:
    source = FAMILY.lower(match, schedule, preset("h200"))
    text = source.headers[0][1].replace(source.digest, "DIGEST")
    if request.config.getoption("--update-golden", default=False):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert (GOLDEN / name).read_text(encoding="utf-8") == text
