"""Building without a GPU: six architectures, both compilers, and errors that say what to do."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agentcompile_cuda_kit import include_dir
from agentcompile_cuda_kit.targets import PRESETS, built_arch, capabilities, preset
from agentcompile_runtime_cuda import compilers, headers
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.ceiling import ceiling_source, read_ceiling_gbps
from attrs import evolve

from agentcompile_core.plugin_api import BuildError, Feature, Launch, Reject, StepSource, Target

pytestmark = pytest.mark.compile

CODE = """
#include <agentcompile/ptx.cuh>
#include "plan.cuh"
extern "C" __global__ void __launch_bounds__(Plan::threads) scale(const __half* x, __half* y, float factor, int n) {
  __shared__ float factors[Plan::threads];
  ac::launch_dependents();
  ac::grid_dependency_wait();
  factors[threadIdx.x] = factor;
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = __float2half(factors[threadIdx.x ^ 1] * __half2float(x[i]));
}
extern "C" __global__ void nothing() {}
"""
PLAN = "#pragma once\nstruct Plan { static constexpr int threads = 256; };\n"
ONE_OF_EACH_ARCH = {t.arch: t for t in PRESETS.values()}


def source(code: str = CODE, shared_bytes: int = 0, entry: str = "scale", **changes: object) -> StepSource:
    launch = Launch(entry=entry, grid=(1, 1, 1), block=(256, 1, 1), shared_bytes=shared_bytes, arguments=())
    made = StepSource(digest="d1", code=code, headers=(("plan.cuh", PLAN),), launches=(launch,))
    return evolve(made, **changes)


@pytest.fixture(scope="module", params=["nvrtc", "nvcc"])
def backend(request: pytest.FixtureRequest) -> CudaBackend:
    found = compilers.choose(request.param)
    if isinstance(found, Reject):
        pytest.skip(found.reason)
    return CudaBackend(request.param)


def test_architectures_of_the_presets_are_the_six_promised() -> None:
    assert sorted(ONE_OF_EACH_ARCH) == ["sm_100", "sm_120", "sm_80", "sm_86", "sm_89", "sm_90"]


@pytest.mark.parametrize("arch", sorted(ONE_OF_EACH_ARCH))
def test_builds_a_cubin_for_every_architecture(backend: CudaBackend, arch: str) -> None:
    target = ONE_OF_EACH_ARCH[arch]
    assert backend.can_build(target) is True
    kernel = backend.build(source(), target)
    assert kernel.binary.startswith(b"\x7fELF") and b"scale" in kernel.binary
    assert (kernel.backend, kernel.arch, kernel.digest) == ("cuda", arch, "d1")
    assert kernel.compiler == backend.compiler() and kernel.compiler.split()[0] in ("nvrtc", "nvcc")
    assert 4 <= kernel.resources.registers <= 64 and kernel.resources.spill_bytes == 0
    assert kernel.resources.shared_bytes == 1024
    assert 0 < kernel.build_s < 60


def test_the_same_source_builds_the_same_binary(backend: CudaBackend) -> None:
    assert backend.build(source(), preset("h100")).sha256 == backend.build(source(), preset("h200")).sha256


def test_shared_memory_counts_static_and_dynamic(backend: CudaBackend) -> None:
    assert backend.build(source(shared_bytes=100_000), preset("h100")).resources.shared_bytes == 101_024
    with pytest.raises(BuildError, match=r"scale needs 101377 bytes of shared memory per block; rtx4090 allows 101376"):
        backend.build(source(shared_bytes=100_353), preset("rtx4090"))
    assert backend.build(source(shared_bytes=100_352), preset("rtx4090")).resources.shared_bytes == 101_376


def test_spills_are_reported(backend: CudaBackend) -> None:
    body = "".join(f"float a{i} = x[{i} * 97 + threadIdx.x];" for i in range(120)) + "__syncthreads();"
    total = "+".join(f"a{i} * x[{i} + blockIdx.x]" for i in range(120))
    code = f'extern "C" __global__ void __launch_bounds__(1024, 2) scale(const volatile float* x, float* y) {{ {body} *y = {total}; }}'
    kernel = backend.build(source(code), preset("h100"))
    assert kernel.resources.spill_bytes > 0 and kernel.resources.registers <= 32


def test_a_block_that_wants_more_registers_than_an_sm_has_is_refused(backend: CudaBackend) -> None:
    body = "".join(f"float a{i} = x[{i} * 97 + threadIdx.x];" for i in range(120)) + "__syncthreads();"
    total = "+".join(f"a{i} * x[{i} + blockIdx.x]" for i in range(120))
    code = f'extern "C" __global__ void scale(const volatile float* x, float* y) {{ {body} *y = {total}; }}'
    wide = Launch(entry="scale", grid=(1, 1, 1), block=(1024, 1, 1), arguments=())
    with pytest.raises(BuildError, match=r"too many registers: scale needs \d+ in each of 1024 threads, \d+ per block; h100 has 65536"):
        backend.build(source(code, launches=(wide,)), preset("h100"))
    assert backend.build(source(code), preset("h100")).resources.registers > 64


@pytest.mark.parametrize(("code", "message"), [
    (CODE.replace("float factor", "flot factor"), r"^\S+\.cu\(\d+\): error: .*flot"),
    (CODE.replace("agentcompile/ptx.cuh", "agentcompile/absent.cuh"), r"absent\.cuh"),
    (CODE.replace("factors[Plan::threads]", "factors[65536]"), r"ptxas error.*shared"),
    ("", r"defines no kernel 'scale'; it defines none"),
])
def test_a_wrong_source_names_its_first_error(backend: CudaBackend, code: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        backend.build(source(code), preset("h100"))


def test_a_missing_entry_names_those_that_are_there(backend: CudaBackend) -> None:
    with pytest.raises(BuildError, match=r"defines no kernel 'other'; it defines .*(nothing, scale|scale, nothing)"):
        backend.build(source(entry="other"), preset("h100"))


def test_the_whole_log_is_a_note(backend: CudaBackend) -> None:
    with pytest.raises(BuildError) as caught:
        backend.build(source(CODE.replace("int n", "int m")), preset("h100"))
    assert '"n" is undefined' in str(caught.value) and "i < n" in caught.value.__notes__[0]


def test_an_endless_compile_costs_only_itself(backend: CudaBackend) -> None:
    depth = "".join(f"template <> struct F<{n}> {{ static constexpr int value = 1; }};" for n in (0, 1))
    endless = ("template <int N, int M> struct G { static constexpr int value = "
               "G<N - 1, 2 * M>::value + G<N - 1, 2 * M + 1>::value; };"
               "template <int M> struct G<0, M> { static constexpr int value = 1; };"
               f"template <int N> struct F;{depth}"
               "extern \"C\" __global__ void scale(int* y) { *y = G<26, 1>::value; }")
    start = time.monotonic()
    with pytest.raises(BuildError, match=r"did not (answer|finish) within 1 s and was killed"):
        backend.build(source(endless), preset("h100"), deadline_s=1)
    assert time.monotonic() - start < 10
    assert backend.build(source(), preset("h100")).resources.registers > 0


def test_threads_build_at_the_same_time() -> None:
    backend = CudaBackend()
    codes = [CODE.replace("factors[threadIdx.x ^ 1]", f"factors[threadIdx.x ^ {n}]") for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda code: backend.build(source(code), preset("h100")).sha256, codes))
    assert together == [backend.build(source(code), preset("h100")).sha256 for code in codes] and len(set(together)) == 4


def test_features_that_the_target_lacks_are_refused_before_compiling(backend: CudaBackend) -> None:
    wanted = source(features=(Feature.BULK_COPY, Feature.MBARRIER))
    with pytest.raises(BuildError, match=r"sm_80 has no bulk_copy, mbarrier"):
        backend.build(wanted, preset("a100"))
    with pytest.raises(BuildError, match=r"sm_100 has no wgmma"):
        backend.build(source(features=(Feature.WGMMA,)), preset("b200"))
    with pytest.raises(BuildError, match=r"language 'metal'"):
        backend.build(source(language="metal"), preset("h100"))


def test_an_architecture_that_no_compiler_knows_is_rejected(backend: CudaBackend) -> None:
    future = evolve(preset("h100"), name="future", arch="sm_999")
    old = evolve(preset("h100"), name="old", arch="sm_75")
    for target, words in ((future, "cannot build for sm_999; it knows sm_"), (old, "older than sm_80")):
        answer = backend.can_build(target)
        assert isinstance(answer, Reject) and words in answer.reason


def test_architecture_specific_variants_build(backend: CudaBackend) -> None:
    variant: Target = evolve(preset("h100"), arch="sm_90a", capabilities=capabilities("sm_90a"))
    assert backend.can_build(variant) is True
    assert backend.build(source(features=(Feature.WGMMA,)), variant).arch == "sm_90a"


FENCED = CODE.replace("{", '{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', 1)


def test_a_source_that_needs_a_variant_is_built_for_it_and_no_other_is(backend: CudaBackend) -> None:
    fenced = source(FENCED, features=(Feature.WGMMA,))
    kernel = backend.build(fenced, preset("h100"))
    assert kernel.arch == "sm_90" and kernel.binary
    with pytest.raises(BuildError, match="wgmma"):
        backend.build(evolve(fenced, features=()), preset("h100"))
    for target in PRESETS.values():
        assert built_arch(evolve(fenced, features=()), target) == target.arch
        assert built_arch(fenced, target) == ("sm_90a" if target.arch == "sm_90" else target.arch)
        assert target.has(Feature.WGMMA) is (target.arch == "sm_90")


def test_a_header_may_not_leave_its_folder() -> None:
    found = compilers.choose("nvcc")
    if isinstance(found, Reject):
        pytest.skip(found.reason)
    for name in ("../escape.cuh", "/tmp/escape.cuh"):
        with pytest.raises(BuildError, match="not a relative name"):
            CudaBackend("nvcc").build(source(headers=((name, "x"),)), preset("h100"))


def test_without_any_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "nvrtc_usable", lambda: Reject("NVRTC is not installed"))
    monkeypatch.setattr(headers, "nvcc", lambda: None)
    backend = CudaBackend()
    answer = backend.can_build(preset("h100"))
    assert isinstance(answer, Reject) and answer.reason.startswith("NVRTC is not installed; no working nvcc")
    assert backend.compiler() == "none"
    with pytest.raises(BuildError, match="NVRTC is not installed"):
        backend.build(source(), preset("h100"))


def test_nvcc_steps_in_where_nvrtc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    if headers.nvcc() is None:
        pytest.skip("no nvcc")
    monkeypatch.setattr(compilers, "nvrtc_usable", lambda: Reject("NVRTC is not installed"))
    assert CudaBackend().compiler().startswith("nvcc")


def test_an_unknown_compiler_is_refused() -> None:
    answer = CudaBackend("icc").can_build(preset("h100"))
    assert isinstance(answer, Reject) and "unknown CUDA compiler 'icc'; allowed: nvrtc, nvcc" in answer.reason


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = ("import sys, agentcompile_runtime_cuda as p; b = p.agentcompile_backends()[0];"
            "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'cuda')])")
    roots = {str(include_dir().parents[1]), str(Path(compilers.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": ":".join(roots), "PATH": "/usr/bin"})
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("arch", sorted(ONE_OF_EACH_ARCH))
def test_the_read_ceiling_kernel_keeps_its_loads_in_flight(arch: str) -> None:
    kernel = CudaBackend().build(ceiling_source(132, 1024, 1 << 20), ONE_OF_EACH_ARCH[arch])
    assert kernel.resources.spill_bytes == 0 and 32 <= kernel.resources.registers <= 64  # 8 loads of 4 words


def test_the_read_ceiling_without_a_gpu_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        assert read_ceiling_gbps() > 100
    else:
        with pytest.raises(Exception, match="the read ceiling cannot be measured: torch"):
            read_ceiling_gbps()
